"""Facts of one node: open file descriptors. Nothing is judged here."""

from __future__ import annotations

import re

from distdiag.facts import machine
from distdiag.facts.network.socket_owners import Network, PeerProcess, networks, peer_processes
from distdiag.facts.process.descriptors import Descriptor, Look, descriptors
from distdiag.jobs.collect import facts
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["facts", "more"]


@record
class Ask:
    """`pids`: the processes to read; `others`: possible owners of the other ends."""

    pids: Sequence[int]
    others: Sequence[int]


@record
class Opened:
    """The descriptors of one process. `limit`: RLIMIT_NOFILE, None if unlimited or unknown.

    `unread`: why the list is empty: "denied", "gone".
    """

    pid: int
    limit: int | None
    descriptors: tuple[Descriptor, ...]
    unread: str


@record
class Reply:
    """One part of the answer: processes first; the last part has the sockets and the processes mentioned."""

    processes: tuple[Opened, ...] = ()
    networks: tuple[Network, ...] = ()
    peer_processes: tuple[PeerProcess, ...] = ()


def more(ask: Ask, tell: Callable[[Reply], None]) -> None:
    """Read the descriptors of processes."""
    reader = Look()
    mentioned: set[int] = set()
    for pid in ask.pids:
        found = descriptors(pid, reader)
        tell(Reply(processes=(Opened(pid, _limit(pid), found.descriptors, found.unread),)))
        mentioned.update(end.pid for descriptor in found.descriptors for end in descriptor.ends)
    known = [*ask.pids, *ask.others]
    sockets = networks(known, reader)
    mentioned.update(owned.pid for network in sockets for owned in network.sockets)
    tell(Reply(networks=sockets, peer_processes=peer_processes(mentioned.union(ask.pids))))


def _limit(pid: int) -> int | None:
    limits = machine.read_text(f"/proc/{pid}/limits")
    soft = re.search(r"^Max open files\s+(\d+)", limits, re.MULTILINE)
    return int(soft[1]) if soft else None
