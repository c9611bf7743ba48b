"""Log files of strace -> what each thread in them did. One pass over each file, line by line, in bounded memory."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, replace

from distdiag.facts.strace import lines
from distdiag.facts.strace.descriptors import Descriptors
from distdiag.facts.strace.tally import Tally, as_call
from distdiag.facts.strace.types import WAITING, Call, CallError, Logs, ThreadLog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

    from distdiag.facts.strace.lines import Line, Shape

_BLOCK_BYTES = 256 * 1024
_DAY_S = 86400.0
_SUFFIX = re.compile(r"\.(\d{1,7})$")
_ATTACHED = re.compile(rb"strace: Process (\d{1,7}) attached$")
_STRING = re.compile(lines.STRING)
_BRACKETS = ((b"{", b"}"), (b"[", b"]"), (b"<", b">"), (b"(", b")"))
_SUMMARY = b"% time "


def read_logs(paths: Sequence[str]) -> Logs:
    """Read logs of strace, whatever its version and options. `paths`: files, or folders of which all logs are read."""
    files: dict[str, LogFile] = {}
    errors: list[tuple[str, str]] = []
    for path in dict.fromkeys(paths):
        if not os.path.isdir(path):
            found = read_file(path)
            if isinstance(found, str):
                errors.append((path, found))
            else:
                files[path] = found
            continue
        inside = {name: found for name in _files_in(path) if isinstance(found := read_file(name), LogFile)}
        files.update(inside)
        errors += [] if inside else [(path, "contains no strace log")]
    return Logs(tuple(threads(list(files.values()))), tuple(errors))


def read_file(path: str) -> LogFile | str:
    """Read one log; or return why it cannot be read."""
    try:
        # A fifo would be waited for, without an end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return "not a regular file"
            head = file.read(_BLOCK_BYTES)
            shape = lines.sniff(head)
            if isinstance(shape, str):
                return shape
            log = LogFile(path, shape)
            log.read(head, file)
            return log
    except OSError as error:
        return error.strerror or str(error)


def _files_in(folder: str) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        yield from (os.path.join(root, name) for name in sorted(names))


class LogFile:
    """One log: hands each line to the tally of its thread, and puts the two halves of a call together."""

    def __init__(self, path: str, shape: Shape) -> None:
        self.path = path
        self.shape = shape
        self.tallies: dict[bytes, Tally] = {}
        """By the thread's id as written; empty where it is not."""
        self.n_unread = 0
        self._descriptors = None if shape.decoded else Descriptors()
        self._alive: dict[bytes, None] = {}
        self._started: set[bytes] = set()
        self._main = b""
        """The thread whose lines began without an id: the first that no other thread started; empty if unknown."""
        self._clock_s = 0.0
        self._in_summary = False
        self._broken: bytes | None = None
        """The thread whose line just ended inside a call."""

    def read(self, head: bytes, file: BinaryIO) -> None:
        """Read `head` and the rest of a file. Raises OSError."""
        block, rest = head, b""
        while block:
            *whole, rest = lines.shorten(rest + block).split(b"\n")
            for text in whole:
                self._take(text, self._parse(text))
            block = file.read(_BLOCK_BYTES)
        if rest:
            self._take_torn(rest, self._parse(rest))

    def tid(self, written: bytes) -> int | None:
        """Return a thread's id: as on its lines, or else from the name of the file (-ff)."""
        if written:
            return int(written)
        suffix = _SUFFIX.search(self.path)
        return int(suffix[1]) if suffix else None

    def _parse(self, text: bytes) -> Line | None:
        """Parse a line; None if strace did not write it, as all its lines of this log have a time."""
        line = lines.parse(text)
        if line is not None and line.step:
            self._clock_s += float(line.step)
            line = line._replace(at=b"%.6f" % self._clock_s)
        is_event = line is not None and line.kind not in (lines.STACK, lines.REMARK)
        return None if is_event and self.shape.timed and line is not None and not line.at else line

    def _take(self, text: bytes, line: Line | None) -> None:
        broken, self._broken = self._broken, None
        if line is None or line.kind in (lines.STACK, lines.REMARK):
            self._take_other(text, line, broken)
            return
        tid = line.tid or self._unlabelled()
        tally = self._tally(tid)
        tally.comm = line.comm or tally.comm
        if line.at:
            tally.first = tally.first or line.at
            tally.newest = line.at
        if line.kind == lines.RESUMED:
            self._resume(tid, tally, line)
        elif line.kind == lines.BEGUN and not line.result:
            self._broken = tid
            self._event(tid, tally, line._replace(result=b"unfinished"))
            self._note_attached(text)
        else:
            self._event(tid, tally, line)
        if line.kind == lines.ENDED:
            self._alive.pop(tid, None)

    def _resume(self, tid: bytes, tally: Tally, line: Line) -> None:
        if not line.result:
            tally.state = "detached" if b"<detached" in line.args else tally.state
        elif tally.pending is not None:
            self._event(tid, tally, lines.joined(tally.pending, line))
        else:  # its beginning is not in the log; what is left of its arguments may be data
            self._event(tid, tally, line._replace(kind=lines.CALL, args=b"", at=b""))

    def _event(self, tid: bytes, tally: Tally, line: Line) -> None:
        if self._descriptors is not None and line.kind in (lines.CALL, lines.BEGUN):
            line = line._replace(args=self._descriptors.decode(tid, line.name, line.args))
            if line.kind == lines.CALL:
                self._descriptors.follow(tid, line)
        tally.take(line)

    def _take_other(self, text: bytes, line: Line | None, broken: bytes | None) -> None:
        """Take a line that no thread wrote by itself."""
        begun = self._tally(broken).pending if broken is not None else None
        whole = lines.continued(begun, text) if begun else None
        if broken is not None and whole is not None:
            self._event(broken, self._tally(broken), whole)
        elif line is not None:
            self._note_attached(text)
        elif broken is not None and text == b" <unfinished ...>":
            return
        elif text.startswith(_SUMMARY):
            self._in_summary = True
        elif text and not self._in_summary:
            self.n_unread += 1

    def _take_torn(self, text: bytes, line: Line | None) -> None:
        """Take the last line, which lacks its end: the file was cut, or strace waits there to write the rest."""
        if line is None:
            self.n_unread += 1
            if not self.shape.tids:
                self._tally(b"").state = "cut"
            return
        is_whole = line.kind in (lines.SIGNAL, lines.ENDED) or (line.result and (line.took or not self.shape.took))
        if is_whole or (line.kind == lines.BEGUN and line.result):
            self._take(text, line)
        else:
            self._take(text, line._replace(kind=lines.BEGUN, result=b"unfinished"))
            is_blocked = line.kind == lines.BEGUN and _is_balanced(line.args)
            self._tally(line.tid or self._unlabelled()).state = "blocked" if is_blocked else "cut"

    def _tally(self, tid: bytes) -> Tally:
        tally = self.tallies.get(tid)
        if tally is None:
            if tid and not self._main and tid not in self._started:
                # Before a second process is there, lines on a terminal bear no pid.
                self._main = tid
                tally = self.tallies.pop(b"", None)
                if self._descriptors is not None:
                    self._descriptors.rename(b"", tid)
            tally = self.tallies[tid] = tally or Tally()
            if tid:
                self._alive[tid] = None
        return tally

    def _unlabelled(self) -> bytes:
        """Return the thread of a line without an id, of which a log on a terminal has some: the only one left."""
        return next(iter(self._alive)) if len(self._alive) == 1 else self._main

    def _note_attached(self, text: bytes) -> None:
        attached = _ATTACHED.search(text)
        if attached:
            self._started.add(attached[1])


