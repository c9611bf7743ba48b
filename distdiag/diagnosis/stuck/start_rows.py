"""A process that waits for others to start, with its host; comparison and texts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.agent import port_scan
from distdiag.diagnosis import nic_selection
from distdiag.facts.network.interfaces import is_loopback
from distdiag.fold import by_key
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.jobs.starts import Meeting, Start
    from distdiag.jobs.types import NodePicture

_SEEN = {
    port_scan.CLOSED: "nothing listens there",
    port_scan.FILTERED: "no answer",
    port_scan.NO_ROUTE: "no route",
}
_SHOWN = 4
LOOPBACK = frozenset(("127.0.0.1", "::1"))


@record
class StartRow:
    """A waiting process and its host."""

    host: str
    start: Start
    own: frozenset[str]
    """All addresses of the host."""
    family: frozenset[int]
    """The process, its ancestors and descendants."""

    @property
    def place(self) -> str:
        """The rendezvous address, "host:port"."""
        launch = self.start.launch
        host = f"[{launch.host}]" if ":" in launch.host else launch.host
        return f"{host}:{launch.port}"

    @property
    def meeting(self) -> Meeting | None:
        """The state of that address as seen from its node."""
        return self.start.meeting

    @property
    def name(self) -> str:
        """Format it: "rank 3 on node2", "node2"."""
        if not self.is_rank:
            return self.host
        name = f"pid {self.start.pid}" if self.start.rank is None else f"rank {self.start.rank}"
        return f"{name} on {self.host}"

    @property
    def is_rank(self) -> bool:
        """Return whether it is a rank rather than a launcher."""
        return self.start.launch.program == "environment"

    def is_server(self) -> bool:
        """Return whether its own store, or that of the torchrun above it, listens at the rendezvous address."""
        met = self.meeting
        return met is not None and met.is_here and met.server in self.family


def is_served(row: StartRow, rows: Sequence[StartRow]) -> bool:
    """Return whether a process of the same job listens at the rendezvous address."""
    if row.is_server():
        return True
    servers = [other for other in rows if other.is_server() and other.start.launch.port == row.start.launch.port]
    met = row.meeting
    return met is not None and any(set(met.addresses) & other.own for other in servers)


def limit_s(row: StartRow) -> float | None:
    """Return a launcher's total wait: for the store, or for the other nodes."""
    met, launch = row.meeting, row.start.launch
    return launch.gives_up_s if met is not None and met.state == port_scan.OPEN else launch.connects_s


def owners(nodes: Iterable[NodePicture]) -> dict[str, str]:
    """Map addresses to hosts, without addresses of several hosts such as a bridge's."""
    found = by_key((address, node.host) for node in nodes for address in by_interface(node))
    return {address: hosts[0] for address, hosts in found.items() if len({*hosts}) == 1}


def resolved(row: StartRow, owner: Mapping[str, str]) -> tuple[str, int]:
    """Return the key that processes must share to meet: machine (by host or address) and port."""
    met = row.meeting
    if met is None or not met.addresses:
        return row.place, 0
    if met.is_here:
        return row.host, met.port
    return next((owner[address] for address in met.addresses if address in owner), met.addresses[0]), met.port


def meets_at_loopback(met: Meeting) -> bool:
    """Return whether all addresses of a rendezvous are loopback."""
    return bool(met.addresses) and all(map(is_loopback, met.addresses))


def why_own(row: StartRow) -> str:
    """Describe why a rendezvous address is the machine itself."""
    met = row.meeting
    name = row.start.launch.host
    return f"{name} is {met.addresses[0]} there" if met is not None and met.addresses[0] != name else "it is loopback"


def by_interface(node: NodePicture) -> dict[str, str]:
    """Map a node's addresses to interfaces, without loopback."""
    return {
        text.partition("/")[0]: name
        for read in node.starts
        for name, texts in read.addresses.items()
        for text in texts
        if not is_loopback(text.partition("/")[0])
    }


def interfaces_in_words(rows: Iterable[StartRow], nodes: Iterable[NodePicture], *, lacking: bool) -> list[str]:
    """Describe the interfaces chosen by the ranks' variables: those with an address, or (`lacking`) the names without.

    Matched as in Gloo (exact names) and NCCL (prefixes).
    """
    by_host = {node.host: read.addresses for node in nodes for read in node.starts}
    found: dict[str, list[str]] = {}
    for row in rows:
        has = by_host.get(row.host, {})
        for name, value in row.start.interfaces.items():
            is_nccl = name.startswith("NCCL")
            chosen = [nic for nic in has if (nic_selection.takes(value, nic) if is_nccl else nic in value.split(","))]
            text = ", ".join(f"{nic} {has[nic][0].partition('/')[0]}" for nic in chosen if has[nic])
            if bool(text) is not lacking:
                lacks = f"no interface of {row.host} ({', '.join(nic for nic in has if nic != 'lo')})"
                found.setdefault(f"{name}={value}", []).append(f"{text} on {row.host}" if text else lacks)
    return [f"{name} is {'; '.join(list(dict.fromkeys(chosen))[:_SHOWN])}." for name, chosen in found.items()]


def evidence_of(row: StartRow) -> str:
    """Format one process: "node2: torchrun (pid 17), node rank 1, at node1:29500 (10.0.0.1): refused"."""
    launch, met = row.start.launch, row.meeting
    parts = [f"pid {row.start.pid}"]
    parts += [f"node rank {launch.node_rank}"] if launch.node_rank is not None else []
    parts += [f"of {value_in_words(launch.nodes)} nodes"] if not row.is_rank else []
    place = f"at {row.place}" if launch.host else "names no rendezvous"
    if met is not None:
        place += f" ({', '.join(met.addresses[:2]) or met.error})"
        place += (
            ", where it listens" if row.is_server() else f": {_SEEN.get(met.state, met.state)}" if met.state else ""
        )
    name = f"rank {row.start.rank}" if row.is_rank else launch.program
    return f"{row.host}: {name} ({', '.join(parts)}) {place}"


def value_in_words(value: object) -> str:
    """Format an option's value; a count of nodes as "2:4"."""
    if isinstance(value, tuple):
        return str(value[0]) if value[0] == value[1] else f"{value[0]}:{value[1]}"
    return str(value)
