"""Extracts events from a log's lines: tracebacks, known failures, watchdog and launcher lines, NCCL's setup.

A log of gigabytes has few relevant lines: a block without any word of a failure is skipped, and of other blocks only
lines with such a word are parsed, or those of an open traceback.
"""

from __future__ import annotations

import calendar
import json
import re
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, replace

from distdiag.facts.logs.demux import LONGEST_LINE, Demux, Stream, harmless, plain
from distdiag.facts.logs.line_patterns import Patterns
from distdiag.facts.logs.signs import Signs
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.facts.logs.line_patterns import Rows

EXIT = "exit-of-"
_TEXT, _TAIL, _FRAMES, _CHAIN = 600, 8, 64, 4
_MESSAGE = 4096
_TAIL_OF_CHAIN = 120
"""Characters of an exception that another was raised from."""
_MOST_EVENTS, _MOST_OF_STREAM, _MOST_OF_KIND, _MOST_EXITS = 20_000, 200, 24, 10_000
_MOST_STREAMS, _MOST_COMMS = 20_000, 20_000
_LONG_AGO = 2000
_LEARN_BLOCKS, _LOOKED_AT = 50, 64

RANK = re.compile(rb"\[rank(\d{1,6})\]:[ ]?")
_RANK_LATER = re.compile(
    rb"[^\n]{1,80}?\[rank(\d{1,6})\]:[ ]?|[^\n]{1,400}?\[rank(\d{1,6})\]:(?=\[[EWIF]\d{3,4} )", re.DOTALL
)
"""`[rank3]:` behind a stamp, a blank, a quote mark, a launcher's prefix, or a progress bar without a newline."""
_LABELLED = re.compile(rb"^[^\n]{1,80}?\[rank(\d{1,6})\]:", re.MULTILINE)
_TIMES = (
    re.compile(rb"\b[EWIF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d(?:\.\d{1,9})?)"),
    re.compile(rb"\b20\d\d[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d(?:[.,]\d{1,9})?)"),
    re.compile(rb"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) ([ \d]\d) (\d\d):(\d\d):(\d\d(?:\.\d{1,9})?)"),
)
_MONTHS = (b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec")
_LAST = re.compile(r"^([A-Za-z_][\w.]{0,150})(?:: (.*)|:?)$", re.DOTALL)
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:?$)")
_TORN = re.compile(
    r"^(?![\w.]+(?:Error|Exception|Interrupt|Exit|Iteration|Group)\b)[\w.]+$|^[\w.]+: \[[^\]]*$|gloo/transport/"
)
"""A type without its end, or a message cut within the path of a source file or within gloo's text."""
_GROUP_HEAD = b"  + Exception Group Traceback (most recent call last)"
_GROUP_MARGIN = re.compile(r"^ +[|+](?:[-+ \d]*-$| )?")
_PART = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:: |:?$)(?!.*\(\d+ sub-exceptions?\)$)")
"""A sub-exception of a group, other than a nested group."""
_HEAD = "Traceback (most recent call last)"
_LINK = re.compile(
    r"(?P<cause>The above exception was the direct)|(?P<context>During handling of the above)"
    r"|(?P<spawned>-- Process \d+ terminated with the following error:$)"
)
"""Lines between two tracebacks of one exception; the last is torch.multiprocessing.spawn's, which repeats it."""
_LINKS = {"cause": "raised from", "context": "raised while handling"}
_TERMINATE = re.compile(r"terminate called after throwing an instance of '(?!c10::Dist)(?P<raised>[^']{1,200})'")
_FRAME = re.compile(r'^\s*File "([^"]{1,400})", line (\d{1,18})(?:, in (.{1,120}))?$')
_INFO = re.compile(rb"([\w.-]{1,200}):(\d{1,18}):(\d{1,18}) \[(-?\d{1,18})\] NCCL INFO (.*)")
_COMM = re.compile(rb"comm 0x\w+ rank (\d{1,6}) n[Rr]anks (\d{1,6}).*?(?:commId (0x\w+))?\D*- Init (START|COMPLETE)")
_OOB = re.compile(rb"Bootstrap ?: Using (\[\d+\])?([^: ]+):([\d.a-f:\[\]]+)<")
_NET = re.compile(rb"NET/(\w+) ?: Using \[\d")
_PLUGIN = re.compile(rb"NET/Plugin ?: (?:Loaded net plugin ([^(]{1,60}?) ?(?:\(|$)|No plugin found|Plugin load )")
_VIA = re.compile(rb" NCCL INFO (?:Channel|Ring) [^\n]{0,200}? via (P2P|SHM|NET/[\w.-]+)((?:/[\w.-]+)*)")
_RAISED = re.compile(
    r"^(?P<before>[^\"'`=()]{0,120}?(?<![\w.-]))"
    r"(?P<raised>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Failed|NotFound)"
    r"(?:: \S.*|:? *$))"
)
"""An exception outside a traceback: alone, or behind a stamp, a level and the name of a logger."""
_NO_RAISE = re.compile(
    r"(?i)\b(?:warn\w*|info|debug|notice|except|raises?|catch\w*|caught|handled|expected|ignor\w*|retry\w*|tests?|docs?)\b"
)
_HARMLESS = re.compile(
    r"(?i)\b(?:warn(?:ing)?|\w*warning|info|debug|notice|deprecat\w*|ignor\w*|retry\w*|retries|fall(?:ing|s)?[ -]?back|"
    r"skip\w*|non-?fatal|recover\w*|optional\w*|attempt \d+|no errors?|0 (?:errors?|failed)|errors?[ :=]+0|"
    r"failed[ :=]+0|failures?[ :=]+0|events?[ :=]+0|without errors?|continu\w+)\b|NCCL INFO|^\s*at |%\|"
    r"|^\s*\{(?!.{0,200}\"level\w*\": ?\"(?:err|fatal|crit))"
)
"""Words of a line that reports no failure, despite a word of one."""
_LIKE = re.compile(
    r"(?i)\b(?:\w*error|err\d+|fatal|fail(?:ed|ure|s|ing)?|\w*exception|abort(?:ed|ing)?|panic|critical|cannot|"
    r"could not|unable|denied|refused|killed|no such|not found|unsupported|invalid|timed out|unreachable|corrupt\w*|"
    r"mismatch\w*)\b"
)
"""Words that suggest a failure in a line unknown to the patterns."""
_MOST_LIKE = 3
_LAST_CHARS = 300
"""Characters kept of a file's last line."""
_PROGRESS = re.compile(
    rb"(?im)^(?![^\n]{0,300}?(?:error|exception|wandb|fail))[^\n]{0,200}?(?:\b(?:step|iter|iteration|epoch)\b\W{0,6}\d|"
    rb"\bloss\b\W{0,6}\d|\d ?(?:it/s|s/it)\b|tokens/s|\btraining (?:is )?(?:completed?|finished|done)\b)[^\n]*"
)
_NCCL_ERROR_LINES = 4
"""Length of torch's report of an NCCL error: its reason is in the lines after the first, which have no [rankN]."""
_PROGRESS_LINES = 3
"""Lines of progress after a failure that prove that the job continued: a bar is redrawn once at exit."""
_SUMMARY_HEAD = re.compile(r"^(?:\S.{0,300} FAILED|Failures:|Root Cause \(first observed failure\):)\s*$")
_SUMMARY = re.compile(r"^ {0,4}(time|host|rank|exitcode|error_file|traceback)\s*: (.*)$")
_OF_SUMMARY = re.compile(r"[-=\s]|\[\d+\]:|Failures:|  <NO_OTHER_FAILURES>|\S+ FAILED$")
_WATCHDOG = ("Watchdog caught", "ast enqueued")
_PHASES = (b"Bootstrap", b"Init START", b"Trees", b"Connected all rings", b"Connected all trees", b"Init COMPLETE")


