"""Facts of one node: what the threads of some processes are blocked on. Nothing is judged here."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from distdiag.jobs.collect import facts
from distdiag.node import blocked, machine, procs
from distdiag.node.blocked import Thread  # noqa: TC001 - decoded by its annotations
from distdiag.node.descriptors import Look
from distdiag.node.ends import Network, Person, networks, people

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["facts", "more"]

_SWITCHES = ("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
_WAITERS = 8


@dataclass(frozen=True)
class Blocked:
    """One process. `moved`: its threads that ran between the looks; `tracer`: who traces it. No threads: it is gone.

    `thaws`: the command that lets it go on, if its cgroup is frozen.
    """

    pid: int
    state: str
    tracer: int | None
    threads: tuple[Thread, ...]
    moved: tuple[int, ...]
    thaws: str = ""


@dataclass(frozen=True)
class Told:
    """What is told at a time: processes first, at the end the sockets of all of them, and who else was mentioned."""

    processes: tuple[Blocked, ...] = ()
    networks: tuple[Network, ...] = ()
    people: tuple[Person, ...] = ()


def more(ask: dict[str, Any], tell: Callable[[Told], None]) -> None:
    """Look twice at every thread of processes: {"pids", "interval_s": between the looks}."""
    pids, look = list(ask["pids"]), Look()
    began = time.monotonic()
    first = {pid: _ran(pid) for pid in pids}
    time.sleep(max(0.0, began + ask["interval_s"] - time.monotonic()))
    mentioned: set[int] = set()
    for pid in pids:
        one = _process(pid, first[pid], look)
        mentioned.update(_mentioned(one))
        tell(Told(processes=(one,)))
    found = networks(pids, look)
    mentioned.update(one.pid for network in found for one in network.sockets)
    tell(Told(networks=found, people=people(mentioned.difference(pids))))


def _process(pid: int, first: dict[int, tuple[str, ...]], look: Look) -> Blocked:
    threads = tuple(_without_crowd(one) for one in blocked.blocked(pid, look))
    last = _ran(pid)
    moved = tuple(one.tid for one in threads if first.get(one.tid) != last.get(one.tid))
    return Blocked(pid, machine.process_state(pid).letter, procs.tracer(pid), threads, moved, procs.thaws_by(pid))


def _without_crowd(one: Thread) -> Thread:
    """Keep a few of the threads that wait at the same address: a pool of hundreds would be told hundreds of times."""
    if one.futex is None or len(one.futex.waiters) <= _WAITERS:
        return one
    return replace(one, futex=replace(one.futex, waiters=one.futex.waiters[:_WAITERS]))


def _ran(pid: int) -> dict[int, tuple[str, ...]]:
    """Count for each thread how often it gave up the processor, or had to; and the time it used."""
    found = {}
    for task in procs.tasks(pid):
        status = machine.read_text(f"/proc/{pid}/task/{task.tid}/status").splitlines()
        found[task.tid] = (*(line for line in status if line.startswith(_SWITCHES)), f"{task.cpu_s}")
    return found


def _mentioned(one: Blocked) -> Iterator[int]:
    for thread in one.threads:
        yield from (child.pid for child in thread.children)
        yield from (lock.pid for lock in thread.locks if lock.pid)
        for target in thread.targets:
            if target.descriptor is not None:
                yield from (end.pid for end in target.descriptor.ends)
    if one.tracer:
        yield one.tracer
