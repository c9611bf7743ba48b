"""Facts of one node: strace's view of some processes while attached. Nothing is judged here.

strace writes to an unlinked file unless its log is kept, and ends with this process, which detaches it: no file or
tracer is left behind however this process ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import field, replace

from distdiag.facts import carried_tools, machine, private_files, programs
from distdiag.facts.network.socket_owners import Network, PeerProcess, networks, peer_processes
from distdiag.facts.process import blocked_threads, procs
from distdiag.facts.process.blocked_threads import Thread  # noqa: TC001 - decoded by its annotations
from distdiag.facts.process.descriptors import Look
from distdiag.facts.strace.log import read_logs
from distdiag.facts.strace.types import Logs, ThreadLog
from distdiag.jobs.collect import facts
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

__all__ = ["facts", "more"]

OPTIONS = ("-f", "-q", "-yy", "-ttt", "-T", "-s", "0", "-e", "abbrev=!?poll,?ppoll")
"""Options of our logs: descriptors decoded, times, durations, and no data read, written or sent. -s bounds lists, too:
abbrev requests the full list of a poll.
"""
_ATTACH_S, _DETACH_S, _SETTLE_S = 8.0, 3.0, 0.05
_STUCK_SAMPLES, _BETWEEN_S = 3, 0.1
_CALLS, _ERRORS, _PLACES, _FEW = 40, 20, 10, 5
_GUARD = """
import ctypes, os, resource, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]) if most < 0 else min(int(sys.argv[1]), most), most))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Starts strace so that it ends with us (PR_SET_PDEATHSIG), and when its log has reached its size limit."""


@record
class Ask:
    """Attach strace to `pids`; with `finish`, detach it and send the traces.

    `limit_bytes`: of all logs; `folder`, `names` by pid: of logs to keep. `near`: their sockets are sent, too.
    """

    pids: Sequence[int] = ()
    limit_bytes: int = 0
    folder: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    near: Sequence[int] = ()
    finish: bool = False


@record
class Attached:
    """The result of attaching to one process.

    `why` not: "gone", "traced" (by `tracer`), "kernel" (a thread of it is in state D), "no-strace", "denied", "failed";
    empty if strace is attached. `words`: strace's messages. `threads`: their waits before attaching, from /proc.
    """

    pid: int
    why: str
    words: str
    tracer: int | None
    state: str
    threads: tuple[Thread, ...]

    def __post_init__(self) -> None:
        if self.why not in ("", "gone", "traced", "kernel", "no-strace", "denied", "failed"):
            raise ValueError(f"not attached because of {self.why[:20]!r}")


@record
class Traced:
    """The trace of one process, from `began_s` to `ended_s` (wall clock).

    `cut`: the log reached its limit, so strace left early. `unread`: why it was not read. `state`, `tracer` and
    `threads`: after detaching; `state` is empty if the process has exited.
    """

    pid: int
    began_s: float
    ended_s: float
    cut: bool
    unread: str
    logs: tuple[ThreadLog, ...]
    state: str
    tracer: int | None
    threads: tuple[Thread, ...]


@record
class Reply:
    """One part of a node's answer."""

    attached: tuple[Attached, ...] = ()
    traced: tuple[Traced, ...] = ()
    networks: tuple[Network, ...] = ()
    peer_processes: tuple[PeerProcess, ...] = ()


def more(ask: Ask, tell: Callable[[Reply], None]) -> None:
    """Attach strace, or detach it and send the traces."""
    if ask.finish:
        _finish(tell)
    else:
        _attach(ask, tell)


def _attach(ask: Ask, tell: Callable[[Reply], None]) -> None:
    look = Look()
    found = networks(ask.near, look)
    mentioned = {socket.pid for network in found for socket in network.sockets}
    tell(Reply(networks=found, peer_processes=peer_processes(mentioned.difference(ask.near))))
    before = [_before(pid, look) for pid in ask.pids]
    straces = [_Strace(process, ask) for process in before]
    deadline = time.monotonic() + _ATTACH_S
    for strace in straces:
        if strace.attach(deadline):
            _attached.append(strace)
        tell(Reply(attached=(strace.before,)))


def _before(pid: int, look: Look) -> Attached:
    """Inspect a process, and find out whether strace may be attached to it."""
    state, tracer = machine.process_state(pid).letter, procs.tracer(pid)
    why = "no-strace" if carried_tools.find("strace") is None else ""
    if state in ("", "Z", "X"):
        why = "gone"
    elif tracer:
        why = "traced"
    elif not why and _is_stuck(pid):
        why = "kernel"
    words = machine.command_line(tracer) if tracer else ""
    return Attached(pid, why, words, tracer or None, state, blocked_threads.blocked(pid, look) if state else ())


