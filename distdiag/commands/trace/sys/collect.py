"""Facts of one node: what strace saw of some processes while it was attached to them. Nothing is judged here.

The logs have no name, unless they are to be kept: strace writes to a descriptor of ours. So nothing is left, however
we end; and strace ends with us, which detaches it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace

from distdiag.facts import blocked_threads, carried_tools, machine, private_files, procs, programs
from distdiag.facts.blocked_threads import Thread  # noqa: TC001 - decoded by its annotations
from distdiag.facts.descriptors import Look
from distdiag.facts.socket_owners import Network, Person, networks, people
from distdiag.facts.strace.log import read_logs
from distdiag.facts.strace.types import ThreadLog  # noqa: TC001 - decoded by its annotations
from distdiag.jobs.collect import facts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

__all__ = ["facts", "more"]

_DECODED_AND_TIMED = ("-yy", "-ttt", "-T")
"""What descriptors refer to, when each call began and how long it took."""
_WHOLE = ("-e", "abbrev=!?poll,?ppoll")
"""-s bounds lists as well as strings, and what a thread polls has to be seen."""
_ALWAYS = "execve,?execveat,clone,?clone3,fork,vfork"
"""Calls that are traced whatever --only says: they show which thread is of which process. They are rare."""
_ATTACH_S, _DETACH_S, _SETTLE_S = 8.0, 3.0, 0.05
_STUCK_SAMPLES, _BETWEEN_S = 3, 0.1
_MAX_WORDS = 65536
_CALLS, _ERRORS, _PLACES, _FEW = 40, 20, 10, 5
# strace is to end when we do, even when we are killed; Linux only, as strace is.
_GUARD = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Attached:
    """What became of attaching to one process.

    `why` not: "gone", "traced" (by `tracer`), "kernel" (a thread of it is in state D), "no-strace", "denied", "failed";
    empty if strace is attached. `words`: what strace wrote. `threads`: what they were blocked on before, from /proc.
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


@dataclass(frozen=True)
class Traced:
    """What was seen of one process, from `began_s` to `ended_s` (wall clock); its log was `log_bytes` long.

    `cut`: the log was as long as it may be, so strace left early. `kept`: where the log is. `unread`: why it was
    not read. `state`, `tracer` and `threads`: how it was left; no state if it is gone.
    """

    pid: int
    began_s: float
    ended_s: float
    log_bytes: int
    cut: bool
    kept: str
    unread: str
    logs: tuple[ThreadLog, ...]
    state: str
    tracer: int | None
    threads: tuple[Thread, ...]


@dataclass(frozen=True)
class Reply:
    """A part of what a node sends."""

    attached: tuple[Attached, ...] = ()
    traced: tuple[Traced, ...] = ()
    networks: tuple[Network, ...] = ()
    people: tuple[Person, ...] = ()


def more(ask: dict[str, Any], tell: Callable[[Reply], None]) -> None:
    """Attach strace, or detach it and send what it saw.

    {"do": "attach", "pids", "only": kinds of calls, "limit_bytes" of all logs, "folder" and "names": by pid, of logs to
    keep, "near": whose sockets are sent, too}, or {"do": "finish"}
    """
    if ask["do"] == "attach":
        _attach(ask, tell)
    else:
        _finish(tell)


def arguments(only: Iterable[str] = ()) -> list[str]:
    """Return the options that all our logs are written with: without any data that is read, written or sent."""
    kinds = [f"%{kind}" for kind in only]
    calls = ["-e", f"trace={','.join([*kinds, _ALWAYS])}"] if kinds else []
    return ["-f", *_DECODED_AND_TIMED, "-s", "0", *_WHOLE, *calls]


def private_file(path: str) -> Any:  # noqa: ANN401 - a binary file
    """Make a file that only its owner may read, as data is in it; without a path one that has no name."""
    if not path:
        return tempfile.TemporaryFile(prefix="distdiag-")
    private_files.make_folder(os.path.dirname(path))
    return open(private_files.open_file(path, os.O_RDWR), "r+b")


def _attach(ask: dict[str, Any], tell: Callable[[Reply], None]) -> None:
    look = Look()
    found = networks(ask["near"], look)
    mentioned = {socket.pid for network in found for socket in network.sockets}
    tell(Reply(networks=found, people=people(mentioned.difference(ask["near"]))))
    before = {pid: _before(pid, look) for pid in ask["pids"]}
    _tracer.start([attached.pid for attached in before.values() if not attached.why], ask)
    for pid, attached in before.items():
        why, words = _tracer.refused.get(pid, (attached.why, attached.words))
        tell(Reply(attached=(replace(attached, why=why, words=words),)))


def _before(pid: int, look: Look) -> Attached:
    """Look at a process, and find out whether strace may be attached to it."""
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
    """Return whether a thread stays in the kernel (D): strace could not leave it again."""
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
    """One strace, attached to one process."""

    def __init__(self, pid: int, tool: str, ask: dict[str, Any]) -> None:
        """Start it. Raises OSError, CannotRun."""
        self.pid = pid
        self.kept = os.path.join(ask["folder"], ask["names"][str(pid)]) if ask["folder"] else ""
        self.log = private_file(self.kept)
        self.words = b""
        self.ended_output = threading.Event()
        self.cut = False
        self.began_s = self.ended_s = time.time()
        path = f"/proc/{os.getpid()}/fd/{self.log.fileno()}"
        argv = [tool, *arguments(ask["only"]), "-o", path, "-p", str(pid)]
        self.process = programs.start([sys.executable, "-S", "-c", _GUARD, *argv])

    @property
    def is_attached(self) -> bool:
        return b" attached" in self.words

    @property
    def is_coming(self) -> bool:
        return not self.is_attached and self.process.poll() is None

    @property
    def size(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def leave(self) -> None:
        """Ask it to detach, once."""
        if self.process.poll() is None and self.ended_s == self.began_s:
            self.ended_s = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGINT)

    def drop(self) -> None:
        """End it without its log: it did not attach."""
        programs.end_group(self.process)
        self.ended_output.wait(_DETACH_S)
        self.log.close()
        if self.kept:
            with contextlib.suppress(OSError):
                os.unlink(self.kept)


