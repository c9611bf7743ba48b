"""Demultiplexes logs: parses launchers' line prefixes, and joins the pieces of torn lines.

A launcher that copies several ranks' output into one stream ends a piece wherever a rank paused, so two ranks may share
a line. Each piece begins with its rank's prefix; a piece cut by another prefix continues with the next piece of the
same rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_LINE = 1 << 16
_MOST_OPEN_BYTES = 1 << 20
_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)|[@-Z\\^_])")
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
_STAMP = rb"(?:\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4} ?)?"
_MOST_LABELS = 1 << 16
_STAMPED_SHARE = 0.9
_DEPTH = 2
"""Nested prefixes: `node1: [default0]:`."""


@record
class Format:
    """One launcher's line prefix. Groups of `pattern`: rank, local, host, pid.

    `torn`: pieces may end within a line. `share`: share of the first lines that must have it, for a prefix that is not
    distinctive.
    """

    name: str
    pattern: re.Pattern[bytes]
    torn: bool = False
    share: float = 0.0


FORMATS = (
    Format(
        "mpirun",
        re.compile(
            _STAMP + rb"\[[^\[\]\s,]{1,120},(?P<rank>\d{1,6})\](?:\[(?P<host>[\w.-]{1,100}):(?P<pid>\d{1,18})\])?"
            rb"<std\w{3,4}>:"
        ),
        torn=True,
    ),
    # [rank3]: is written by torch itself, on some of its lines.
    Format(
        "torchrun",
        re.compile(rb"\[(?!rank\d)(?P<role>[A-Za-z_][\w.-]{0,60}?:?)(?P<local>\d{1,5})\]:"),
        torn=True,
    ),
    # --log-line-prefix-template '${hostname}:${rank}: ' (torch 2.14 and later); file.py:12: is a source location.
    Format(
        "torchrun-host",
        re.compile(
            rb"(?!\S{1,200}\.(?:py|c\w{0,2}|h\w{0,2}|sh|log|txt|out|err):)"
            rb"(?P<host>[A-Za-z][\w.-]{0,200}):(?P<rank>\d{1,6}): "
        ),
        share=0.15,
    ),
    Format("kubectl", re.compile(rb"\[pod/(?P<host>[\w.-]{1,200})/[\w.-]{1,100}\] ")),
    Format(
        "ray",
        re.compile(
            rb"(?:\x1b\[\d+m)?\((?P<role>[\w.]{1,80})(?: rank=(?P<rank>\d{1,6}))? pid=(?P<pid>\d{1,18})"
            rb"(?:, ip=(?P<host>[\w.:]{1,60}))?\)(?:\x1b\[0m)? "
        ),
    ),
    Format("hydra", re.compile(rb"\[(?P<rank>\d{1,6})\] "), share=0.5),
    Format("srun", re.compile(rb" {0,5}(?P<rank>\d{1,6}): "), share=0.6),
    Format("pdsh", re.compile(rb"(?P<host>[A-Za-z][\w-]{0,60}(?:\.[\w-]{1,60}){0,6}): "), share=0.6),
)
_BY_NAME = {form.name: form for form in FORMATS}
_NO_HOST = re.compile(
    rb"(?i)(?:srun|slurmstepd|mpirun|mpiexec|bash|sh|python[\d.]*|torchrun|warning|error|info|debug|note|hint|fatal|critical|trace\w*|epoch|step|loss|iter\w*|\w*Error|\w*Exception):"
)


@dataclass
class Stream:
    """The output of one rank, or of a launcher itself, in one file. `label`: the prefixes of its lines."""

    file: int = 0
    label: str = ""
    rank: int | None = None
    local: int | None = None
    host: str = ""
    pid: int | None = None
    lines: int = 0
    generation: int = 0
    by_path: bool = False
    """Its rank is known only from the file's name."""