@record
class Event:
    """An event reported by a line or a traceback.

    `id`: of the knowledge, "exception", "watchdog", "status", "exit", "restart". `rank`: the reporting rank, if the
    line names it. `line`: in its file, from 1; `at`: seconds since the start of the year, None without a time.
    `groups`: the line's values by name. `count`: occurrences in that stream.
    """

    id: str
    stream: int
    line: int
    text: str
    at: float | None = None
    generation: int = 0
    rank: int | None = None
    groups: dict[str, str] = field(default_factory=dict)
    frames: tuple[str, ...] = ()
    count: int = 1


@dataclass
class NcclRank:
    """NCCL_DEBUG=INFO of one process. `phase`: of the last init, as an index of PHASES."""

    host: str
    pid: int
    rank: int | None = None
    nranks: int | None = None
    phase: int = 0
    completed: int = 0
    started: int = 0
    interface: str = ""
    address: str = ""
    network: str = ""
    version: str = ""
    plugin: str = ""
    edges: dict[str, int] = field(default_factory=dict)


PHASES = ("bootstrap", "init started", "topology and rings", "rings connected", "trees connected", "complete")


@dataclass
class _Traceback:
    """A traceback being read.

    `named`: its lines begin with `[rank3]:`, as written by torch's excepthook for uncaught exceptions; `last`: the
    exception and the lines after it; `last_line`: its line.
    """

    line: int
    generation: int
    at: float | None
    named: bool = False
    frames: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    last_line: int = 0
    chain: list[str] = field(default_factory=list)
    end: int = 0
    went_on: bool = False
    """The rank wrote more after it."""
    link: str = ""
    """How the next traceback follows from this exception."""
    links: list[str] = field(default_factory=list)
    """The exceptions it was raised from, the last first."""
    parts: list[str] = field(default_factory=list)
    """The sub-exceptions of a group."""
    grouped: bool = False
    """Of an ExceptionGroup, so its lines have a margin."""
    broken: bool = False
    """Interrupted by another line before its exception."""
    flat: bool = False
    """Pasted without the indentation of its frames."""
    code: bool = False
    """For a flat one: the next line is code."""
    bare: bool = False
    """An exception without a traceback."""
    ignored: bool = False
    """Reported by Python as ignored."""

    def next_begins(self) -> bool:
        """Continue with the next traceback, if it is one of the same exception."""
        if self.last and not self.link:  # of another process without a prefix
            return False
        if self.last:
            if how := _LINKS.get(self.link):
                self.links.insert(0, f"{how} {self.last[0][:_TAIL_OF_CHAIN]}")
            self.follow()
        return True

    def without_margin(self, text: str) -> str:
        """Return a line without the margin of a group; empty for its sub-exceptions, which are kept."""
        margin = _GROUP_MARGIN.match(text) if self.grouped else None
        if margin is None:
            return text
        text = text[margin.end() :]
        if not self.last:
            return text
        self.parts += [text[:_TEXT]] if _PART.match(text) else []
        return ""

    def follow(self) -> None:
        """Move the exception to the chain: the next one was raised from it, or caused it."""
        self.link = ""
        self.chain.append("\n".join(self.last)[:_TEXT])
        self.frames, self.last = [], []