def _is_stuck(pid: int) -> bool:
    """Return whether a thread stays in state D: strace could not detach from it."""
    stuck = _in_kernel(pid)
    for _ in range(_STUCK_SAMPLES - 1):
        if not stuck:
            break
        time.sleep(_BETWEEN_S)
        stuck &= _in_kernel(pid)
    return bool(stuck)


def _in_kernel(pid: int) -> set[int]:
    return {task.tid for task in procs.tasks(pid) if task.state == "D"}


class _Strace:
    """The strace of one process; not started if `before` has a reason against it."""

    def __init__(self, before: Attached, ask: Ask) -> None:
        self.before = before
        self.kept = os.path.join(ask.folder, ask.names[str(before.pid)]) if ask.folder else ""
        if before.why:
            return
        try:
            self.log = _private_file(self.kept)
            limit_bytes = ask.limit_bytes // len(ask.pids)
            path = f"/proc/{os.getpid()}/fd/{self.log.fileno()}"
            argv = [carried_tools.find("strace") or "", *OPTIONS, "-o", path, "-p", str(before.pid)]
            self._process = programs.start([sys.executable, "-S", "-c", _GUARD, str(limit_bytes), *argv])
        except OSError as error:
            self.before = replace(before, why="failed", words=f"{error.filename}: {error.strerror}")
        except programs.CannotRun as error:
            self.before = replace(before, why="failed", words=str(error))

    def attach(self, deadline: float) -> bool:
        """Wait until it is attached, or drop it and note the reason in `before`."""
        if self.before.why:
            return False
        while self._process.poll() is None and time.monotonic() < deadline:
            if procs.tracer(self.before.pid) == self._process.pid:
                self.began_s = time.time()
                return True
            time.sleep(0.005)
        if self._process.poll() is None:
            self._process.kill()
        words = self._process.communicate()[1].decode("utf-8", "replace")
        first = re.sub(r"^\S*strace: ", "", words).partition("\n")[0] or "strace gave no reason"
        why = "denied" if "Operation not permitted" in first else "failed"
        self.before = replace(self.before, why=why, words=first)
        programs.end_group(self._process)
        self.log.close()
        if self.kept:
            with contextlib.suppress(OSError):
                os.unlink(self.kept)
        return False

    def leave(self) -> None:
        """Ask it to detach."""
        self.ended_s = os.fstat(self.log.fileno()).st_mtime  # if it ended before, at its limit or with the process
        if self._process.poll() is None:
            self.ended_s = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)

    def end(self, deadline: float) -> None:
        """Wait until it has detached; at the deadline, by force."""
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        programs.end_group(self._process)

    def traced(self, look: Look) -> Traced:
        """Return how it left the process, without its log."""
        pid, state = self.before.pid, machine.process_state(self.before.pid).letter
        is_alive = state not in ("", "Z", "X")
        return Traced(
            pid=pid,
            began_s=self.began_s,
            ended_s=max(self.began_s, self.ended_s),
            cut=self._process.returncode == -signal.SIGXFSZ,
            unread="",
            logs=(),
            state=state if is_alive else "",
            tracer=procs.tracer(pid) if is_alive else None,
            threads=blocked_threads.blocked(pid, look) if is_alive else (),
        )


_attached: list[_Strace] = []


def _private_file(path: str) -> Any:  # noqa: ANN401 - a binary file
    """Create a file readable only by its owner; without a path, an unnamed one."""
    if not path:
        return tempfile.TemporaryFile(prefix="distdiag-")
    private_files.make_folder(os.path.dirname(path))
    return open(private_files.open_file(path, os.O_RDWR), "r+b")


def _finish(tell: Callable[[Reply], None]) -> None:
    for strace in _attached:
        strace.leave()
    deadline = time.monotonic() + _DETACH_S
    for strace in _attached:
        strace.end(deadline)
    time.sleep(_SETTLE_S)  # sleeping threads fall asleep again
    look = Look()
    left = [(strace, strace.traced(look)) for strace in _attached]
    for strace, traced in left:
        is_empty = os.fstat(strace.log.fileno()).st_size == 0
        found = Logs((), ()) if is_empty else read_logs([f"/proc/self/fd/{strace.log.fileno()}"])
        logs = tuple(_shown(log, strace.kept) for log in found.threads)
        unread = "; ".join(why for _, why in found.errors)
        tell(Reply(traced=(replace(traced, logs=logs, unread=unread),)))


def _shown(log: ThreadLog, path: str) -> ThreadLog:
    """Truncate the log for display. `path`: the kept log file."""
    return replace(
        log,
        path=path,
        calls=log.calls[:_CALLS],
        errors=log.errors[:_ERRORS],
        places=log.places[:_PLACES],
        spins=log.spins[:_FEW],
        polls=log.polls[:_FEW],
        ends=(),
    )