def _is_balanced(args: bytes) -> bool:
    """Return whether arguments end between two of them, as where a call waits: not inside a string or a list."""
    plain = _STRING.sub(b"", args).replace(b"->", b"")
    return b'"' not in plain and all(plain.count(opening) == plain.count(closing) for opening, closing in _BRACKETS)


@dataclass(frozen=True)
class _Clock:
    """What the times of one log mean. `kind`: "day", "epoch", its path (since its beginning: -r), or "" (none)."""

    kind: str
    first_s: float
    shift_s: float = 0.0

    def read(self, at: bytes) -> float | None:
        """Return a time of the log on the clock of all."""
        return self.shift(lines.seconds(at))

    def shift(self, at_s: float | None) -> float | None:
        """Return it likewise; a time of day before the first one is of the next day."""
        if at_s is None:
            return None
        # Lines of several threads may be a little out of order.
        wrapped = self.kind == "day" and at_s < self.first_s - 60
        return at_s + self.shift_s + (_DAY_S if wrapped else 0.0)


def _clocks(files: list[LogFile]) -> dict[str, _Clock]:
    """Find out what the times of each log mean; of two that began 12 hours apart, one began after midnight."""
    found = {}
    for log in files:
        firsts = [tally.first for tally in log.tallies.values() if tally.first]
        kind = (log.path if log.shape.steps else "day" if b":" in firsts[0] else "epoch") if firsts else ""
        seconds = [lines.seconds(first) or 0.0 for first in firsts]
        # Threads that began after midnight have the smaller times.
        late = kind == "day" and seconds and max(seconds) - min(seconds) > _DAY_S / 2
        first_s = min((at_s for at_s in seconds if not late or at_s > _DAY_S / 2), default=0.0)
        found[log.path] = _Clock(kind, first_s)
    days = [clock.first_s for clock in found.values() if clock.kind == "day"]
    if days and max(days) - min(days) > _DAY_S / 2:
        for path, clock in found.items():
            if clock.kind == "day" and clock.first_s < _DAY_S / 2:
                found[path] = replace(clock, shift_s=_DAY_S)
    return found