class _Tracer:
    """All straces of this node. A thread of its own reads what they write, and looks after the size of the logs."""

    def __init__(self) -> None:
        self.straces: dict[int, _Strace] = {}
        self.refused: dict[int, tuple[str, str]] = {}
        self._limit_bytes = 0

    def start(self, pids: Sequence[int], ask: dict[str, Any]) -> None:
        """Attach to processes, and wait until that is done."""
        self._limit_bytes = ask["limit_bytes"]
        tool = carried_tools.find("strace") or ""
        for pid in pids:
            try:
                self.straces[pid] = _Strace(pid, tool, ask)
            except OSError as error:
                self.refused[pid] = ("failed", f"{error.filename}: {error.strerror}")
            except programs.CannotRun as error:
                self.refused[pid] = ("failed", str(error))
        threading.Thread(target=self._listen, daemon=True).start()
        deadline = time.monotonic() + _ATTACH_S
        while any(strace.is_coming for strace in self.straces.values()) and time.monotonic() < deadline:
            time.sleep(0.005)
        for pid, strace in list(self.straces.items()):
            if strace.is_attached:
                strace.began_s = strace.ended_s = time.time()
            else:
                self.straces.pop(pid).drop()
                self.refused[pid] = _refusal(strace.words)

    def end(self) -> list[_Strace]:
        """Detach all, by force if they do not; returns them."""
        straces, self.straces = list(self.straces.values()), {}
        for strace in straces:
            strace.leave()
        deadline = time.monotonic() + _DETACH_S
        while any(strace.process.poll() is None for strace in straces) and time.monotonic() < deadline:
            time.sleep(0.005)
        for strace in straces:
            if strace.ended_s == strace.began_s:  # it had exited with the process
                strace.ended_s = time.time()
            programs.end_group(strace.process)
        return straces

    def _listen(self) -> None:
        straces = list(self.straces.values())
        with selectors.DefaultSelector() as selector:
            for strace in straces:
                # A duplicate: the other one is closed by whoever ends the process.
                selector.register(os.dup(strace.process.stderr.fileno()), selectors.EVENT_READ, strace)  # type: ignore[union-attr]
            while selector.get_map():
                for key, _ in selector.select(0.05):
                    data = os.read(key.fd, 65536)
                    key.data.words = (key.data.words + data)[:_MAX_WORDS]
                    if not data:
                        key.data.ended_output.set()
                        selector.unregister(key.fd)
                        os.close(key.fd)
                self._watch_size()

    def _watch_size(self) -> None:
        straces = list(self.straces.values())
        with contextlib.suppress(ValueError):  # a log was closed meanwhile
            if sum(strace.size for strace in straces) > self._limit_bytes:
                for strace in straces:
                    strace.cut = True
                    strace.leave()


_tracer = _Tracer()


def _refusal(words: bytes) -> tuple[str, str]:
    lines = [re.sub(r"^\S*strace: ", "", line) for line in words.decode("utf-8", "replace").splitlines() if line]
    first = lines[0] if lines else "strace gave no reason"
    return ("denied" if "Operation not permitted" in first else "failed"), first


def _finish(tell: Callable[[Reply], None]) -> None:
    straces = _tracer.end()
    time.sleep(_SETTLE_S)  # what was asleep falls asleep again
    look = Look()
    after = {strace.pid: _after(strace.pid, look) for strace in straces}
    for strace in straces:
        state, tracer, threads = after[strace.pid]
        logs, unread = _read(strace) if strace.size else ((), "")
        traced = Traced(
            pid=strace.pid,
            began_s=strace.began_s,
            ended_s=strace.ended_s,
            log_bytes=strace.size,
            cut=strace.cut,
            kept=strace.kept,
            unread=unread,
            logs=logs,
            state=state,
            tracer=tracer,
            threads=threads,
        )
        tell(Reply(traced=(traced,)))
        strace.log.close()


def _after(pid: int, look: Look) -> tuple[str, int | None, tuple[Thread, ...]]:
    state = machine.process_state(pid).letter
    if state in ("", "Z", "X"):
        return "", None, ()
    return state, procs.tracer(pid) or None, blocked_threads.blocked(pid, look)


def _read(strace: _Strace) -> tuple[tuple[ThreadLog, ...], str]:
    """Read the log of one process: what is shown of its threads, or why it could not be read."""
    found = read_logs([f"/proc/self/fd/{strace.log.fileno()}"])
    return tuple(map(_without_crowd, found.threads)), "; ".join(why for _, why in found.errors)


def _without_crowd(log: ThreadLog) -> ThreadLog:
    """Keep what may be shown."""
    return replace(
        log,
        calls=log.calls[:_CALLS],
        errors=log.errors[:_ERRORS],
        places=log.places[:_PLACES],
        slowest=log.slowest[:_FEW],
        spins=log.spins[:_FEW],
        polls=log.polls[:_FEW],
        ends=(),
    )