@dataclass
class Demux:
    """Joins and labels the lines of one file; `labels` are in order of appearance."""

    labels: dict[bytes, Stream] = field(default_factory=lambda: {b"": Stream()})
    forms: list[Format] = field(default_factory=list)
    joined: int = 0
    """Number of joined lines."""
    stamp: bytes = b""
    """A container runtime's time stamp on the last split line."""
    _margin: re.Pattern[bytes] | None = None
    _open: dict[bytes, bytes] = field(default_factory=dict)
    _within: re.Pattern[bytes] | None = None
    _begins: bytes = b""

    def detect(self, sample: bytes) -> None:
        """Detect the prefixes of these lines; known ones are kept."""
        if self.forms:
            return
        lines = [line for line in sample.split(b"\n")[:2000] if line.strip()]
        self._margin = self._margin or _margin_of(lines)
        lines = self._unstamped(lines)
        while lines and len(self.forms) < _DEPTH:
            form = _best(lines, self.forms)
            if form is None:
                break
            self.forms.append(form)
            matches = ((line, form.pattern.match(line)) for line in lines)
            lines = [line[match.end() :] for line, match in matches if match and line[match.end() :].strip()]
            self._margin = self._margin or _margin_of(lines)
            lines = self._unstamped(lines)
        if len(self.forms) == 1 and self.forms[0].torn:
            self._within = self.forms[0].pattern

    def _unstamped(self, lines: list[bytes]) -> list[bytes]:
        return [self._without_stamp(line, 0) for line in lines] if self._margin else lines

    def is_whole(self, block: bytes) -> bool:
        """Return whether no line of a block is torn, so that its lines can be read in any order."""
        if self._open:
            return False
        if self._within is None:
            return True
        if self.forms[0].name == "torchrun":
            inside = block.count(self._role()) if self._role() else 0
            return inside <= block.count(b"\n" + self._role()) + block.startswith(self._role())
        return len(self._within.findall(block)) <= block.count(b"\n")

    def _role(self) -> bytes:
        """Return the common start of torchrun's prefixes, `[default`; empty before the first one."""
        if not self._begins:
            label = next(filter(None, self.labels), b"")
            self._begins = label.rstrip(b"]:").rstrip(b"0123456789")
        return self._begins

    def lines(self, line: bytes, ended: bool = True) -> Iterator[tuple[bytes, bytes]]:
        """Yield (label, text) for each line completed by this one; `ended`: it had a newline."""
        label, text = self.split(line)
        if self._within is None:
            if ended or text:
                yield label, text
            return
        while cut := self._cut(text):
            self._keep(label, text[: cut.start()])
            label, text = self._label(cut[0]), text[cut.end() :]
        if not ended:
            self._keep(label, text)
            return
        if label in self._open:
            text = self._open.pop(label) + text
            self.joined += 1
        yield label, text

    def finish(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield lines left without a newline."""
        waiting, self._open = self._open, {}
        yield from waiting.items()

    def split(self, line: bytes) -> tuple[bytes, bytes]:
        """Return the label of a line, and the text after it."""
        if self._margin:
            line = self._without_stamp(line, 0)
        at, label = 0, b""
        for form in self.forms:
            match = form.pattern.match(line, at)
            if match is None:
                break
            at = match.end()
        else:
            if not self.forms:
                return b"", line
        if self._margin:
            line = self._without_stamp(line, at)
        label = _STAMPED.sub(b"", line[:at]) if at else b""
        if label not in self.labels:
            if len(self.labels) >= _MOST_LABELS:
                return b"", line
            self.labels[label] = self._describe(line, label)
        return label, line[at:]

    def _without_stamp(self, line: bytes, at: int) -> bytes:
        match = self._margin.match(line, at) if self._margin else None
        if match is None:
            return line
        self.stamp = match[0]
        return line[:at] + line[match.end() :]

    def _cut(self, text: bytes) -> re.Match[bytes] | None:
        """Find the next prefix within a text; for torchrun only of its own role, as a text may quote another's."""
        if self._within is None or b"]" not in text:
            return None
        if self.forms[0].name != "torchrun":
            return self._within.search(text)
        return next((match for match in self._within.finditer(text) if match[0].startswith(self._role())), None)

    def _keep(self, label: bytes, text: bytes) -> None:
        kept = self._open.get(label, b"")
        if len(kept) < LONGEST_LINE and sum(map(len, self._open.values())) < _MOST_OPEN_BYTES:
            self._open[label] = kept + text

    def _label(self, prefix: bytes) -> bytes:
        label = _STAMPED.sub(b"", prefix)
        if label not in self.labels:
            self.labels[label] = self._describe(prefix, label)
        return label

    def _describe(self, line: bytes, text: bytes) -> Stream:
        label, at = Stream(label=text.decode("utf-8", "replace").strip()), 0
        for form in self.forms:
            match = form.pattern.match(line, at)
            if match is None:
                break
            at = match.end()
            groups = match.groupdict()
            for name in ("rank", "local", "pid"):
                if groups.get(name):
                    setattr(label, name, int(groups[name]))
            if groups.get("host"):
                label.host = groups["host"].decode("utf-8", "replace")
        if label.rank is not None and label.local is not None:
            # A task of srun or mpirun that runs a torchrun: its number is a node's.
            label.rank, label.host = None, label.host or f"task {label.rank}"
        return label


_STAMPED = re.compile(rb"^" + _STAMP + rb"(?=\[)")


_MARGINS = (
    # kubectl logs --timestamps, docker logs -t
    re.compile(rb"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) "),
    # journalctl, syslog
    re.compile(rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?:[\w.-]{1,80} [\w./@-]{1,80}(?:\[\d{1,9}\])?: )?"),
    # grep -n, grep -Hn
    re.compile(rb"(?:[\w./-]{1,200}\.(?:log|out|err|txt)[:-])(?:\d{1,9}[:-])?"),
    re.compile(rb"(?:> ?){1,4}|# "),
)
"""Margins of all lines of a log: these are removed, as is a common indentation."""


def _margin_of(lines: list[bytes]) -> re.Pattern[bytes] | None:
    for margin in _MARGINS if len(lines) > 1 else ():
        if sum(1 for line in lines if margin.match(line)) >= _STAMPED_SHARE * len(lines):
            return margin
    indented = min((len(line) - len(line.lstrip(b" \t")) for line in lines), default=0)
    return re.compile(rb"[ \t]{1,%d}" % indented) if indented and len(lines) > 2 else None


_BARE = (b"[rank", b'  File "')
"""Line starts that only occur without launcher prefixes: numbers before other lines are the program's own."""


def _best(lines: list[bytes], forms: list[Format]) -> Format | None:
    """Return the format of these lines; one that is not distinctive only if nearly all have it."""
    for form in FORMATS:
        if form in forms:
            continue
        labels = [match[0] for match in map(form.pattern.match, lines) if match]
        if form.name in ("pdsh", "torchrun-host"):
            labels = [label for label in labels if not _NO_HOST.match(label)]
            if len(set(labels)) > max(1, len(labels) // 3):
                continue
        if form.share and any(line.startswith(_BARE) and not form.pattern.match(line) for line in lines):
            continue
        least = 1 if form.name == "mpirun" else 2
        if len(labels) >= least and len(labels) >= form.share * len(lines):
            return form
    return None


_BAR = re.compile(rb"^[^\n|]{0,120}?\d{1,3}%\|[^|\n]{0,300}\| ?[^\[\n]{0,60}\[[^\]\n]{0,300}\] *(?=\S)")
"""A progress bar of tqdm, without its newline, before other text."""


def plain(line: bytes) -> bytes:
    """Remove colours, all but the last state of a progress bar, and a bar before other text."""
    if b"\x1b" in line:
        line = _ESCAPE.sub(b"", line)
    if b"\r" in line:
        states = [state for state in line.split(b"\r") if state.strip()]
        line = states[-1] if states else b""
    return _BAR.sub(b"", line) if b"%|" in line else line


def harmless(line: bytes) -> bytes:
    """Return a line without terminal control characters."""
    return _CONTROL.sub(b"?", plain(line))
