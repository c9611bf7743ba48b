"""Facts of one node: what strace saw of some processes while it was attached to them. Nothing is judged here.

The logs have no name, unless they are to be kept: strace writes to a descriptor of ours. So nothing is left, however
we end; and strace ends with us, which detaches it.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import re
import selectors
import signal
import sys
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass, replace

from distdiag.jobs.collect import facts
from distdiag.node import blocked, boot, machine, private, procs, run, tools
from distdiag.node.blocked import Thread  # noqa: TC001 - decoded by its annotations
from distdiag.node.descriptors import Look
from distdiag.node.ends import Network, Person, networks, people
from distdiag.node.strace.types import ThreadLog  # noqa: TC001 - decoded by its annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from distdiag.node.strace.types import Logs

__all__ = ["facts", "more"]

LOOKS = ("-yy", "-ttt", "-T")
"""What descriptors stand for, when each call began and how long it took."""
_WHOLE = ("-e", "abbrev=!?poll,?ppoll")
"""-s bounds lists as well as strings, and what a thread polls has to be seen."""
_ATTACH_S, _DETACH_S, _SETTLE_S = 8.0, 3.0, 0.05
_STUCK_LOOKS, _BETWEEN_S = 3, 0.1
_MAX_WORDS = 65536
_CALLS, _ERRORS, _PLACES, _FEW = 40, 20, 10, 5
# strace is to end when we do, even when we are killed; Linux only, as strace is.
_GUARD = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Attached:
    """What became of attaching to one process.

    `why` not: "gone", "traced" (by `tracer`), "kernel" (a thread of it is in state D), "no-strace", "denied", "failed";
    empty if strace is attached. `words`: what strace said. `threads`: what they were blocked on before, from /proc.
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

    `cut`: the log was as long as it may be, so strace left early. `kept`: where the log lies. `unread`: why it was
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
class Told:
    """What is told at a time."""

    attached: tuple[Attached, ...] = ()
    traced: tuple[Traced, ...] = ()
    networks: tuple[Network, ...] = ()
    people: tuple[Person, ...] = ()


def more(ask: dict[str, Any], tell: Callable[[Told], None]) -> None:
    """Attach strace, or detach it and tell what it saw.

    {"do": "attach", "pids", "calls": which, for -e, "payload": bytes of it, "limit_bytes" of all logs, "folder" and
    "names": by pid, of logs to keep, "near": whose sockets are told; or "do": "finish", "reader": what reads logs}
    """
    if ask["do"] == "attach":
        _attach(ask, tell)
    else:
        _finish(ask, tell)


def arguments(calls: str, payload_bytes: int = 0) -> list[str]:
    """Return the options that all our logs are written with; `payload_bytes` of what is read, written and sent."""
    strings = ("-s", str(payload_bytes), *_WHOLE)
    return ["-f", *LOOKS, *strings, *(["-e", f"trace={calls}"] if calls else [])]


def _attach(ask: dict[str, Any], tell: Callable[[Told], None]) -> None:
    look = Look()
    found = networks(ask["near"], look)
    mentioned = {one.pid for network in found for one in network.sockets}
    tell(Told(networks=found, people=people(mentioned.difference(ask["near"]))))
    before = {pid: _before(pid, look) for pid in ask["pids"]}
    _tracer.start([one.pid for one in before.values() if not one.why], ask)
    for pid, one in before.items():
        why, words = _tracer.refused.get(pid, (one.why, one.words))
        tell(Told(attached=(replace(one, why=why, words=words),)))


def _before(pid: int, look: Look) -> Attached:
    """Look at a process, and find out whether strace may be attached to it."""
    state, tracer = machine.process_state(pid).letter, procs.tracer(pid)
    why = "no-strace" if tools.find("strace") is None else ""
    if state in ("", "Z", "X"):
        why = "gone"
    elif tracer:
        why = "traced"
    elif not why and _is_stuck(pid):
        why = "kernel"
    words = machine.command_line(tracer) if tracer else ""
    return Attached(pid, why, words, tracer or None, state, blocked.blocked(pid, look) if state else ())


def _is_stuck(pid: int) -> bool:
    """Tell whether a thread stays in the kernel (D): strace could not leave it again."""
    stuck = _in_kernel(pid)
    for _ in range(_STUCK_LOOKS - 1):
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
        self.said_all = threading.Event()
        self.cut = False
        self.began_s = self.ended_s = time.time()
        path = f"/proc/{os.getpid()}/fd/{self.log.fileno()}"
        argv = [tool, *arguments(ask["calls"], ask["payload"]), "-o", path, "-p", str(pid)]
        self.process = run.start([sys.executable, "-S", "-c", _GUARD, *argv])

    @property
    def is_attached(self) -> bool:
        return b" attached" in self.words

    @property
    def size(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def leave(self) -> None:
        """Ask it to detach, once."""
        if self.process.poll() is None and self.ended_s == self.began_s:
            self.ended_s = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGINT)


