"""One log file, or a part of it -> what each of its threads did. In blocks, so that memory stays small."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, field

from distdiag.node.strace import lines, shape
from distdiag.node.strace.descriptors import CHANGES, CLONES, Descriptors
from distdiag.node.strace.shape import AT, ERROR, NAMED, OTHER, REST, RESULT, TID, WHOLE
from distdiag.node.strace.tally import Tally, Text, alone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from distdiag.node.strace.lines import Line
    from distdiag.node.strace.shape import Shape
    from distdiag.node.strace.tally import Row

BLOCK_BYTES = 2 * 1024 * 1024
_STEP = re.compile(
    rb"^((?:\d{1,7}(?:<.*?>)? +(?! )|\[pid +\d{1,7}(?:<.*?>)?\] )?) *(" + lines.STEP + rb") ", re.MULTILINE
)
_RESUMED = re.compile(
    rb"<\.\.\. \w+ resumed>(?=.*<" + lines.TOOK + rb">$)"
    rb".*\) += (?:((?:0x)?[0-9a-f]+)|-1 (E[A-Z0-9]+))[ <].*<(" + lines.TOOK + rb")>$"
)
_ATTACHED = re.compile(rb"strace: Process (\d{1,7}) attached$")
_STRING = re.compile(lines.STRING)
_BRACKETS = ((b"{", b"}"), (b"[", b"]"), (b"<", b">"), (b"(", b")"))
_SUMMARY = b"% time "


@dataclass
class Part:
    """What was read of one file from `start` on; `tallies` by the thread's id as written, empty where it is not.

    `n_lines` and `n_unread`: all lines, and those that strace did not write. `first`: the file's first time.
    """

    path: str
    start: int
    tallies: dict[bytes, Tally] = field(default_factory=dict)
    n_lines: int = 0
    n_unread: int = 0
    first: bytes = b""

    def merge(self, later: Part) -> None:
        """Take the part that comes next."""
        for tid, tally in later.tallies.items():
            self.tallies.setdefault(tid, Tally()).merge(tally)
        self.n_lines += later.n_lines
        self.n_unread += later.n_unread
        self.first = self.first or later.first


def read_part(path: str, looks: Shape, start: int, end: int) -> Part:
    """Read the lines that begin from byte `start` on and before `end`.

    Raises:
        OSError: the file cannot be read.
    """
    reader = _Reader(Part(path, start), looks)
    collects = gc.isenabled()
    # Rows are many, short-lived and without cycles: looking for those takes a third of the time.
    gc.disable()
    try:
        with open(path, "rb") as file:
            for block in _blocks(file, start, end):
                reader.block(block)
    finally:
        if collects:
            gc.enable()
    return reader.finish()


def _blocks(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Give whole lines; only the last block may end inside one."""
    if start:
        file.seek(start - 1)
        _line_end(file)
    rest, left = b"", end - file.tell()
    while left > 0 or rest:
        read = file.read(min(BLOCK_BYTES, max(left, 0)))
        left -= len(read)
        if left <= 0 and read and not read.endswith(b"\n"):
            read += _line_end(file)
        if not read:
            yield rest
            return
        block = lines.shorten(rest + read)
        cut = block.rfind(b"\n") + 1
        rest = block[cut:]
        if cut:
            yield block[:cut]


def _line_end(file: BinaryIO) -> bytes:
    """Read to the end of a line; of a long one the middle is left out."""
    found = b""
    while more := file.readline(lines.LINE_BYTES):
        found = lines.shorten(found + more)
        if more.endswith(b"\n"):
            break
    return found


class _Mixed:
    """The rows of one block, by thread."""

    def __init__(self) -> None:
        self.batches: dict[bytes, list[Row]] = {}
        self.halves: dict[bytes, Row] = {}
        # After how many calls of its batch came the last line of a thread that needs care, and the last such call.
        self.lined: dict[bytes, int] = {}
        self.called: dict[bytes, int] = {}


