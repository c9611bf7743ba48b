"""What one thread did, added up call by call in bounded memory: counts, times, places, errors, and busy loops."""

from __future__ import annotations

import re

from distdiag.facts.strace import descriptors, lines
from distdiag.facts.strace.errors import Errors
from distdiag.facts.strace.polls import Polls
from distdiag.facts.strace.types import ARGUMENTS, Call, Count, Place, Spin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.facts.strace.lines import Line

    Key = tuple[bytes, bytes]

SLOW_S = 0.01
"""Longer than a disk needs to answer."""
_MAX_HEADS = 4096
"""More different beginnings of calls are added up by name and place."""
_SLOWEST = 10
_MAX_PROGRAMS = 1000
_MAX_CONNECTING = 1000
_HEAD = re.compile(
    rb"(?:\w+at2?|statx)\((?:AT_FDCWD|-?\d+)(?:" + lines.DECODED + rb"(?:\(deleted\))?)?, " + lines.STRING
    + rb"|\w+\((?:\d+(?:" + lines.DECODED + rb"(?:\(deleted\))?)?|" + lines.STRING
    + rb"|\[\{fd=\d+(?:" + lines.DECODED + rb")?)?"
)  # fmt: skip
"""A call up to what it is about: its name, and the descriptor or path that comes first."""
_ADDRESSED = (b"connect", b"bind", b"sendto")
_SO_ERROR = re.compile(rb"SOL_SOCKET, SO_ERROR, \[(E[A-Z0-9]+)\]")
_FINDS = re.compile(
    rb"open(?:at2?)?|f?stat(?:x|at|64)*|newfstatat|l?stat|f?access(?:at2?)?|execve(?:at)?|readlink(?:at)?"
)
_SLEEPS = frozenset({b"nanosleep", b"clock_nanosleep"})
_SELECTS, _OF_NOTHING = frozenset({b"select", b"_newselect", b"pselect6"}), b"0, NULL, NULL, NULL"
"""How Python before 3.11 sleeps."""
_LEARNT_FROM = frozenset({b"execve", b"execveat", b"prctl", b"clone", b"clone3", b"fork", b"vfork", b"getsockopt"})

_PER_S, _SPAN_S, _UNTIMED = 1000.0, 0.1, 10_000
"""A busy loop is faster than this for at least so long; in a log without times, so many calls."""
_GAP_S, _COARSE_GAP_S = 0.01, 1.0
"""After a longer pause it is not the same run; -t shows whole seconds only."""
_AGAIN = (b"EAGAIN", b"EWOULDBLOCK", b"ENOENT")
# poll(2) and its like, and a wait that must not wait, return 0 where there was nothing; read() returns 0 at the end.
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