def threads(files: list[LogFile]) -> Iterator[ThreadLog]:
    """List what logs that were read together say of each thread."""
    clocks, pids = _clocks(files), _pids(files)
    newest: dict[str, float] = {}
    for log in files:
        clock = clocks[log.path]
        for tally in log.tallies.values():
            if (at_s := clock.read(tally.newest)) is not None:
                newest[clock.kind] = max(at_s, newest.get(clock.kind, at_s))
    for log in files:
        clock, n_unread = clocks[log.path], log.n_unread
        for written, tally in log.tallies.items():
            tid = log.tid(written)
            thread = _thread(tally, clock, newest.get(clock.kind))
            yield replace(thread, path=log.path, tid=tid, pid=pids.get((log.path, tid)), n_unread=n_unread)
            n_unread = 0


def _thread(tally: Tally, clock: _Clock, newest_s: float | None) -> ThreadLog:
    began_s = clock.read(tally.last.at) if tally.last else None
    lasts = tally.state in WAITING and began_s is not None and newest_s is not None
    return ThreadLog(
        path="",
        pid=None,
        tid=None,
        comm=tally.comm.decode("utf-8", "replace"),
        first_at_s=clock.read(tally.first),
        last_at_s=clock.read(tally.newest),
        n_calls=tally.n_calls,
        n_unread=0,
        state=tally.state,
        blocked_s=max(0.0, (newest_s or 0.0) - (began_s or 0.0)) if lasts else None,
        last=_call(as_call(tally.last), clock) if tally.last else None,
        calls=tally.counts(),
        errors=tuple(_errors(tally, clock)),
        places=tally.places(),
        slowest=tuple(_call(call, clock) for call in tally.slowest),
        spins=tally.spins(),
        signals=tuple(tally.signals.items()),
        programs=tuple(tally.programs),
        polls=tuple(tally.polls.found()),
    )


def _call(call: Call, clock: _Clock) -> Call:
    return replace(call, at_s=clock.shift(call.at_s))


def _errors(tally: Tally, clock: _Clock) -> Iterator[CallError]:
    for error, first, last in tally.errors.gravest():
        yield replace(error, first_at_s=clock.read(first), last_at_s=clock.read(last))


def _pids(files: list[LogFile]) -> dict[tuple[str, int | None], int | None]:
    """Find the process of each thread by who started whom in the logs of a folder; None where they do not show it."""
    started: dict[tuple[str, int], tuple[int | None, bool]] = {}
    executed: set[tuple[str, int | None]] = set()
    for log in files:
        folder = os.path.dirname(log.path)
        for written, tally in log.tallies.items():
            tid = log.tid(written)
            if tally.programs:
                executed.add((folder, tid))
            started.update(((folder, child), (tid, is_thread)) for child, is_thread in tally.children.items())
    found: dict[tuple[str, int | None], int | None] = {}

    def process_of(folder: str, tid: int | None) -> int | None:
        way = dict[int, None]()
        pid = None
        while tid is not None and tid not in way:
            if (folder, tid) in found:
                pid = found[folder, tid]
                break
            way[tid] = None
            parent, is_thread = started.get((folder, tid), (None, False))
            if not is_thread:
                pid = tid if (folder, tid) in started or (folder, tid) in executed else None
                break
            tid = parent
        found.update(((folder, each), pid) for each in way)
        return pid

    return {
        (log.path, tid): process_of(os.path.dirname(log.path), tid)
        for log in files
        for tid in map(log.tid, log.tallies)
    }