class _Tracer:
    """All straces of this node. A thread of its own takes what they say, and looks after the size of the logs."""

    def __init__(self) -> None:
        self.straces: dict[int, _Strace] = {}
        self.refused: dict[int, tuple[str, str]] = {}
        self._limit_bytes = 0

    def start(self, pids: Sequence[int], ask: dict[str, Any]) -> None:
        """Attach to processes, and wait until that is done."""
        self._limit_bytes = ask["limit_bytes"]
        tool = tools.find("strace") or ""
        for pid in pids:
            try:
                self.straces[pid] = _Strace(pid, tool, ask)
            except OSError as error:
                self.refused[pid] = ("failed", f"{error.filename}: {error.strerror}")
            except run.CannotRun as error:
                self.refused[pid] = ("failed", str(error))
        threading.Thread(target=self._listen, daemon=True).start()
        deadline = time.monotonic() + _ATTACH_S
        while any(map(self._is_coming, self.straces.values())) and time.monotonic() < deadline:
            time.sleep(0.005)
        for pid, one in list(self.straces.items()):
            if one.is_attached:
                one.began_s = one.ended_s = time.time()
            else:
                self._drop(self.straces.pop(pid))
                self.refused[pid] = _refusal(one.words)

    def end(self) -> list[_Strace]:
        """Detach all, by force if they do not; gives them."""
        straces, self.straces = list(self.straces.values()), {}
        for one in straces:
            one.leave()
        deadline = time.monotonic() + _DETACH_S
        while any(one.process.poll() is None for one in straces) and time.monotonic() < deadline:
            time.sleep(0.005)
        for one in straces:
            if one.ended_s == one.began_s:  # it had ended by itself, with the process
                one.ended_s = time.time()
            run.end_group(one.process)
        return straces

    def _is_coming(self, one: _Strace) -> bool:
        return not one.is_attached and one.process.poll() is None

    def _drop(self, one: _Strace) -> None:
        run.end_group(one.process)
        one.said_all.wait(_DETACH_S)
        one.log.close()
        if one.kept:
            with contextlib.suppress(OSError):
                os.unlink(one.kept)

    def _listen(self) -> None:
        straces = list(self.straces.values())
        with selectors.DefaultSelector() as selector:
            for one in straces:
                # A duplicate: the other one is closed by whoever ends the process.
                selector.register(os.dup(one.process.stderr.fileno()), selectors.EVENT_READ, one)  # type: ignore[union-attr]
            while selector.get_map():
                for key, _ in selector.select(0.05):
                    data = os.read(key.fd, 65536)
                    key.data.words = (key.data.words + data)[:_MAX_WORDS]
                    if not data:
                        key.data.said_all.set()
                        selector.unregister(key.fd)
                        os.close(key.fd)
                self._watch_size()

    def _watch_size(self) -> None:
        straces = list(self.straces.values())
        with contextlib.suppress(ValueError):  # a log was closed meanwhile
            if sum(one.size for one in straces) > self._limit_bytes:
                for one in straces:
                    one.cut = True
                    one.leave()


_tracer = _Tracer()


def private_file(path: str) -> Any:  # noqa: ANN401 - a binary file
    """Make a file that only its owner may read, as data stands in it; without a path one that has no name."""
    if not path:
        return tempfile.TemporaryFile(prefix="distdiag-")
    private.make_folder(os.path.dirname(path))
    return open(private.open_file(path, os.O_RDWR), "r+b")


def _refusal(words: bytes) -> tuple[str, str]:
    lines = [re.sub(r"^\S*strace: ", "", line) for line in words.decode("utf-8", "replace").splitlines() if line]
    said = lines[0] if lines else "strace said nothing"
    return ("denied" if "Operation not permitted" in said else "failed"), said


def reader_text(sources: dict[str, str]) -> str:
    """Pack the modules that read logs. They come late: what starts an agent has no room for them."""
    return base64.b64encode(zlib.compress(json.dumps(sources).encode())).decode()


def _read(paths: Sequence[str], reader: str) -> Logs:
    sys.meta_path.insert(0, boot.CarriedFinder(json.loads(zlib.decompress(base64.b64decode(reader)))))
    logs: Logs = importlib.import_module("distdiag.node.strace.log").read_logs(paths)
    return logs


def _finish(ask: dict[str, Any], tell: Callable[[Told], None]) -> None:
    straces = _tracer.end()
    time.sleep(_SETTLE_S)  # what was asleep falls asleep again
    look = Look()
    after = {one.pid: _after(one.pid, look) for one in straces}
    paths = {f"/proc/self/fd/{one.log.fileno()}": one for one in straces if one.size}
    read = _read(list(paths), ask["reader"])
    unread = dict(read.errors)
    for path, one in {**{str(one.pid): one for one in straces}, **paths}.items():
        if one.size and path not in paths:
            continue
        logs = tuple(_without_crowd(log) for log in read.threads if log.path == path)
        state, tracer, threads = after[one.pid]
        traced = Traced(
            pid=one.pid,
            began_s=one.began_s,
            ended_s=one.ended_s,
            log_bytes=one.size,
            cut=one.cut,
            kept=one.kept,
            unread=unread.get(path, ""),
            logs=logs,
            state=state,
            tracer=tracer,
            threads=threads,
        )
        tell(Told(traced=(traced,)))
        one.log.close()


def _after(pid: int, look: Look) -> tuple[str, int | None, tuple[Thread, ...]]:
    state = machine.process_state(pid).letter
    if state in ("", "Z", "X"):
        return "", None, ()
    return state, procs.tracer(pid) or None, blocked.blocked(pid, look)


def _without_crowd(log: ThreadLog) -> ThreadLog:
    """Keep what may be shown."""
    return replace(
        log,
        calls=log.calls[:_CALLS],
        errors=log.errors[:_ERRORS],
        places=log.places[:_PLACES],
        slowest=_few(log.slowest),
        spins=_few(log.spins),
        programs=_few(log.programs),
    )


def _few(rows: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(rows)[:_FEW]
