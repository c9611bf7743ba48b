"""The ranks of one node: starts them, forwards their reports, inspects the silent ones, ends them.

Each rank has a process group, a pipe for its events and a pipe for its output. All facts are sent to the parent, which
judges them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field

from distdiag.agent import boot, protocol, rendezvous
from distdiag.agent.forkserver import Forkserver
from distdiag.facts import machine, programs
from distdiag.facts.stacks import py_spy

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import BinaryIO

    from distdiag.agent.wire import Writer

_TAIL_BYTES = 16 * 2**10
_STACKS = 16
"""Limit of stacks to read: more would exceed the second that a report may take."""
_STUCK = 32
"""Limit of connections per rank: each may be to a different node."""
_MAX_EVENT_BYTES = 2**20
_UNTRUSTED_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG"),
)
"""Variables that an unauthenticated parent may set: none can make a program load code."""
_NEEDED = (
    *("agent.boot", "agent.forkserver", "agent.handshake", "agent.protocol", "agent.rank_progress", "agent.rendezvous"),
    *("agent.wire", "facts.gpu.computed", "facts.gpu.gpu_health", "facts.gpu.gpu_use"),
    *("facts.machine", "facts.programs", "facts.text"),
)
"""The agent's modules that ranks import. Sending all would exceed a pipe's capacity and block each start."""
_LAUNCHER_VARIABLES = ("TORCHELASTIC_", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "PET_")


def carried_by_ranks(sources: dict[str, str]) -> dict[str, str]:
    """Remove the modules that only the agent imports."""
    return {
        name: text
        for name, text in sources.items()
        if name[len("distdiag.") :] in _NEEDED or not name.startswith(("distdiag.agent.", "distdiag.facts."))
    }


@dataclass
class Rank:
    """One rank process and its unread output."""

    rank: int
    process: programs.Process[bytes] | programs.Adopted
    events: int
    began: float
    log: BinaryIO | None  # unbuffered
    unread: bytes = b""
    tail: bytes = b""
    open_fds: set[int] = field(default_factory=set)


class Ranks:
    """All ranks of this node."""

    def __init__(self, wire: Writer, sources: dict[str, str], *, untrusted: bool = False) -> None:
        self._wire = wire
        self._sources = carried_by_ranks(sources)
        self._untrusted = untrusted
        self.listener: socket.socket | None = None
        self._oom_kills = machine.oom_kills()
        self._log_folder: str | None = None
        self._forkserver: Forkserver | None = None
        self._waiting: list[tuple[protocol.StartRank, float]] = []
        self._marks: dict[int, tuple[int, float, machine.Work]] = {}
        """Rank -> its process, the time, and its work until then."""
        self.running: dict[int, Rank] = {}

    def keep_logs(self) -> None:
        """Create the directory for the ranks' output; report it, or the error."""
        try:
            self._log_folder = tempfile.mkdtemp(prefix="distdiag-logs-")
        except OSError as error:
            self._wire.send(protocol.Logs(folder=None, error=str(error)))
        else:
            self._wire.send(protocol.Logs(folder=self._log_folder, error=""))

    def listen(self, order: protocol.Listen) -> None:
        """Listen on the rendezvous port for rank 0 before any rank starts; report the port, or its present owner."""
        try:
            self.listener = rendezvous.listen(order.port)
        except OSError as error:
            self._wire.send(_not_free(order.port, error))
        else:
            self._wire.send(protocol.Listening(port=self.listener.getsockname()[1]))

    def start(self, order: protocol.StartRank) -> None:
        """Start one rank; its config contains its descriptors."""
        began = time.monotonic()
        forked = order.forked
        if forked is None or not sys.platform.startswith("linux"):
            self._start_alone(order, began)
            return
        if self._forkserver is None:
            modules = [*forked["modules"], order.entry]
            self._forkserver = Forkserver(self._sources, modules, self._environment(order))
        self._waiting.append((order, began))
        self._wire.send(
            protocol.RankEvent(
                rank=order.rank,
                stage=forked["stage"],
                at=0,
                note=forked["note"],
                waiting=False,
                elapsed_s=0.0,
                payload={},
            )
        )

    @property
    def busy(self) -> bool:
        """Whether ranks are running or starting."""
        return bool(self.running or self._waiting)

    def descriptors(self) -> list[int]:
        """List the descriptors of new events and output."""
        news = [] if self._forkserver is None or not self._waiting else self._forkserver.descriptors()
        return news + [fd for rank in self.running.values() for fd in rank.open_fds]

    def poll(self) -> None:
        """Forward new events, then report ended ranks."""
        self._fork_waiting()
        for rank in list(self.running.values()):
            ended = rank.process.poll() is not None  # checked before reading, so that last words are not lost
            self._read_output(rank)
            self._read_events(rank)
            if ended:
                self._report_end(rank)

    def inspect(self, order: protocol.Inspect) -> None:
        """Report the state of the given ranks, stopped ones first, and the stacks of the first _STACKS."""
        from distdiag.facts.network import sockets

        pids = self._pids(order.ranks)
        for number in pids.keys() - self.running.keys():
            self._wire.send(protocol.RankStarted(rank=number, pid=pids[number]))
        states = {number: machine.process_state(pid) for number, pid in pids.items()}
        ordered = sorted(pids, key=lambda number: states[number].letter not in machine.STOPPED)
        found = py_spy.main_stacks(
            [*dict.fromkeys(pids[number] for number in ordered)][:_STACKS], timeout_s=order.timeout_s
        )
        self.poll()  # a step taken meanwhile invalidates the inspection, so report it first
        unread = py_spy.Stack((), f"not read: limited to {_STACKS} ranks per node")
        for number in ordered:
            state, stack = states[number], found.get(pids[number], unread)
            if state.letter in ("D", "R"):  # any process is for a moment: a page fault, a wake-up from a sleep
                state = machine.process_state(pids[number])
            busy, read_bytes = self._work_since_mark(number, pids[number])
            self._wire.send(
                protocol.RankInspected(
                    rank=number,
                    state=state.letter,
                    wait_channel=state.wait_channel,
                    frames=stack.frames,
                    stack_error=stack.error,
                    tail=_text(self.running[number].tail) if number in self.running else "",
                    busy=busy,
                    read_bytes=read_bytes,
                    stuck=sockets.stuck(pids[number])[:_STUCK],
                )
            )
        self._wire.send(protocol.InspectionDone())

    def mark(self) -> None:
        """Record the ranks' work so far, as the baseline of the next inspection."""
        pids = self._pids([*self.running, *(order.rank for order, _ in self._waiting)])
        self._marks = {number: (pid, time.monotonic(), machine.work_of(pid)) for number, pid in pids.items()}

    def _work_since_mark(self, number: int, pid: int) -> tuple[float, int]:
        """Return the busy share of the time since the mark, and the bytes read."""
        marked, at, before = self._marks.get(number, (0, 0.0, machine.Work()))
        if marked != pid:
            return 0.0, 0
        now = machine.work_of(pid)
        busy_s = max(0.0, now.busy_s - before.busy_s)  # negative after the exit of a thread, as its time is dropped
        busy = busy_s / max(0.001, time.monotonic() - at)
        return round(busy, 3), max(0, now.read_bytes - before.read_bytes)

    def end(self) -> None:
        """Kill every rank and its descendants."""
        if self.listener is not None:
            self.listener.close()
        for rank in self.running.values():
            self._close(rank)
        self.running.clear()
        self._waiting.clear()
        if self._forkserver is not None:
            self._forkserver.end()

    def _start_alone(self, order: protocol.StartRank, began: float) -> None:
        read_end, write_end = os.pipe()
        listener = [self.listener.fileno()] if order.rank == 0 and self.listener is not None else []
        config = {**order.config, "events_fd": write_end, "listener_fd": listener[0] if listener else None}
        payload = boot.pack(self._sources, order.entry, config)
        process = programs.start(
            [sys.executable, "-c", boot.START, str(len(payload)), "distdiag-rank", str(order.rank)],
            env=self._environment(order),
            pipes=programs.Pipes(stderr_to_stdout=True, keep=(write_end, *listener)),
        )
        assert process.stdin is not None
        # Some 20 KiB fit into the pipe without blocking. The pipe stays open: its end ends the rank.
        process.stdin.write(payload)
        os.close(write_end)
        self._follow(order.rank, process, read_end, began)

    def _fork_waiting(self) -> None:
        """Fork waiting ranks once the imports are done; start them alone if these failed."""
        if not self._waiting:
            return
        assert self._forkserver is not None
        self._forkserver.poll()
        if not self._forkserver.ready and not self._forkserver.failed:
            return
        waiting, self._waiting = self._waiting, []
        for order, began in waiting:
            if self._forkserver.failed or not self._fork(self._forkserver, order, began):
                self._start_alone(order, began)
        self._forkserver.end()  # later ranks start alone

    def _fork(self, server: Forkserver, order: protocol.StartRank, began: float) -> bool:
        stdin, output, events = os.pipe(), os.pipe(), os.pipe()
        theirs = [stdin[0], output[1], events[1]]
        listener = [self.listener.fileno()] if order.rank == 0 and self.listener is not None else []
        environment = self._environment(order)
        pid = server.fork({"env": environment, "entry": order.entry, "config": order.config}, theirs + listener)
        for fd in theirs:
            os.close(fd)
        if pid is None:
            for fd in (stdin[1], output[0], events[0]):
                os.close(fd)
            return False
        process = programs.Adopted(pid, stdin[1], output[0])
        self._follow(order.rank, process, events[0], began)
        return True

    def _follow(
        self, number: int, process: programs.Process[bytes] | programs.Adopted, events: int, began: float
    ) -> None:
        assert process.stdout is not None
        os.set_blocking(events, False)
        os.set_blocking(process.stdout.fileno(), False)
        if self.listener is not None and number == 0:
            self.listener.close()
        rank = self.running[number] = Rank(number, process, events, began, self._open_log(number))
        rank.open_fds = {events, process.stdout.fileno()}
        self._wire.send(protocol.RankStarted(rank=number, pid=process.pid))

    def _environment(self, order: protocol.StartRank) -> dict[str, str]:
        """Return this process's environment with the rank's own; another launcher's variables would mislead torch."""
        changes = {
            name: value for name, value in order.env.items() if not self._untrusted or name in _UNTRUSTED_VARIABLES
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
        # One thread per rank, as under torchrun: all ranks of a node at full width would only slow each other down.
        return {"OMP_NUM_THREADS": "1", **kept, **changes}

    def _pids(self, numbers: list[int]) -> dict[int, int]:
        """Return each rank's process; for a rank still to be forked, the process that does its imports."""
        pids = {number: self.running[number].process.pid for number in numbers if number in self.running}
        for order, _ in self._waiting:
            if order.rank in numbers and self._forkserver is not None:
                pids[order.rank] = self._forkserver.process.pid
        return pids

    def _open_log(self, rank: int) -> BinaryIO | None:
        if self._log_folder is None:
            return None
        return open(os.path.join(self._log_folder, f"rank-{rank}.log"), "wb", buffering=0)

    def _read_output(self, rank: Rank) -> None:
        assert rank.process.stdout is not None
        data = _drain(rank, rank.process.stdout.fileno())
        rank.tail = (rank.tail + data)[-_TAIL_BYTES:]
        if rank.log is not None and data:
            try:
                rank.log.write(data)
            except OSError:  # the disk is full: the test matters more than its log
                rank.log = None

    def _read_events(self, rank: Rank) -> None:
        lines = (rank.unread + _drain(rank, rank.events)).split(b"\n")
        rank.unread = lines.pop()[-_MAX_EVENT_BYTES:]
        for line in lines:
            event = json.loads(line)
            elapsed_s = round(event.pop("t") - rank.began, 3)
            self._wire.send(protocol.RankEvent(rank=rank.rank, elapsed_s=elapsed_s, **event))

    def _report_end(self, rank: Rank) -> None:
        status = self._close(rank)
        del self.running[rank.rank]
        kills = machine.oom_kills()
        self._wire.send(
            protocol.RankEnded(
                rank=rank.rank,
                status=status,
                elapsed_s=round(time.monotonic() - rank.began, 3),
                tail=_text(rank.tail),
                oom_kills=0 if kills is None or self._oom_kills is None else kills - self._oom_kills,
            )
        )

    def _close(self, rank: Rank) -> int | None:
        status = programs.end_group(rank.process)
        os.close(rank.events)
        if rank.log is not None:
            rank.log.close()
        return status


def _not_free(port: int, error: OSError) -> protocol.Listening:
    from distdiag.facts.network import listeners

    holder = listeners.port_holder(port)
    answer = rendezvous.identify_server("127.0.0.1", port, timeout_s=3.0) if holder and holder.listening else None
    return protocol.Listening(
        port=port,
        error=error.strerror or str(error),
        listening=holder.listening if holder else None,
        pid=holder.pid if holder else None,
        command=holder.command if holder else "",
        answer=answer,
    )


def _drain(rank: Rank, fd: int) -> bytes:
    """Read the available data; at the end of the stream, remove it from open_fds."""
    chunks = []
    while fd in rank.open_fds:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            break
        if not data:
            rank.open_fds.discard(fd)
        chunks.append(data)
    return b"".join(chunks)


def _text(tail: bytes) -> str:
    return tail.decode("utf-8", "replace")
