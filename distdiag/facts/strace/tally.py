"""One thread's calls, added up one by one in bounded memory: counts, times, places, errors, and busy loops."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache

from distdiag.facts.strace import lines, targets
from distdiag.facts.strace.errors import Errors
from distdiag.facts.strace.polls import Polls
from distdiag.facts.strace.types import Call, Count, Spin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.facts.strace.lines import Line

SLOW_S = 0.01
"""Longer than a disk needs to answer."""
_MAX_LOOPS = 8192
_MAX_CONNECTING = 1000
_MAX_ENDS = 10_000
_RESULT = 200
_HEAD = re.compile(
    rb"(?:\w+at2?|statx)\((?:AT_FDCWD|-?\d+)(?:" + lines.DECODED + rb"(?:\(deleted\))?)?, " + lines.STRING
    + rb"|\w+\((?:\d+(?:" + lines.DECODED + rb"(?:\(deleted\))?)?|" + lines.STRING
    + rb"|\[\{fd=\d+(?:" + lines.DECODED + rb")?)?"
)  # fmt: skip
"""The head of a call, up to its subject: the name, and the first descriptor or path."""
_ADDRESSED = (b"connect", b"bind", b"sendto")
_SO_ERROR = re.compile(rb"SOL_SOCKET, SO_ERROR, \[(E[A-Z0-9]+)\]")
_FINDS = re.compile(
    rb"open(?:at2?)?|f?stat(?:x|at|64)*|newfstatat|l?stat|f?access(?:at2?)?|execve(?:at)?|readlink(?:at)?"
)
_SLEEPS = frozenset({b"nanosleep", b"clock_nanosleep"})
_SELECTS, _OF_NOTHING = frozenset({b"select", b"_newselect", b"pselect6"}), b"0, NULL, NULL, NULL"
"""How Python before 3.11 sleeps."""
_EXECUTES = frozenset({b"execve", b"execveat"})
_STARTS = frozenset({b"clone", b"clone3", b"fork", b"vfork"})

_PER_S, _SPAN_S, _GAP_S = 1000.0, 0.1, 0.01
"""A busy loop is at least this fast for at least this long; a longer pause ends it."""
_AGAIN = (b"EAGAIN", b"EWOULDBLOCK", b"ENOENT")
# poll(2) and the like, and a wait with WNOHANG, return 0 if no event occurred; read() returns 0 at end of file.
_NOTHING = frozenset(
    {
        *(b"poll", b"ppoll", b"select", b"pselect6", b"_newselect", b"epoll_wait", b"epoll_pwait", b"epoll_pwait2"),
        *(b"wait4", b"waitid", b"read", b"recvfrom", b"recvmsg", b"recv", b"pread64"),
    }
)
_ALWAYS = frozenset(
    {
        *(b"sched_yield", b"nanosleep", b"clock_nanosleep", b"stat", b"lstat", b"newfstatat", b"statx", b"access"),
        *(b"faccessat", b"faccessat2", b"readlink", b"getsockopt", b"getppid"),
    }
)


@lru_cache(maxsize=8192)
def _about(head: bytes) -> tuple[str, str, str, bool]:
    """Parse the head of a call: its name, its subject, the subject's place, and whether the call looks up a path."""
    name, _, args = head.partition(b"(")
    target = targets.about(name, args)[1]
    return name.decode(), target, targets.place(target), bool(target) and _FINDS.fullmatch(name) is not None