class _Reader:
    """Goes through a file and hands each line to its thread."""

    def __init__(self, part: Part, looks: Shape) -> None:
        self._part = part
        self._looks = looks
        self._pattern = shape.pattern(looks)
        self._descriptors = None if looks.decoded else Descriptors()
        self._tids: dict[bytes, bytes] = {}
        self._alive: dict[bytes, None] = {}
        self._started: set[bytes] = set()
        self._unstarted: dict[bytes, None] = {}
        self._clock_s = 0.0
        self._in_summary = False
        self._broken: bytes | None = None
        """The thread whose line just ended inside a call."""

    def block(self, block: bytes) -> None:
        """Take a block of whole lines; the last one may lack its end."""
        if self._looks.step:
            block = _STEP.sub(self._stamp, block)
        end = block.rfind(b"\n") + 1
        rows = self._pattern.findall(block, 0, end)
        text = Text(block, self._pattern)
        self._part.n_lines += len(rows)
        if self._looks.tid or self._descriptors is not None or not all(row[RESULT] or row[ERROR] for row in rows):
            self._mixed(rows, text)
        elif rows:
            self._tally(b"").add(rows, text, ends=True, is_last=True)
        if end < len(block):
            self._part.n_lines += 1
            self._torn(block[end:])

    def finish(self) -> Part:
        """Give what was read."""
        found = self._part
        # Before a second process is there, and after, lines on a terminal bear no pid.
        nameless = found.tallies.pop(b"", None)
        if nameless is not None:
            later = found.tallies.get(self._main())
            if later is not None:
                nameless.merge(later)
            found.tallies[self._main()] = nameless
        return found

    def _mixed(self, rows: list[Row], text: Text) -> None:
        """Take rows of many threads, or of which some need care."""
        mixed = _Mixed()
        batches, tids, descriptors = mixed.batches, self._tids, self._descriptors
        for row in rows:
            tid = tids.get(row[TID])
            if tid is None:
                tid = self._tid(row[TID])
            if descriptors is not None and row[NAMED]:
                row = (*row[:NAMED], descriptors.named(tid, row[NAMED]), *row[RESULT:])
            if row[RESULT] or row[ERROR]:
                batch = batches.get(tid)
                if batch is None:
                    batches[tid] = [row]
                else:
                    batch.append(row)
            else:
                self._with_care(mixed, tid, row)
        for tid, half in mixed.halves.items():
            self._alone(mixed, tid, half)
        for tid, batch in batches.items():
            ends, is_last = mixed.lined.get(tid, 0) < len(batch), mixed.called.get(tid, 0) < len(batch)
            self._tally(tid).add(batch, text, ends=ends, is_last=is_last)

    def _with_care(self, mixed: _Mixed, tid: bytes, row: Row) -> None:
        """Put the two halves of a call together, or keep the first half for later, or take another line."""
        half = mixed.halves.pop(tid, None)
        if half is not None:
            end = _RESUMED.match(row[OTHER])
            if end is not None:
                whole = (*half[:RESULT], end[1] or b"", end[2] or b"", end[3], b"", b"", b"")
                mixed.batches.setdefault(tid, []).append(whole)
                self._tally(tid).n_lines += 1
                return
            self._alone(mixed, tid, half)
        if self._looks.took and row[REST].endswith(b" <unfinished ...>"):
            mixed.halves[tid] = row
        else:
            self._alone(mixed, tid, row)

    def _alone(self, mixed: _Mixed, tid: bytes, row: Row) -> None:
        tid, is_call = self._line(tid, row)
        mixed.lined[tid] = len(mixed.batches.get(tid, ()))
        if is_call:
            mixed.called[tid] = mixed.lined[tid]

    def _line(self, tid: bytes, row: Row) -> tuple[bytes, bool]:
        """Take a line with care; gives the thread it is of, and whether it is of a call."""
        body = row[NAMED] + row[REST] or row[OTHER]
        if body:
            line = lines.parse_body(body)
            line = line._replace(at=row[AT]) if line else None
        else:
            body = row[WHOLE]
            line = lines.parse(body)
            if line is not None and line.tid:
                tid = self._tid(line.tid)
        self._take(tid, line, body)
        return tid, line is not None and line.kind in (lines.CALL, lines.BEGUN, lines.RESUMED)

    def _take(self, tid: bytes, line: Line | None, text: bytes) -> None:
        broken, self._broken = self._broken, None
        if line is None or line.kind in (lines.STACK, lines.REMARK) or (self._looks.timed and not line.at):
            self._no_event(line, text, broken)
            return
        tally = self._tally(tid)
        if line.comm:
            tally.comm = line.comm
        if line.kind == lines.RESUMED:
            self._resume(tally, tid, line)
        elif line.kind == lines.BEGUN and not line.result:
            self._broken = tid
            self._event(tally, tid, line._replace(result=b"unfinished"))
            self._attached(text)
        else:
            self._event(tally, tid, line)
        if line.kind == lines.ENDED:
            self._alive.pop(tid, None)

    def _resume(self, tally: Tally, tid: bytes, line: Line) -> None:
        begun = tally.pending
        if not line.result:
            tally.n_lines += 1
            tally.state = "detached" if b"<detached" in line.args else tally.state
        elif begun is not None:
            self._event(tally, tid, lines.joined(begun, line))
        elif self._part.start and not tally.n_lines and tally.orphan is None:
            tally.orphan = line
        else:
            self._event(tally, tid, alone(line))

    def _event(self, tally: Tally, tid: bytes, line: Line) -> None:
        if self._descriptors is not None and line.kind in (lines.CALL, lines.BEGUN):
            line = line._replace(args=self._descriptors.args(tid, line.name, line.args))
            if line.kind == lines.CALL and (line.name in CHANGES or line.name in CLONES):
                self._descriptors.note(tid, line)
        tally.event(line)

    def _no_event(self, line: Line | None, text: bytes, broken: bytes | None) -> None:
        """Take a line that no thread wrote by itself."""
        begun = self._tally(broken).pending if broken is not None else None
        whole = lines.continued(begun, text) if begun else None
        if broken is not None and whole is not None:
            self._event(self._tally(broken), broken, whole)
        elif line is not None and line.kind in (lines.STACK, lines.REMARK):
            self._attached(text)
        elif broken is not None and text == b" <unfinished ...>":
            return
        elif text.startswith(_SUMMARY):
            self._in_summary = True
        elif text and not self._in_summary:
            self._part.n_unread += 1

    def _torn(self, text: bytes) -> None:
        """Take the last line, which lacks its end: the file was cut, or strace waits there to write the rest."""
        line = lines.parse(_STEP.sub(self._stamp, text) if self._looks.step else text)
        if line is None or (self._looks.timed and not line.at):
            self._part.n_unread += 1
            if not self._looks.tid:
                self._tally(b"").state = "cut"
            return
        tid = self._tid(line.tid)
        tally = self._tally(tid)
        is_whole = line.kind in (lines.SIGNAL, lines.ENDED) or (line.result and (line.took or not self._looks.took))
        if is_whole or (line.kind == lines.BEGUN and line.result):
            self._take(tid, line, text)
        else:
            self._take(tid, line._replace(kind=lines.BEGUN, result=b"unfinished"), text)
            tally.state = "blocked" if line.kind == lines.BEGUN and _is_balanced(line.args) else "cut"

    def _tally(self, tid: bytes) -> Tally:
        tally = self._part.tallies.get(tid)
        if tally is None:
            tally = self._part.tallies[tid] = Tally()
        return tally

    def _tid(self, written: bytes) -> bytes:
        """Give the thread of a line: its id may come with its name, or lack where only one thread is left."""
        tid, _, comm = written.partition(b"<")
        if not tid:
            return next(iter(self._alive)) if len(self._alive) == 1 else b""
        self._tids[written] = tid
        if comm:
            self._tally(tid).comm = comm.rpartition(b">")[0]
        if tid not in self._alive:
            self._alive[tid] = None
            if tid not in self._started:
                self._unstarted[tid] = None
            if tid == self._main() and self._descriptors is not None:
                self._descriptors.same(b"", tid)
        return tid

    def _main(self) -> bytes:
        """Give the thread that began without an id on its lines: the only one that nobody started; empty if unknown."""
        return next(iter(self._unstarted), b"")

    def _attached(self, text: bytes) -> None:
        started = _ATTACHED.search(text)
        if started:
            self._started.add(started[1])
            self._unstarted.pop(started[1], None)

    def _stamp(self, match: re.Match[bytes]) -> bytes:
        self._clock_s += float(match[2])
        return b"%s%.6f " % (match[1], self._clock_s)


def _is_balanced(args: bytes) -> bool:
    """Tell whether arguments end between two of them, as they do where a call waits: not inside a string or a list."""
    plain = _STRING.sub(b"", args).replace(b"->", b"")
    return b'"' not in plain and all(plain.count(one) == plain.count(other) for one, other in _BRACKETS)
