"""Facts of one node: waits of the threads of some processes. Nothing is judged here."""

from __future__ import annotations

import time
from dataclasses import replace

from distdiag.facts import machine
from distdiag.facts.network.socket_owners import Network, PeerProcess, networks, peer_processes
from distdiag.facts.process import blocked_threads, procs
from distdiag.facts.process.blocked_threads import Blocked, Thread
from distdiag.facts.process.descriptors import Look
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SWITCHES = ("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
_WAITERS = 8
SAMPLED_S = 0.3
"""Time between the two samples of every thread."""


@record
class Reply:
    """One message: processes first; at the end the sockets of all of them, and other processes referred to."""

    processes: tuple[Blocked, ...] = ()
    networks: tuple[Network, ...] = ()
    peer_processes: tuple[PeerProcess, ...] = ()


def sample(pids: Sequence[int], tell: Callable[[Reply], None]) -> None:
    """Sample every thread of processes twice."""
    reader = Look()
    began = time.monotonic()
    first = {pid: _ran(pid) for pid in pids}
    time.sleep(max(0.0, began + SAMPLED_S - time.monotonic()))
    mentioned: set[int] = set()
    for pid in pids:
        process = _process(pid, first[pid], reader)
        mentioned.update(_mentioned(process))
        tell(Reply(processes=(process,)))
    found = networks(pids, reader)
    mentioned.update(owned.pid for network in found for owned in network.sockets)
    tell(Reply(networks=found, peer_processes=peer_processes(mentioned.difference(pids))))


def _process(pid: int, first: dict[int, tuple[str, ...]], reader: Look) -> Blocked:
    threads = tuple(_without_crowd(thread) for thread in blocked_threads.blocked(pid, reader))
    last = _ran(pid)
    moved = tuple(thread.tid for thread in threads if first.get(thread.tid) != last.get(thread.tid))
    return Blocked(pid, machine.process_state(pid).letter, procs.tracer(pid), threads, moved, procs.thaws_by(pid))


def _without_crowd(thread: Thread) -> Thread:
    """Cut the waiters of one futex: a pool of hundreds of threads would repeat them hundreds of times."""
    if thread.futex is None or len(thread.futex.waiters) <= _WAITERS:
        return thread
    return replace(thread, futex=replace(thread.futex, waiters=thread.futex.waiters[:_WAITERS]))


def _ran(pid: int) -> dict[int, tuple[str, ...]]:
    """Return each thread's context switch counts and CPU time."""
    found = {}
    for task in procs.tasks(pid):
        status = machine.read_text(f"/proc/{pid}/task/{task.tid}/status").splitlines()
        found[task.tid] = (*(line for line in status if line.startswith(_SWITCHES)), f"{task.cpu_s}")
    return found


def _mentioned(process: Blocked) -> Iterator[int]:
    for thread in process.threads:
        yield from (child.pid for child in thread.children)
        yield from (lock.pid for lock in thread.locks if lock.pid)
        for target in thread.targets:
            if target.descriptor is not None:
                yield from (end.pid for end in target.descriptor.ends)
    if process.tracer:
        yield process.tracer
