"""Busy processes at the other end of a rank's pipes and local sockets: a server that works for it, for instance."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from distdiag.facts import process_counters, sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from distdiag.facts.process_counters import Counters
    from distdiag.facts.tcp_bytes import TcpBytes

_MOST = 16
"""Busy processes whose descriptors are read, the busiest first."""
_GENERATIONS = 3
"""A server's work may be done by a child of the process that has the connection."""
_OUTPUT = (1, 2)
"""At the other end of a rank's output: a launcher, tee, a collector of logs."""

_BOTH = stat.S_IRUSR | stat.S_IWUSR


@dataclass(frozen=True)
class Peer:
    """A busy process, and the rank that it, or a process above it, is connected to."""

    rank: int
    pid: int


def busy_peers(
    targets: Mapping[int, Mapping[int, str]],
    busy: Mapping[int, float],
    table: Mapping[int, Counters],
    connections: Iterable[TcpBytes],
    but: Container[int],
) -> Iterator[Peer]:
    """Find the ranks that busy processes are connected to.

    Args:
        targets: by rank, the links of its descriptors.
        busy: processor seconds by pid.
        table: all processes.
        connections: all of the ranks' network namespaces.
        but: never peers: ranks, and all processes above them.
    """
    if not busy:
        return
    ends = _other_ends(targets, connections)
    for pid in sorted(busy, key=lambda pid: -busy[pid])[:_MOST]:
        ranks = {rank for holder in _line(pid, table, but) for rank in _connected(holder, ends)}
        yield from (Peer(rank, pid) for rank in sorted(ranks))


def _other_ends(
    targets: Mapping[int, Mapping[int, str]], connections: Iterable[TcpBytes]
) -> dict[str, list[tuple[int, int]]]:
    """Return which (rank, descriptor) leads to each link that a peer would have open."""
    unix = sockets.unix_peers()
    by_ends = {(each.local, each.remote): each for each in connections}
    tcp = {each.inode: other.inode for each in by_ends.values() if (other := by_ends.get((each.remote, each.local)))}
    found: dict[str, list[tuple[int, int]]] = {}
    for rank, links in targets.items():
        for fd, link in links.items():
            if fd in _OUTPUT:
                continue
            if link.startswith("pipe:["):
                found.setdefault(link, []).append((rank, fd))
            elif link.startswith("socket:["):
                inode = int(link[8:-1])
                found.setdefault(f"socket:[{unix.get(inode) or tcp.get(inode)}]", []).append((rank, fd))
    return found


def _line(pid: int, table: Mapping[int, Counters], but: Container[int]) -> Iterator[int]:
    """List a process and those above it."""
    for _ in range(_GENERATIONS):
        if pid in but or pid not in table:
            break
        yield pid
        pid = table[pid].parent


def _connected(pid: int, ends: Mapping[str, list[tuple[int, int]]]) -> Iterator[int]:
    try:
        links = process_counters.links(pid)
    except PermissionError:
        return
    for fd, link in links.items():
        for rank, other in ends.get(link, ()):
            if link.startswith("socket:[") or _modes(pid, fd) | _modes(rank, other) == _BOTH:
                yield rank


def _modes(pid: int, fd: int) -> int:
    """Return the access mode of a descriptor as the rights of its link: S_IRUSR, S_IWUSR."""
    try:
        return os.lstat(f"/proc/{pid}/fd/{fd}").st_mode & _BOTH
    except OSError:
        return 0