class Scan:
    """Reads blocks of whole lines of one file after another; the results are its fields."""

    def __init__(self, rows: Rows) -> None:
        """Take the rows of known lines: id, pattern, words; ids with the prefix EXIT are launchers' reports."""
        self.signs = Signs(word for row in rows for word in row[2])
        self.exits = Patterns(row for row in rows if row[0].startswith(EXIT))
        self.known = Patterns(row for row in rows if not row[0].startswith(EXIT)).first
        self.events: list[Event] = []
        self.streams: list[Stream] = []
        self.comms: dict[tuple[str, int], NcclRank] = {}
        self.dropped = 0
        self._per_stream: dict[tuple[int, str], int] = {}
        self._seen: dict[tuple[int, int, str, str], int] = {}

    def file(self, number: int, demux: Demux, own: Stream) -> FileScan:
        """Start a file; `own`: the stream derived from its path."""
        return FileScan(self, number, demux, own)

    def add(self, event: Event) -> None:
        """Keep an event, up to a limit per kind and stream."""
        peer = event.groups.get("peer", "")
        same = (event.stream, event.generation, event.id, re.sub(r"\d+|0x\w+", "#", event.text) + peer)
        if event.id not in ("watchdog", "status", "exit") and same in self._seen:
            at = self._seen[same]
            old = self.events[at]
            self.events[at] = replace(old, count=old.count + 1)
            return
        kind = (event.stream, event.id)
        count = self._per_stream[kind] = self._per_stream.get(kind, 0) + 1
        most = _MOST_OF_STREAM if event.id in ("watchdog", "status") else _MOST_OF_KIND
        most = _MOST_EXITS if event.id == "exit" else most
        if count > most or len(self.events) >= _MOST_EVENTS:
            self.dropped += 1
        else:
            self._seen[same] = len(self.events)
            self.events.append(event)

    def explain_last(self, line: int, id_: str, text: str, groups: dict[str, str]) -> bool:
        """Give the last event, if it is of this line, the reason that a later line of its report has."""
        if not self.events or self.events[-1].line != line:
            return False
        last = self.events[-1]
        if id_ != last.id:
            self.events[-1] = replace(last, id=id_, text=text, groups={**last.groups, **groups})
        return True


