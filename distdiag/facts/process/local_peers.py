"""Busy processes at the other end of a rank's pipes and local sockets, such as a server working for it."""

from __future__ import annotations

import os
import stat

from distdiag.facts import deadlines
from distdiag.facts.network import sockets
from distdiag.facts.process import process_counters
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from distdiag.facts.network.tcp_bytes import TcpBytes
    from distdiag.facts.process.process_counters import Counters

_MOST = 16
"""Limit of busy processes with their descriptors read, the busiest first."""
_GENERATIONS = 3
"""A server's work may be done by a child of the connected process."""
_OUTPUT = (1, 2)
"""The other end of a rank's output is a launcher, tee, or log collector."""

_READS, _WRITES = stat.S_IRUSR, stat.S_IWUSR
_BOTH = _READS | _WRITES
_PATIENCE_S = 0.5


@record
class Peer:
    """A busy process, and the rank connected to it or to an ancestor of it.

    `reads`: it reads from the rank; only known for pipes.
    """

    rank: int
    pid: int
    reads: bool = False


def busy_peers(
    targets: Mapping[int, Mapping[int, str]],
    busy: Mapping[int, float],
    table: Mapping[int, Counters],
    connections: Iterable[TcpBytes],
    but: Container[int],
) -> Iterator[Peer]:
    """Find the ranks connected to busy processes.

    Args:
        targets: by rank, the links of its descriptors.
        busy: processor seconds by pid.
        table: all processes.
        connections: all of the ranks' network namespaces.
        but: never peers: ranks, and their ancestors.
    """
    if not busy:
        return
    ends = _other_ends(targets, connections)
    for pid in sorted(busy, key=lambda pid: -busy[pid])[:_MOST]:
        ranks = {rank for holder in _line(pid, table, but) for rank in _connected(holder, ends)}
        yield from (Peer(rank, pid) for rank in sorted(ranks))


def pipe_ends(targets: Mapping[int, Mapping[int, str]], pids: Sequence[int]) -> Iterator[Peer]:
    """Find processes at the other end of a rank's pipe or FIFO.

    Args:
        targets: by rank, the links of its descriptors.
        pids: the first 16 are checked.
    """
    held: dict[str, list[tuple[int, int]]] = {}
    for rank, links in targets.items():
        for fd, link in links.items():
            if fd not in _OUTPUT and link.startswith(("pipe:[", "/")):
                held.setdefault(link, []).append((rank, fd))
    shared = [
        (rank, other, pid, fd)
        for pid in pids[:_MOST]
        for fd, link in process_counters.visible_links(pid).items()
        for rank, other in held.get(link, ())
    ]
    # A file of the same name may be on a file system that does not answer.
    modes, _ = deadlines.each(shared, _end_modes, patience_s=_PATIENCE_S)
    for (rank, _, pid, _), ends in modes.items():
        if ends in ((_WRITES, _READS), (_READS, _WRITES)):
            yield Peer(rank, pid, reads=ends[1] == _READS)


def _end_modes(shared: tuple[int, int, int, int]) -> tuple[int, int]:
    """Return the access modes of a rank's and a peer's descriptor of one pipe or FIFO; (0, 0) for any other file."""
    rank, other, pid, fd = shared
    try:
        is_pipe = stat.S_ISFIFO(os.stat(f"/proc/{rank}/fd/{other}").st_mode)
    except OSError:
        return 0, 0
    return (_modes(rank, other), _modes(pid, fd)) if is_pipe else (0, 0)


def _other_ends(
    targets: Mapping[int, Mapping[int, str]], connections: Iterable[TcpBytes]
) -> dict[str, list[tuple[int, int]]]:
    """Return the (rank, descriptor) connected to each link that a peer would have open."""
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
    for _ in range(_GENERATIONS):
        if pid in but or pid not in table:
            break
        yield pid
        pid = table[pid].parent


def _connected(pid: int, ends: Mapping[str, list[tuple[int, int]]]) -> Iterator[int]:
    for fd, link in process_counters.visible_links(pid).items():
        for rank, other in ends.get(link, ()):
            if link.startswith("socket:[") or _modes(pid, fd) | _modes(rank, other) == _BOTH:
                yield rank


def _modes(pid: int, fd: int) -> int:
    """Return the access mode of a descriptor, by the permissions of its link: S_IRUSR, S_IWUSR."""
    try:
        return os.lstat(f"/proc/{pid}/fd/{fd}").st_mode & _BOTH
    except OSError:
        return 0
