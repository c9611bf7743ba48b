"""Calls that return at once over and over without getting anything done: a loop that waits by asking."""

from __future__ import annotations

from distdiag.node.strace.lines import seconds
from distdiag.node.strace.model import Spin

PER_S, SPAN_S, UNTIMED = 1000.0, 0.1, 10_000
"""A spin is faster than this for at least so long; in a log without times, so many calls."""
_GAP_S, _COARSE_GAP_S = 0.01, 1.0
"""After a longer pause it is not the same run; -t shows whole seconds only."""
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


class Run:
    """The calls of one kind on one target by one thread; those that got nothing done."""

    def __init__(self) -> None:
        self.count = 0
        self.spun = 0
        self.span_s = 0.0
        self._first = self._last = 0.0
        self._length = 0

    def add(self, ats: list[bytes]) -> None:
        """Take the times of more calls; empty ones where the log has none."""
        self.count += len(ats)
        if not ats or not ats[0]:
            return
        gap_s = _GAP_S if b"." in ats[0] else _COARSE_GAP_S
        for at in ats:
            now = seconds(at) or 0.0
            if not 0 <= now - self._last <= gap_s:
                self._close()
                self._first = now
            self._last = now
            self._length += 1

    def merge(self, other: Run) -> None:
        """Take what a later part of the same log says."""
        self._close()
        other._close()
        self.count += other.count
        self.spun += other.spun
        self.span_s += other.span_s

    def spin(self, name: str, target: str, *, timed: bool) -> Spin | None:
        """Give the spin, if it is one."""
        self._close()
        if not timed:
            return Spin(name, target, self.count, None, None) if self.count >= UNTIMED else None
        return Spin(name, target, self.spun, self.span_s, self.spun / self.span_s) if self.spun else None

    def _close(self) -> None:
        span_s, length, self._length = self._last - self._first, self._length, 0
        if span_s >= SPAN_S and length > PER_S * span_s:
            self.spun += length
            self.span_s += span_s


def may_spin(name: bytes, error: bytes) -> bool:
    """Tell whether such calls, repeated, may be a spin."""
    return error in (b"EAGAIN", b"EWOULDBLOCK", b"ENOENT") or (not error and (name in _ALWAYS or name in _NOTHING))


def needs_zero(name: bytes, error: bytes) -> bool:
    """Tell whether only those of them count that returned 0."""
    return not error and name in _NOTHING