class FileScan:
    """Reads one file."""

    def __init__(self, scan: Scan, number: int, demux: Demux, own: Stream) -> None:
        self._scan, self._demux, self._own = scan, demux, own
        self.number, self.lines, self.generation = number, 0, own.generation
        self._streams: dict[tuple[bytes, int | None], int] = {}
        self._tracebacks: dict[int, _Traceback] = {}
        self._wrapped: dict[int, tuple[int, str]] = {}
        self._summary: dict[str, str] | None = None
        self._summary_of = 0
        self._root = False
        self._learned = 0
        self._rounds: dict[tuple[int, str], int] = {}
        self._writers: dict[bytes, NcclRank] = {}
        self._headless = False
        self._raised: set[int] = set()
        self._before = b""
        self._nccl_error_at = -_NCCL_ERROR_LINES
        self._like: deque[Event] = deque(maxlen=_MOST_LIKE)
        self._ignored: dict[int, int] = {}
        self._last_blocks: deque[tuple[int, bytes]] = deque(maxlen=2)
        self.progress = 0
        self.last = ""
        """Its last line with words."""

    def block(self, block: bytes) -> None:
        """Read some whole lines."""
        demux = self._demux
        self._last_blocks.append((self.lines, block))
        demux.detect(block)
        if b" via " in block:
            self._edges(block)
        for stream in [number for number, open_ in self._tracebacks.items() if open_.line < self.lines - _LONG_AGO]:
            self._end_traceback(stream)
        if demux.forms or b"[rank" in block:
            self._learn(block)
        if not self.lines:
            self._headless = _begins_in_traceback(block)
        places, every = self._scan.signs.places(block), self._headless or not demux.is_whole(block)
        at = 0
        while at < len(block):
            if not (every or self._tracebacks or self._wrapped or self._summary is not None):
                at = self._next_sign(block, at, places)
                if at == len(block):
                    break
            end = block.find(b"\n", at)
            ended, end = end >= 0, end if end >= 0 else len(block)
            self.lines += 1
            for label, text in demux.lines(block[at:end], ended):
                self._line(label, text[:LONGEST_LINE])
            at = end + 1
        self._headless = False

    def _next_sign(self, block: bytes, at: int, places: list[int]) -> int:
        """Count the lines before the next one with a sign, and return its start; else the block's end."""
        next_ = bisect_left(places, at)
        start = block.rfind(b"\n", at, places[next_]) + 1 or at if next_ < len(places) else len(block)
        self.lines += block.count(b"\n", at, start)
        return start

    def finish(self) -> None:
        """End the file, reporting open tracebacks and summaries as they are."""
        for label, text in self._demux.finish():
            self._line(label, text)
        unended = bool(self._last_blocks) and not self._last_blocks[-1][1].endswith(b"\n")
        for stream, traceback in list(self._tracebacks.items()):
            if unended and traceback.last and traceback.last_line == self.lines and self._is_torn(traceback.last[-1]):
                traceback.last.pop()
            self._cut_off(stream)
            self._end_traceback(stream)
        self._end_summary()
        self.progress = self._last_progress()
        self.last = self._last_line()
        for event in self._like:
            self._scan.add(event)

    def _last_progress(self) -> int:
        """Return the first of the last _PROGRESS_LINES lines of progress; 0 for fewer."""
        lines: list[int] = []
        for before, block in self._last_blocks:
            for match in _PROGRESS.finditer(block):
                if b"%|" not in match[0] or match[0].count(b"\r") >= _PROGRESS_LINES:
                    lines.append(before + block.count(b"\n", 0, match.start()) + 1)
        return lines[-_PROGRESS_LINES] if len(lines) >= _PROGRESS_LINES else 0

    def _last_line(self) -> str:
        """Return the last line with words, before that of threads left by an exit; none if it reports progress."""
        lines = (line for _, block in reversed(self._last_blocks) for line in reversed(block.split(b"\n")))
        said = (own for line in lines if re.search(rb"\w", own := harmless(line)))
        last = next((line for line in said if not line.startswith(b"terminate called without an active")), b"")
        return "" if _PROGRESS.match(last) else last.decode("utf-8", "replace").strip()[:_LAST_CHARS]

    def _learn(self, block: bytes) -> None:
        """Register the streams of a block, including skipped lines; in later blocks of the first lines only."""
        self._learned += 1
        if self._learned > _LEARN_BLOCKS:
            lines = block.split(b"\n", _LOOKED_AT)[:_LOOKED_AT]
        else:
            lines = block.split(b"\n")
            for match in _LABELLED.finditer(block) if b"[rank" in block else ():
                self._stream(self._demux.split(match[0])[0], int(match[1]))
        for line in filter(None, lines):
            label = self._demux.split(line)[0]
            if label:
                self._stream(label, None)

    def _stream(self, label: bytes, rank: int | None) -> int:
        """Return the number of the stream of a label, and of the rank in the line: nodes may share labels."""
        key = (label, rank)
        found = self._streams.get(key)
        if found is None:
            labelled = self._demux.labels[label]
            own = self._own
            found = len(self._scan.streams)
            if found >= _MOST_STREAMS:
                return 0
            self._streams[key] = found
            self._scan.streams.append(
                replace(
                    labelled,
                    file=self.number,
                    rank=rank if rank is not None else labelled.rank if label else own.rank,
                    local=labelled.local if label else own.local,
                    host=labelled.host or own.host,
                    generation=own.generation,
                    by_path=rank is None and not label and own.rank is not None,
                )
            )
        return found

    def _line(self, label: bytes, line: bytes) -> None:
        if b"\x1b" in line or b"\r" in line or b"%|" in line:
            line = plain(line)
        if line.startswith(b"{") and _HEAD.encode() in line and self._of_json(label, line):
            return
        inner = RANK.match(line) or (_RANK_LATER.match(line) if b"[rank" in line else None)
        rank = int(inner[inner.lastindex or 1]) if inner else None
        number = self._stream(label, rank)
        self._scan.streams[number].lines += 1
        self._before = b""
        if inner:
            self._before, line = line[: inner.start(inner.lastindex or 1)], line[inner.end() :]
        if number in self._tracebacks and self._goes_on(number, line, named=inner is not None):
            return
        if self._headless and number not in self._raised and line.lstrip().startswith(b'File "'):
            self._begin_traceback(number, line, named=inner is not None)
            self._goes_on(number, line, named=inner is not None)
            return
        if (
            self._summary is not None
            and number == self._summary_of
            and self._in_summary(line.decode("utf-8", "replace"))
        ):
            return
        # A line wrapped by a terminal continues without a prefix.
        wrapped = (
            number if inner or label else next((n for n, at in self._wrapped.items() if at[0] == self.lines - 1), -1)
        )
        if wrapped in self._wrapped:
            began, text = self._wrapped.pop(wrapped)
            if inner is None:
                self._watchdog(wrapped, text + line.decode("utf-8", "replace"), began, last=True)
                return
            self._watchdog(wrapped, text, began, last=True)
        if self._scan.signs.on(line):
            self._closely(number, line, rank)

    def _closely(self, number: int, line: bytes, rank: int | None) -> None:
        by_torch = rank is not None
        if b"NCCL INFO" in line:
            info = _INFO.search(line)
            if info and self._info(info) and b"rror" not in line and b"atchdog" not in line:
                return
        if (
            line.startswith((b"Traceback (most recent call last)", _GROUP_HEAD))
            or b": Traceback (most recent call last)" in line[:120]
        ):
            if number in self._tracebacks:
                self._end_traceback(number)
            self._begin_traceback(number, line, named=by_torch)
            return
        text = line.decode("utf-8", "replace")
        if self._launcher(number, line, text):
            return
        if any(words in text for words in _WATCHDOG):
            self._watchdog(number, text, self.lines)
            return
        if self._opens(number, text) or self._begin_bare(number, line, text, named=by_torch):
            return
        self._known(number, line, text, rank)

    def _opens(self, number: int, text: str) -> bool:
        """Note that a summary of torchrun follows, or a traceback that Python ignored."""
        if _SUMMARY_HEAD.match(text) or text.rstrip().endswith("ChildFailedError:"):
            self._summary, self._summary_of, self._root = {}, number, text.startswith("Root Cause")
            return True
        if text.startswith("Exception ignored"):
            self._ignored[number] = self.lines
            return True
        return False

    def _known(self, number: int, line: bytes, text: str, rank: int | None) -> None:
        """Add a known line's event; keep an unknown line if it looks like a failure."""
        found = self._scan.known(text)
        if found is not None:
            id_, groups = found
            if _HARMLESS.search(text):
                groups["mild"] = "1"
            is_reason = rank is None and self.lines - self._nccl_error_at <= _NCCL_ERROR_LINES
            if is_reason and self._scan.explain_last(self._nccl_error_at, id_, _cut(text), groups):
                return
            named = _WHO.search(text)
            at = self._when(line)
            if rank is not None and "NCCL error" in text:
                # A rank that lost its peer has no reason of its own: the next lines may be of that peer.
                is_own = "remote process exited" not in text
                self._nccl_error_at = self.lines if is_own else -_NCCL_ERROR_LINES
            rank = rank if rank is not None else int(named[1]) if named else None
            self._scan.add(Event(id_, number, self.lines, _cut(text), at, self.generation, rank, groups))
        elif _LIKE.search(text) and not _HARMLESS.search(text):
            at = self._when(line)
            self._like.append(Event("like", number, self.lines, _cut(text), at, self.generation, rank))

    def _begin_bare(self, number: int, line: bytes, text: str, *, named: bool) -> bool:
        """Start an exception without a traceback; False if the line has none."""
        final = _TERMINATE.match(text)
        match = final or _RAISED.match(text[:_MESSAGE])
        before = match["before"] if match and not final else ""
        if match is None or _NO_RAISE.search(before) or (before and _HARMLESS.search(text)):
            return False
        if number in self._tracebacks:
            self._end_traceback(number)
        traceback = _Traceback(self.lines, self.generation, self._when(line), named and not before)
        traceback.bare, traceback.end, traceback.last_line = True, self.lines, self.lines
        traceback.last.append(text if final else match["raised"])
        self._tracebacks[number] = traceback
        return True

    def _when(self, line: bytes) -> float | None:
        return _time(line) or (_time(self._before) if self._before else None) or _time(self._demux.stamp)

    # --- tracebacks

    def _begin_traceback(self, number: int, line: bytes, *, named: bool) -> None:
        self._raised.add(number)
        self._tracebacks[number] = _Traceback(self.lines, self.generation, self._when(line), named)
        self._tracebacks[number].grouped = line.startswith(_GROUP_HEAD)
        self._tracebacks[number].ignored = self._ignored.pop(number, -2) >= self.lines - 2

    def _goes_on(self, number: int, line: bytes, *, named: bool) -> bool:
        """Add a line to the traceback of its stream; False if it does not belong to it."""
        traceback = self._tracebacks[number]
        traceback.end = max(self.lines, traceback.line)
        if traceback.named and not named and line:  # the rank's stdout, with the same prefix
            return False
        text = line.decode("utf-8", "replace")
        text = traceback.without_margin(text)
        if text.startswith(_HEAD):
            if traceback.next_begins():
                return True
            traceback.went_on = self._is_of_one(number)
            return False
        if not traceback.last:
            return self._before_exception(number, traceback, text)
        if text.startswith("Original Traceback (most recent call last)"):  # of a DataLoader worker
            traceback.follow()
            return True
        if match := _LINK.match(text):
            traceback.link = match.lastgroup or ""
            return True
        if not text:
            return True
        if len(traceback.last) <= _TAIL and _is_more(traceback.last[-1], text):
            traceback.last.append(text[:300])
            return True
        traceback.end -= 1
        traceback.went_on = self._is_of_one(number)
        self._end_traceback(number)
        return False

    def _is_of_one(self, number: int) -> bool:
        stream = self._scan.streams[number]
        return stream.rank is not None or stream.local is not None

    def _before_exception(self, number: int, traceback: _Traceback, text: str) -> bool:
        if text[:1] in (" ", "\t", "") or text.startswith('File "') or traceback.code:
            frame = _FRAME.match(text)
            if frame and len(traceback.frames) < _FRAMES:
                traceback.frames.append(f"{frame[1]}:{frame[2]} in {frame[3] or '<module>'}")
            traceback.flat = traceback.flat or text.startswith('File "')
            traceback.code = traceback.flat and frame is not None
            return True
        if not _EXCEPTION.match(text):
            traceback.broken = True
            return False
        traceback.last.append(text)
        traceback.last_line = self.lines
        if text.rstrip().endswith("ChildFailedError:"):
            self._end_traceback(number)
            self._summary, self._summary_of, self._root = {}, number, False
        return True

    def _is_torn(self, text: str) -> bool:
        """Return whether the last line of a file, without a newline, is an incomplete exception."""
        return _TORN.search(text) is not None and self._scan.known(text) is None

    def _cut_off(self, number: int) -> None:
        traceback = self._tracebacks[number]
        if traceback.chain and not (traceback.last or traceback.broken):
            traceback.last = [traceback.chain.pop()]
        if traceback.frames and not (traceback.last or traceback.broken):
            text = f"the log ends in a traceback, at {traceback.frames[-1]}"
            groups = {"uncaught": "1"} if traceback.named else {}
            self._scan.add(
                Event(
                    "traceback-cut", number, self.lines, _cut(text), traceback.at, traceback.generation,
                    self._scan.streams[number].rank, groups, tuple(traceback.frames),
                )
            )  # fmt: skip

    def _end_traceback(self, number: int) -> None:
        traceback = self._tracebacks.pop(number)
        if not traceback.last or traceback.ignored:
            return
        text = "\n".join(traceback.last).replace("\n  what():  ", ": ", 1)
        match = _LAST.match(text)
        final = _TERMINATE.match(text)
        kind = final["raised"] if final else (match[1] if match else text[:80]).rpartition(".")[2]
        groups = {"type": kind, "from": ", ".join(traceback.links)}
        if traceback.parts:
            text, groups["parts"] = f"{traceback.last[0]}: {'; '.join(traceback.parts)}", str(len(traceback.parts))
        if traceback.named or final:
            groups["uncaught"] = "1"
        if traceback.went_on:
            groups["went_on"] = "1"
        if traceback.bare:
            groups["bare"] = "1"
        groups["end"] = str(traceback.end)
        # The exception it was raised from is checked first, as nearer to the cause; for a group, a row common to all
        # parts.
        known = [self._scan.known(part) for part in traceback.parts or (*traceback.chain, text)]
        if traceback.parts and len({found and found[0] for found in known}) > 1:
            known = []
        if (found := next(filter(None, known), None)) is not None:
            groups.update(found[1], known=found[0])
        self._scan.add(
            Event(
                "exception", number, traceback.last_line, _cut(text), traceback.at, traceback.generation,
                self._scan.streams[number].rank, groups, tuple(traceback.frames[-_FRAMES:]),
            )
        )  # fmt: skip

    # --- launchers

    def _launcher(self, number: int, line: bytes, text: str) -> bool:
        if b"will restart worker group" in line:
            self._restart(number, text)
            return True
        found = self._scan.exits.first(text)
        if found is None:
            return False
        groups = {**found[1], "launcher": found[0].removeprefix(EXIT)}
        event = Event("exit", number, self.lines, _cut(text), self._when(line), self.generation, None, groups)
        self._scan.add(self._of_agent(event, text) if groups["launcher"] == "agent" else event)
        return True

    def _restart(self, number: int, text: str) -> None:
        """Count a restart announced by an agent of torchrun, numbered by the attempts left."""
        left, agent = _ATTEMPTS.search(text), _AGENT.search(text)
        if left is None:
            return
        done = self._own.generation + max(0, int(left[2]) - int(left[1]))
        key = (number, agent[1] if agent else "")
        self._rounds[key] = max(self._rounds.get(key, done), done)
        self.generation = max(self.generation, done + 1)

    def _of_agent(self, event: Event, text: str) -> Event:
        """Count the rounds of one agent of torchrun: each report of a failure ends a round."""
        agent = _AGENT.search(text)
        key = (event.stream, agent[1] if agent else "")
        round_ = self._rounds[key] = self._rounds.get(key, self._own.generation - 1) + 1
        self.generation = max(self.generation, round_ + 1)
        return replace(event, generation=round_)

    def _in_summary(self, text: str) -> bool:
        """Parse a line of torchrun's summary: failed ranks, then the first failure. False after its end."""
        assert self._summary is not None
        field_ = _SUMMARY.match(text)
        if field_:
            if field_[1] == "time":
                self._end_summary(more=True)
            self._summary[field_[1]] = field_[2].strip()
            if field_[1] == "traceback":
                self._summary["line"] = str(self.lines)
        elif text.startswith("Root Cause"):
            self._end_summary(more=True)
            self._root = True
        elif text.startswith("  ") and "traceback" in self._summary:
            if len(self._summary["traceback"]) < LONGEST_LINE:
                self._summary["traceback"] += "\n" + text[2:]
        elif text.startswith("====") and self._root:
            self._end_summary()
        elif text and not _OF_SUMMARY.match(text):
            self._end_summary()
            return False
        return True

    def _end_summary(self, *, more: bool = False) -> None:
        fields, self._summary = self._summary, {} if more else None
        if not fields:
            return
        rank = re.match(r"(\d+)(?: \(local_rank: (\d+)\))?", fields.get("rank", ""))
        code = re.match(r"(-?\d+) \(pid: (\d+)\)", fields.get("exitcode", ""))
        if rank is None or code is None:
            return
        groups = {"rank": rank[1], "local": rank[2] or "", "code": code[1], "pid": code[2], "launcher": "torchrun"}
        groups["host"], groups["first"] = fields.get("host", ""), "1" if self._root else ""
        when = _time(fields.get("time", "").encode())
        first, _, rest = fields.get("traceback", "").partition("\n")
        text = f"rank {rank[1]} exitcode {fields['exitcode']}: {first}"
        round_ = max(self._rounds.values(), default=self.generation)
        self._scan.add(Event("exit", self._stream(b"", None), self.lines, _cut(text), when, round_, None, groups))
        if rest:
            self._recorded(int(rank[1]), rest, int(fields["line"]), round_)

    def _recorded(self, rank: int, text: str, line_before: int, round_: int) -> None:
        """Read the traceback recorded by @record for a rank."""
        number, read = self._stream(b"", rank), self.lines
        self._tracebacks[number] = _Traceback(self.lines, round_, None, True)
        for self.lines, line in enumerate(text.split("\n"), line_before + 1):
            self._add_to(number, line)
        self.lines = read
        self._end_open(number)

    def _add_to(self, number: int, line: str) -> None:
        if number in self._tracebacks:
            self._goes_on(number, line.encode(), named=True)

    def _end_open(self, number: int) -> None:
        if number in self._tracebacks:
            self._end_traceback(number)

    def _of_json(self, label: bytes, line: bytes) -> bool:
        """Read the traceback in a line of JSON that reports an error; False for any other line."""
        found = _error_in(line)
        if found is None:
            return False
        rank, text = found
        number = self._stream(label, rank)
        self._scan.streams[number].lines += 1
        self._end_open(number)
        first, *rest = text.split("\n")
        self._begin_traceback(number, first.encode(), named=False)
        self._tracebacks[number].at = self._when(line)
        for part in rest:
            self._add_to(number, part)
        self._end_open(number)
        return True

    # --- NCCL

    def _watchdog(self, number: int, text: str, line: int, *, last: bool = False) -> None:
        """Parse a line of the watchdog, of any release; join one wrapped by a terminal."""
        who, groups = _writer(text)
        at = self._when(text.encode())
        if _WATCHDOG[0] in text:
            work = _WORK.search(text)
            if (work is None or "ran for" not in text) and not last:
                self._wrapped[number] = (line, text)
                return
            if work is not None:
                for part in re.split(r",\s*(?![^\[]*\])", work[1]):
                    name, _, value = part.partition("=")
                    groups[name.strip().replace("Timeout(ms)", "timeout_ms")] = value.strip()
            self._scan.add(Event("watchdog", number, line, _cut(text), at, self.generation, who, groups))
            return
        for name, form in _STATUS.items():
            match = form.search(text)
            if match:
                groups[name] = match[1]
        if "enqueued" in groups and "completed" not in groups and not last:
            self._wrapped[number] = (line, text)
            return
        self._scan.add(Event("status", number, line, _cut(text), at, self.generation, who, groups))

    def _edges(self, block: bytes) -> None:
        """Count the transports of `Channel ... via`, the most frequent lines with NCCL_DEBUG=INFO."""
        for match in _VIA.finditer(block):
            process = block[block.rfind(b"\n", 0, match.start()) + 1 : match.start()]
            comm = self._writers.get(process)
            if comm is None:
                info = _INFO.search(process + b" NCCL INFO ")
                comm = self._comm(info) if info else None
                if comm is None or len(self._writers) >= _MOST_COMMS:
                    continue
                self._writers[process] = comm
            kind = match[1].decode("ascii", "replace") + "/GDRDMA" * (b"GDRDMA" in match[2])
            comm.edges[kind] = comm.edges.get(kind, 0) + 1
            comm.phase = max(comm.phase, 2)

    def _comm(self, match: re.Match[bytes]) -> NcclRank | None:
        """Return the record of the process that wrote an INFO line; None above the limit."""
        key = (match[1].decode("ascii", "replace"), int(match[2]))
        comms = self._scan.comms
        if key not in comms and len(comms) < _MOST_COMMS:
            comms[key] = NcclRank(*key)
        return comms.get(key)

    def _info(self, match: re.Match[bytes]) -> bool:
        """Parse a line of NCCL_DEBUG=INFO; False for the trace of an error on its way up."""
        message, comm = match[5], self._comm(match)
        if comm is None:
            return True
        init = _COMM.search(message)
        if init:
            comm.rank, comm.nranks = int(init[1]), int(init[2])
            if init[4] == b"START":
                comm.started, comm.phase = comm.started + 1, 1
            else:
                comm.completed, comm.phase = comm.completed + 1, 5
            return True
        for phase, words in enumerate(_PHASES):
            if words in message and phase not in (1, 5):
                comm.phase = max(comm.phase, phase)
        _set_up(comm, message)
        return b" -> " not in message


