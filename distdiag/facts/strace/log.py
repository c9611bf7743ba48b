"""Log files of `strace -ttt -T -yy` -> each thread's part. One pass over each file, in bounded memory."""

from __future__ import annotations

import os
import re
import stat

from distdiag.facts.strace import lines
from distdiag.facts.strace.tally import Tally, as_call, counts
from distdiag.facts.strace.types import WAITING, Logs, ThreadLog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

    from distdiag.facts.strace.lines import Line

    Thread = tuple[str, int | None]
    """The folder of a log, and a thread in it."""

_BLOCK_BYTES = 256 * 1024
_SUFFIX = re.compile(r"\.(\d{1,7})$")
_STRING = re.compile(lines.STRING)
_BRACKETS = ((b"{", b"}"), (b"[", b"]"), (b"<", b">"), (b"(", b")"))
_REMARK = re.compile(rb"[^ ]*strace: |\[ Process PID=")


def read_logs(paths: Sequence[str]) -> Logs:
    """Read logs. `paths`: files, or folders of which all logs are read."""
    files: dict[str, LogFile] = {}
    errors: list[tuple[str, str]] = []
    for path in dict.fromkeys(paths):
        is_folder = os.path.isdir(path)
        found = {name: read_file(name) for name in (_files_in(path) if is_folder else [path])}
        whys = [why for why in found.values() if isinstance(why, str) and (not is_folder or why.startswith("written"))]
        logs = {name: log for name, log in found.items() if isinstance(log, LogFile)}
        files.update(logs)
        errors += [] if logs else [(path, whys[0] if whys else "contains no strace log")]
    return Logs(tuple(threads(list(files.values()))), tuple(errors))


def read_file(path: str) -> LogFile | str:
    """Read one log; or return why it cannot be read."""
    try:
        # Opening a FIFO without O_NONBLOCK would never return.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return "not a regular file"
            head = file.read(_BLOCK_BYTES)
            why = lines.problem(head)
            if why:
                return why
            log = LogFile(path)
            log.read(head, file)
            return log
    except OSError as error:
        return error.strerror or str(error)


def _files_in(folder: str) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        yield from (os.path.join(root, name) for name in sorted(names))


class LogFile:
    """One log: hands each line to the tally of its thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tallies: dict[bytes, Tally] = {}
        """By the thread's id on its lines; empty with -ff."""
        self.n_unread = 0

    def read(self, head: bytes, file: BinaryIO) -> None:
        """Read `head` and the rest of a file. Raises OSError."""
        block, rest = head, b""
        while block:
            *whole, rest = lines.shorten(rest + block).split(b"\n")
            for text in whole:
                line = lines.parse(text)
                if line is not None:
                    self._tally(line).take(line)
                elif text and not _REMARK.match(text):
                    self.n_unread += 1
            block = file.read(_BLOCK_BYTES)
        if rest:
            self._take_torn(lines.parse(rest))

    def _take_torn(self, line: Line | None) -> None:
        """Parse an incomplete last line: the file was cut, or strace will write the rest when the call returns."""
        if line is None:
            self.n_unread += 1
            for tally in self.tallies.values() if len(self.tallies) == 1 else ():
                tally.state = "cut"
            return
        tally = self._tally(line)
        if line.kind in (lines.SIGNAL, lines.ENDED) or line.took or (line.kind == lines.BEGUN and line.result):
            tally.take(line)
        else:
            tally.take(line._replace(kind=lines.BEGUN, result=b"unfinished"))
            tally.state = "blocked" if line.kind == lines.BEGUN and _is_balanced(line.args) else "cut"

    def _tally(self, line: Line) -> Tally:
        tally = self.tallies.get(line.tid)
        if tally is None:
            suffix = None if line.tid else _SUFFIX.search(self.path)
            tally = self.tallies[line.tid] = Tally(int(suffix[1]) if suffix else int(line.tid) if line.tid else None)
        return tally


def _is_balanced(args: bytes) -> bool:
    """Return whether the text ends between two arguments, as in a waiting call: not inside a string or a list."""
    plain = _STRING.sub(b"", args).replace(b"->", b"")
    return b'"' not in plain and all(plain.count(opening) == plain.count(closing) for opening, closing in _BRACKETS)


def threads(files: Sequence[LogFile]) -> Iterator[ThreadLog]:
    """List the threads of logs read together."""
    pids = _pids(files)
    newest_s = max((tally.last_at_s for log in files for tally in log.tallies.values()), default=0.0)
    for log in files:
        n_unread = log.n_unread
        for tally in log.tallies.values():
            pid = pids[os.path.dirname(log.path), tally.tid]
            yield _thread(tally, log.path, pid, n_unread, newest_s)
            n_unread = 0


def _thread(tally: Tally, path: str, pid: int | None, n_unread: int, newest_s: float) -> ThreadLog:
    last = tally.last
    return ThreadLog(
        path=path,
        pid=pid,
        tid=tally.tid,
        comm=tally.comm,
        first_at_s=tally.first_at_s,
        last_at_s=tally.last_at_s,
        n_calls=tally.n_calls,
        n_unread=n_unread,
        state=tally.state,
        blocked_s=max(0.0, newest_s - last.at) if last is not None and tally.state in WAITING else None,
        last=as_call(last) if last is not None else None,
        calls=counts(tally.names),
        errors=tally.errors.gravest(),
        places=counts(tally.places),
        spins=tally.spins(),
        polls=tuple(tally.polls.found()),
        ends=tuple(tally.ends),
    )


def _pids(files: Sequence[LogFile]) -> dict[Thread, int | None]:
    """Return the process of each thread, by which thread started which in a folder's logs; None if not shown."""
    processes: set[Thread] = set()
    starters: dict[Thread, Thread] = {}
    every = [(os.path.dirname(log.path), tally) for log in files for tally in log.tallies.values()]
    for folder, tally in every:
        processes.update([(folder, tally.tid)] if tally.executed else [])
        for child, is_thread in tally.children.items():
            if is_thread:
                starters[folder, child] = (folder, tally.tid)
            else:
                processes.add((folder, child))
    pids: dict[Thread, int | None] = {}
    for folder, tally in every:
        way: list[Thread] = [(folder, tally.tid)]
        while way[-1] not in pids and (starter := starters.pop(way[-1], None)) is not None:
            way.append(starter)
        end = way[-1]
        pids.update(dict.fromkeys(way, pids.get(end, end[1] if end in processes else None)))
    return pids