class Tally:
    """Sums of one thread, and its state after the lines so far."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.first = self.newest = b""
        self.comm = b""
        self.state = "returned"
        self.last: Line | None = None
        self.pending: Line | None = None
        self.signals: dict[str, int] = {}
        self.programs: dict[str, None] = {}
        self.children: dict[int, bool] = {}
        """By id of what it started: whether that is a thread."""
        self.errors = Errors()
        self.polls = Polls()
        self.slowest: list[Call] = []
        self._connecting: dict[bytes, str] = {}
        self._loops: dict[Key, _Loop] = {}
        self._heads: dict[Key, _Sum] = {}
        self._names: dict[str, _Sum] = {}
        self._places: dict[str, _Sum] = {}

    def take(self, line: Line) -> None:
        """Add a line that is no half of a call, or the first one."""
        if line.kind == lines.CALL:
            self._call(line)
        elif line.kind == lines.BEGUN:
            self.pending = line
            self.state = "detached" if line.result == b"detached" else "blocked"
            self.last = line._replace(result=b"")
        elif line.kind == lines.SIGNAL and line.result != b"stopped":
            name = line.name.decode()
            self.signals[name] = self.signals.get(name, 0) + 1
        elif line.kind == lines.ENDED:
            how = line.name.decode()
            self.state = how if how == "superseded" else f"{how} {line.result.decode()}"
            self.pending = None

    def counts(self) -> tuple[Count, ...]:
        """Return the sums by the name of the call, most time first."""
        self._fold()
        rows = [Count(name, row.count, row.errors, row.time_s, row.slowest_s) for name, row in self._names.items()]
        return tuple(sorted(rows, key=_by_time))

    def places(self) -> tuple[Place, ...]:
        """Return the sums by place, most time first."""
        self._fold()
        rows = [Place(where, row.count, row.slow, row.time_s, row.slowest_s) for where, row in self._places.items()]
        return tuple(sorted(rows, key=_by_time))

    def spins(self) -> tuple[Spin, ...]:
        """Return the busy loops, most calls first."""
        found = []
        for (head, _), loop in self._loops.items():
            name, _, args = head.partition(b"(")
            spin = loop.spin(name.decode(), descriptors.about(name, args)[1], timed=bool(self.first))
            found += [spin] if spin is not None else []
        return tuple(sorted(found, key=lambda spin: -spin.count))

    def _call(self, line: Line) -> None:
        self.state, self.pending, self.last = "returned", None, line
        self.n_calls += 1
        head = _HEAD.match(line.name + b"(" + line.args)
        key = (head[0] if head else line.name + b"(", line.error)
        total = self._heads.get(key) or self._new_head(key)
        took = float(line.took) if line.took else None
        total.add(took)
        if total.loop is not None and (not total.needs_zero or line.result.partition(b" ")[0] == b"0"):
            total.loop.add(line.at)
        if (
            took is not None
            and total.is_file
            and (len(self.slowest) < _SLOWEST or took > (self.slowest[-1].time_s or 0.0))
        ):
            self.slowest = sorted([*self.slowest, as_call(line)], key=lambda call: -(call.time_s or 0.0))[:_SLOWEST]
        if total.finds:
            self.polls.tried(total.target, line.error.decode())
        elif line.name in _SLEEPS or (line.name in _SELECTS and line.args.startswith(_OF_NOTHING)):
            self.polls.slept(took)
        if line.error:
            self._fail(line, total)
        elif line.name in _LEARNT_FROM:
            self._learn(line)

    def _new_head(self, key: Key) -> _Sum:
        if len(self._heads) >= _MAX_HEADS:
            self._fold()
            self._loops = {key: loop for key, loop in self._loops.items() if loop.is_likely}
        total = self._heads[key] = _Sum(*key)
        if total.finds and not total.error:
            self.errors.found(total.target)
        if total.call in _NOTHING or total.call in _ALWAYS or total.error in _AGAIN:
            may_spin = total.error in _AGAIN or not total.error
            total.loop = self._loops.setdefault(key, _Loop()) if may_spin else None
        return total

    def _fail(self, line: Line, total: _Sum) -> None:
        target = total.target
        if line.name in _ADDRESSED:
            target = descriptors.about(line.name, line.args)[1]
            if line.error == b"EINPROGRESS" and line.name == b"connect" and len(self._connecting) < _MAX_CONNECTING:
                self._connecting[line.args.partition(b",")[0]] = target
        self.errors.add(line.name.decode(), line.error.decode(), target, line.at)

    def _learn(self, line: Line) -> None:
        name = line.name
        if name in (b"execve", b"execveat") and line.result == b"0":
            path = descriptors.about(name, line.args)[1]
            self.comm = path.rpartition("/")[2].encode()[:15]
            if len(self.programs) < _MAX_PROGRAMS:
                self.programs[path] = None
        elif name == b"getsockopt" and (failed := _SO_ERROR.search(line.args)):
            # What became of a connection that nobody waited for in connect().
            fd = line.args.partition(b",")[0]
            target = self._connecting.pop(fd, "") or descriptors.about(name, line.args)[1]
            self.errors.add("connect", failed[1].decode(), target, line.at)
        elif name == b"prctl" and line.args.startswith(b'PR_SET_NAME, "'):
            comm, _, more = line.args[14:].partition(b'"')
            if not more.startswith(b"..."):  # -s leaves no more of it
                self.comm = descriptors.unescape(comm).encode()
        elif name in (b"clone", b"clone3", b"fork", b"vfork"):
            child = line.result.partition(b"<")[0]
            if child.isdigit() and len(child) < 8:
                self.children[int(child)] = b"CLONE_THREAD" in line.args

    def _fold(self) -> None:
        for total in self._heads.values():
            name, where = total.call.decode(), descriptors.place(total.target)
            self._names.setdefault(name, _Sum()).merge(total)
            if where:
                self._places.setdefault(where, _Sum()).merge(total)
        self._heads = {}


class _Sum:
    """How many calls, and for how long; the times are None without -T."""

    def __init__(self, head: bytes = b"", error: bytes = b"") -> None:
        self.call, _, args = head.partition(b"(")
        self.error = error
        self.target = descriptors.about(self.call, args)[1]
        self.is_file = self.target.startswith("/")
        self.finds = bool(self.target) and _FINDS.fullmatch(self.call) is not None
        self.needs_zero = not error and self.call in _NOTHING
        self.loop: _Loop | None = None
        self.count = self.errors = self.slow = 0
        self.time_s: float | None = None
        self.slowest_s: float | None = None

    def add(self, took_s: float | None) -> None:
        self.count += 1
        if self.error:
            self.errors += 1
        if took_s is not None:
            self.time_s = (self.time_s or 0.0) + took_s
            if took_s >= SLOW_S:
                self.slow += 1
            if self.slowest_s is None or took_s > self.slowest_s:
                self.slowest_s = took_s

    def merge(self, other: _Sum) -> None:
        self.count += other.count
        self.errors += other.errors
        self.slow += other.slow
        if other.time_s is not None:
            self.time_s = (self.time_s or 0.0) + other.time_s
            self.slowest_s = max(self.slowest_s or 0.0, other.slowest_s or 0.0)


def _by_time(row: Count | Place) -> tuple[float, int]:
    return -(row.time_s or 0.0), -row.count


def as_call(line: Line) -> Call:
    """Return a line as it is reported."""
    fd, target = descriptors.about(line.name, line.args)
    args = descriptors.without_payload(line.name, line.args if line.result else line.args.rstrip(b", "))
    return Call(
        name=line.name.decode(),
        args=args[: 4 * ARGUMENTS].decode("utf-8", "replace")[:ARGUMENTS],
        fd=fd,
        target=target,
        at_s=lines.seconds(line.at),
        result=line.result.decode("utf-8", "replace")[:ARGUMENTS],
        error=line.error.decode(),
        time_s=float(line.took) if line.took else None,
    )


class _Loop:
    """The calls of one kind on one target that got nothing done: a busy loop, if they are fast and many."""

    def __init__(self) -> None:
        self._count = self._spun = self._length = 0
        self._span_s = self._first_s = self._last_s = 0.0

    @property
    def is_likely(self) -> bool:
        return self._spun > 0 or self._count > _UNTIMED // 10

    def add(self, at: bytes) -> None:
        """Count a call that began at this time; empty where the log has no times."""
        self._count += 1
        if not at:
            return
        now_s = lines.seconds(at) or 0.0
        if not 0 <= now_s - self._last_s <= (_GAP_S if b"." in at else _COARSE_GAP_S):
            self._close()
            self._first_s = now_s
        self._last_s = now_s
        self._length += 1

    def spin(self, name: str, target: str, *, timed: bool) -> Spin | None:
        """Return the busy loop, if it is one."""
        self._close()
        if not timed:
            return Spin(name, target, self._count, None, None) if self._count >= _UNTIMED else None
        return Spin(name, target, self._spun, self._span_s, self._spun / self._span_s) if self._spun else None

    def _close(self) -> None:
        span_s, length, self._length = self._last_s - self._first_s, self._length, 0
        if span_s >= _SPAN_S and length > _PER_S * span_s:
            self._spun += length
            self._span_s += span_s