def _error_in(line: bytes) -> tuple[int | None, str] | None:
    """Return the rank and the traceback of a line of JSON with the level of an error."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    level = next((record[name] for name in _LEVELS if name in record), "")
    if not re.match(r"(?i)err|crit|fatal|exc|alert|emerg", str(level)):
        return None
    values = [one for each in record.values() for one in (each.values() if isinstance(each, dict) else (each,))]
    text = next((each for each in values if isinstance(each, str) and _HEAD in each), None)
    rank = record.get("rank")
    return (
        None
        if text is None
        else (rank if type(rank) is int and rank >= 0 else None, text[text.rfind("\n", 0, text.index(_HEAD)) + 1 :])
    )


_LEVELS = ("level", "levelname", "severity", "lvl", "log.level")


def _writer(text: str) -> tuple[int | None, dict[str, str]]:
    """Return the rank and the process group named by a line of the watchdog."""
    rank, group = _WHO.search(text), _GROUP.search(text)
    who = int(rank[1]) if rank else None
    if group is None:
        return who, {}
    groups = {"pg": group["guid"] or group["pg"], "name": group["name"] or ""}
    if who is not None:
        # In a subgroup this number is the rank's within the group.
        groups["member"] = str(who)
        if groups["pg"] != "0" and groups["name"] != "default_pg":
            who = None
    return who, groups


def _set_up(comm: NcclRank, message: bytes) -> None:
    oob, net = _OOB.search(message), _NET.search(message)
    if oob:
        comm.interface, comm.address = _ascii(oob[2]), _ascii(oob[3])
    elif net and not comm.network:
        comm.network = _ascii(net[1])
    elif message.startswith(b"Using network "):
        comm.network = _ascii(message[14:].strip())
    elif plugin := _PLUGIN.search(message):
        comm.plugin = _ascii(plugin[1] or b"") or comm.plugin or "no plugin"
    elif b"NCCL version " in message:
        comm.version = _ascii(message.partition(b"NCCL version ")[2].partition(b" ")[0])


def _ascii(text: bytes) -> str:
    return text[:40].decode("ascii", "replace")


_WHO = re.compile(r"\b[Rr]ank (\d{1,6})\]")
_GROUP = re.compile(
    r"\[PG (?:ID )?(?P<pg>\d{1,18}) (?:PG GUID (?P<guid>\w+)(?:\((?P<name>[^)]{0,80})\))? |\([^)]{0,80}\) )?Rank"
)
_WORK = re.compile(r"WorkNCCL\((.*?)\)(?= ran for|\.|$)")
_STATUS = {
    "failed": re.compile(r"(?:at work(?: sequence id)?|at NCCL work): (-?\d{1,18})"),
    "enqueued": re.compile(r"[Ll]ast enqueued(?: NCCL)? work: (-?\d{1,18})"),
    "started": re.compile(r"last started(?: NCCL)? work: (-?\d{1,18})"),
    "completed": re.compile(r"last completed(?: NCCL)? work: (-?\d{1,18})"),
    "dump_of": re.compile(r"due to a collective timeout from +rank (\d{1,6})"),
}
_AGENT = re.compile(r"^[EWI]\d{4} [\d:.]+ (\d{1,18}) ")
_ATTEMPTS = re.compile(r"(\d{1,6})/(\d{1,6}) attempts left; will restart")
_CONTINUES = re.compile(
    r"^(?:nccl\w+:|Last error:|Exception raised from|frame #|CUDA kernel errors|For debugging|Compile with|Device-side|"
    r"Search for|Parameter|The following|In addition|making sure|to |: |Rank \d+ is running|while |[A-Z]\w+ failure|"
    r"ERR\d{5}|E[A-Z]\d{4}:|List of |what\(\):)|NCCL WARN"
)


def _is_more(last: str, text: str) -> bool:
    """Return whether a line continues the message of an exception, given its last line so far."""
    if _CONTINUES.match(text) or text[:1].isspace() or last.rstrip().endswith(("raised:", "Last error:")):
        return True
    # A wrapped sentence.
    return last[-1:] not in ".!?)" and bool(_WRAPPED.match(text))


_WRAPPED = re.compile(r"^[a-z]{2,20} (?!=)[a-z'(\[]")


def _begins_in_traceback(block: bytes) -> bool:
    at = block.find(b'File "', 0, 1 << 16)
    return at >= 0 and b"Traceback (most recent call last)" not in block[:at]


def _time(line: bytes) -> float | None:
    """Return the seconds from the start of a (leap) year to a line's time; not all times have a year."""
    if b":" not in line[:300]:
        return None
    for form in _TIMES:
        match = form.search(line, 0, 300)
        if match:
            name = match[1]
            month = _MONTHS.index(name) + 1 if name in _MONTHS else int(name)
            day, hour, minute = (int(match[number]) for number in range(2, 5))
            seconds = float(match[5].replace(b",", b"."))
            if 1 <= month <= 12 and 1 <= day <= 31:
                return calendar.timegm((2000, month, day, hour, minute, 0)) - 946684800 + seconds
    return None


def _cut(text: str) -> str:
    return text.strip()[:_TEXT]
