"""Sockets of some processes, with their owners, and of any other process here at the other end."""

from __future__ import annotations

from distdiag.facts import machine
from distdiag.facts.network.sockets import inodes
from distdiag.facts.process import procs
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distdiag.facts.network.sockets import Namespace, Socket
    from distdiag.facts.process.descriptors import Look

_PROTOCOLS = ("tcp", "tcp6", "udp", "udp6")


@record
class Owned:
    """A socket and a process that owns it; other fields as in distdiag.facts.network.sockets."""

    pid: int
    inode: int
    protocol: str
    state: str
    local: str
    remote: str


@record
class Network:
    """One network namespace: its own addresses, and the sockets there."""

    name: str
    addresses: tuple[str, ...]
    sockets: tuple[Owned, ...]


@record
class PeerProcess:
    """A process mentioned in the report. `state` as in proc(5)."""

    pid: int
    comm: str
    command: str
    state: str


def networks(pids: Iterable[int], look: Look) -> tuple[Network, ...]:
    """Read the sockets of processes, by namespace; omits unreadable ones."""
    by_name: dict[str, list[int]] = {}
    for pid in pids:
        by_name.setdefault(machine.network_namespace(pid), []).append(pid)
    return tuple(_network(name, members, look) for name, members in by_name.items())


def peer_processes(pids: Iterable[int]) -> tuple[PeerProcess, ...]:
    """Describe the processes that are still alive."""
    found = ((pid, procs.read(pid)) for pid in sorted(set(pids)))
    return tuple(
        PeerProcess(pid, proc.comm, machine.command_line(pid) or proc.comm, proc.state)
        for pid, proc in found
        if proc is not None
    )


def _network(name: str, pids: list[int], look: Look) -> Network:
    namespace = look.tables.of(pids[0])
    inet = {inode: sock for inode, sock in namespace.sockets.items() if sock.protocol in _PROTOCOLS}
    own = [_owned(pid, inet[inode]) for pid in pids for inode in inodes(pid) if inode in inet]
    return Network(name, namespace.addresses, (*own, *_strangers(own, namespace, look)))


def _strangers(own: list[Owned], namespace: Namespace, look: Look) -> Iterator[Owned]:
    """Find other processes at the other end of these sockets, or listening on their remote ports."""
    known = {sock.inode for sock in own}
    connected: dict[tuple[str, str], Socket] = {}
    listening: dict[str, list[Socket]] = {}
    for sock in namespace.sockets.values():
        if sock.protocol in _PROTOCOLS and sock.remote:
            connected[sock.local, sock.remote] = sock
        elif sock.state == "LISTEN" and sock.protocol in _PROTOCOLS:
            listening.setdefault(_port(sock.local), []).append(sock)
    wanted: dict[int, Socket] = {}
    for mine in own:
        if mine.remote:
            exact = connected.get((mine.remote, mine.local))
            others = [exact] if exact else listening.get(_port(mine.remote), [])
            wanted.update((other.inode, other) for other in others if other.inode not in known)
    for inode, sock in wanted.items():
        for pid in sorted({end.pid for end in look.ends(f"socket:[{inode}]")}):
            yield _owned(pid, sock)


def _owned(pid: int, sock: Socket) -> Owned:
    return Owned(pid, sock.inode, sock.protocol, sock.state, sock.local, sock.remote)


def _port(end: str) -> str:
    return end.rpartition(":")[2]