class Tally:
    """Sums of one thread, and its state after the lines so far."""

    def __init__(self, tid: int | None) -> None:
        self.tid = tid
        self.n_calls = 0
        self.first_at_s: float | None = None
        self.last_at_s = 0.0
        self.comm = ""
        self.state = "returned"
        self.last: Line | None = None
        self.pending: Line | None = None
        self.executed = False
        self.children: dict[int, bool] = {}
        """By id of each thread or process it started: whether it is a thread."""
        self.errors = Errors()
        self.polls = Polls()
        self.ends: set[str] = set()
        self._connecting: dict[bytes, str] = {}
        self._seen: set[bytes] = set()
        """Heads of calls whose endpoints are in `ends`."""
        self._loops: dict[tuple[bytes, bytes], _Loop] = {}
        """By the beginning of the call, and its error."""
        self.names: dict[str, _Sum] = defaultdict(_Sum)
        self.places: dict[str, _Sum] = defaultdict(_Sum)

    def take(self, line: Line) -> None:
        """Add a line; the second half of a call is joined with its first."""
        if self.first_at_s is None:
            self.first_at_s = line.at
        self.last_at_s = line.at
        if line.kind == lines.RESUMED:
            self._resume(line)
        elif line.kind == lines.CALL:
            self._call(line)
        elif line.kind == lines.BEGUN:
            self.pending = line
            self.state = "detached" if line.result == b"detached" else "blocked"
            self.last = line._replace(result=b"")
            self._mention(line)
        elif line.kind == lines.ENDED:
            how = line.name.decode()
            self.state = how if how == "superseded" else f"{how} {line.result.decode()}"
            self.pending = None

    def spins(self) -> tuple[Spin, ...]:
        """Return the busy loops, most calls first."""
        found = []
        for (head, _), loop in self._loops.items():
            count, span_s = loop.spun()
            if count:
                found.append(Spin(*_about(head)[:2], count, span_s, count / span_s))
        return tuple(sorted(found, key=lambda spin: -spin.count))

    def _resume(self, line: Line) -> None:
        if not line.result:
            self.state = "detached" if b"<detached" in line.args else self.state
        elif self.pending is not None:
            self._call(lines.joined(self.pending, line))
        else:  # its beginning is not in the log; the rest of its arguments may be data
            self._call(line._replace(kind=lines.CALL, args=b""))

    def _call(self, line: Line) -> None:
        self.state, self.pending, self.last = "returned", None, line
        self.n_calls += 1
        matched = _HEAD.match(line.name + b"(" + line.args)
        head = matched[0] if matched else line.name + b"("
        name, target, where, finds = _about(head)
        took_s = float(line.took or 0)
        self.names[name].add(took_s, line.error, name, target)
        if where:
            self.places[where].add(took_s, line.error, name, target)
        is_idle = line.name in _ALWAYS or (line.name in _NOTHING and line.result.partition(b" ")[0] == b"0")
        if line.error in _AGAIN if line.error else is_idle:
            self._loop(head, line.error).add(line.at)
        if finds:
            self.polls.tried(target, line.error.decode())
        elif line.name in _SLEEPS or (line.name in _SELECTS and line.args.startswith(_OF_NOTHING)):
            self.polls.slept(took_s)
        if head not in self._seen or line.args.count(b":[") > 1 or b":[" in line.result:
            self._mention(line)
            self._seen.add(head)
        if line.error:
            self._fail(line, target)
        else:
            self._learn(line, target, finds)

    def _mention(self, line: Line) -> None:
        if len(self.ends) < _MAX_ENDS:
            self.ends.update(targets.ends(line.name, line.args + line.result))
        if len(self._seen) >= _MAX_ENDS:
            self._seen.clear()

    def _loop(self, head: bytes, error: bytes) -> _Loop:
        if len(self._loops) >= _MAX_LOOPS:
            self._loops = {key: loop for key, loop in self._loops.items() if loop.spun()[0]}
        return self._loops.setdefault((head, error), _Loop())

    def _fail(self, line: Line, target: str) -> None:
        if line.name in _ADDRESSED:
            self._mention(line)
            target = targets.about(line.name, line.args)[1]
            if line.error == b"EINPROGRESS" and line.name == b"connect" and len(self._connecting) < _MAX_CONNECTING:
                self._connecting[line.args.partition(b",")[0]] = target
        self.errors.add(line.name.decode(), line.error.decode(), target)

    def _learn(self, line: Line, target: str, finds: bool) -> None:
        """Learn from a call without an error which files and threads exist, and how a connect() ended."""
        name = line.name
        if finds:
            self.errors.found(target)
        if name in _EXECUTES and line.result == b"0":
            self.comm = target.rpartition("/")[2][:15]
            self.executed = True
        elif name == b"getsockopt" and (failed := _SO_ERROR.search(line.args)):
            # The outcome of a connect() that returned EINPROGRESS.
            fd = line.args.partition(b",")[0]
            target = self._connecting.pop(fd, "") or target
            self.errors.add("connect", failed[1].decode(), target)
        elif name == b"prctl" and line.args.startswith(b'PR_SET_NAME, "'):
            comm, _, more = line.args[14:].partition(b'"')
            if not more.startswith(b"..."):  # -s cut it
                self.comm = targets.unescape(comm)
        elif name in _STARTS:
            child = line.result.partition(b"<")[0]
            if child.isdigit() and len(child) < 8:
                self.children[int(child)] = b"CLONE_THREAD" in line.args


class _Sum:
    def __init__(self) -> None:
        self.count = self.errors = self.slow = 0
        self.time_s = self.slowest_s = 0.0
        self.slowest = ("", "")

    def add(self, took_s: float, error: bytes, name: str, target: str) -> None:
        self.count += 1
        self.time_s += took_s
        if error:
            self.errors += 1
        if took_s >= SLOW_S:
            self.slow += 1
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, (name, target)


class _Loop:
    """Consecutive calls of one kind on one target without progress: a busy loop, if fast and many."""

    def __init__(self) -> None:
        self._spun = self._length = 0
        self._span_s = self._first_s = self._last_s = 0.0

    def add(self, at_s: float) -> None:
        """Count a call that began at this time."""
        if not 0 <= at_s - self._last_s <= _GAP_S:
            self._close()
            self._first_s = at_s
        self._last_s = at_s
        self._length += 1

    def spun(self) -> tuple[int, float]:
        """Return the calls of the busy loop, and its seconds; zero calls if it is none."""
        self._close()
        return self._spun, self._span_s

    def _close(self) -> None:
        span_s, length, self._length = self._last_s - self._first_s, self._length, 0
        if span_s >= _SPAN_S and length > _PER_S * span_s:
            self._spun += length
            self._span_s += span_s


def counts(sums: Mapping[str, _Sum]) -> tuple[Count, ...]:
    """Return sums by name, most time first."""
    rows = [
        Count(name, row.count, row.errors, row.slow, row.time_s, row.slowest_s, " ".join(row.slowest).strip())
        for name, row in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.time_s, -row.count)))


def as_call(line: Line) -> Call:
    """Return a line as it is reported: without its arguments, which may be data."""
    fd, target = targets.about(line.name, line.args)
    return Call(
        name=line.name.decode(),
        fd=fd,
        target=target,
        at_s=line.at or None,
        result=line.result.decode("utf-8", "replace")[:_RESULT],
        error=line.error.decode(),
        time_s=float(line.took) if line.took else None,
    )
