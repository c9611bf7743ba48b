"""The types of ports: what is asked, the facts of all nodes, and the answer as --json prints it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec  # noqa: TID253 - this module is only imported when the command runs

from distdiag.agent.port_scan import PortResult  # noqa: TC001
from distdiag.cluster.host_results import HostError, HostResult  # noqa: TC001

# msgspec reads the annotations.
from distdiag.cluster.rendezvous_test import LookUp, NetworkPath, PathTest
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.ports.collect import NodePorts  # noqa: TC001
from distdiag.diagnosis import nic_selection
from distdiag.diagnosis.nic_selection import SelectedNic
from distdiag.errors import UsageError
from distdiag.facts.listeners import Listener
from distdiag.facts.nics import IbPort, Nic

COMMAND = "ports"
USUAL_PORT = 29500
"""torch's default MASTER_PORT."""
_RENAMED = {"from_": "from"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    program: str
    cluster: Cluster
    targets: tuple[tuple[str, int], ...] = ()
    ports: tuple[int, ...] = ()
    named: bool = False
    """Whether ports were typed."""
    sample: int = 2
    bulk_bytes: int = 2**20
    timeout_s: float = 3.2
    verbose: bool = False


def read_ports(text: str) -> tuple[int, ...]:
    """Parse "6000,29500-29510". Raises UsageError."""
    found: dict[int, None] = {}
    for word in map(str.strip, text.split(",")):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= 65535:
            raise UsageError(f"invalid port {word!r}", hint="ports are 1 to 65535: --port 6000,29500-29510")
        found.update(dict.fromkeys(range(first, last + 1)))
    return tuple(found)


def read_target(text: str, ports: tuple[int, ...]) -> list[tuple[str, int]]:
    """Parse HOST, HOST:PORT, [IPv6]:PORT, or an IPv6 address alone. Raises UsageError."""
    match = re.fullmatch(r"\[([^\]]+)\](?::(\S+))?|([^:\s\[]+)(?::([^:\s]+))?|([0-9a-fA-F:.]+(?:%\w+)?)", text)
    if match is None or not text:
        raise UsageError(f"invalid host {text!r}", hint="write node1, node1:29500, 10.0.0.1 or [fd00::1]:29500")
    host = match[1] or match[3] or match[5]
    own = match[2] or match[4]
    return [(host, port) for port in (read_ports(own) if own else ports or (USUAL_PORT,))]


@dataclass(kw_only=True)
class PortsFacts:
    """What the nodes reported, by the fleet's names; `hosts` maps these to the names shown."""

    nodes: dict[str, NodePorts] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    scanned: dict[str, list[PortResult]] = field(default_factory=dict)
    """node -> the ports of other hosts that it tried."""
    paths: list[NetworkPath] = field(default_factory=list)
    lookups: list[LookUp] = field(default_factory=list)
    taken: dict[str, dict[str, str]] = field(default_factory=dict)
    """node -> port -> who has it, where we could not listen."""
    silent: list[str] = field(default_factory=list)
    doubles: tuple[str, ...] = ()
    """Hosts that are the same machine as another host of the list."""
    rows: tuple[HostResult, ...] = ()
    refusals: dict[str, HostError] = field(default_factory=dict)
    local: bool = True
    named: bool = False
    """The ports were typed; on the default port nothing listens before a job runs."""
    interrupted: bool = False

    @property
    def host(self) -> str:
        """A name for all of it: that of the first node."""
        return next(iter(self.hosts.values()), "nodes")

    def path_test(self) -> PathTest:
        """Return what was tried between nodes, for its judgement."""
        return PathTest(
            hosts=self.hosts,
            networks={name: node.network for name, node in self.nodes.items()},
            addresses={name: address_of(node) for name, node in self.nodes.items()},
            paths=self.paths,
            lookups=self.lookups,
            silent=tuple(self.silent),
        )


def address_of(node: NodePorts) -> str:
    """Return the address under which other nodes should reach a node."""
    return nic_selection.address_of(node.network.interfaces, node.variables)


@dataclass(frozen=True, kw_only=True)
class InterfaceRow(Nic):
    """One interface of a node."""

    host: str


@dataclass(frozen=True, kw_only=True)
class IbPortRow(IbPort):
    """One port of an RDMA device."""

    host: str


@dataclass(frozen=True, kw_only=True)
class ListenerRow(Listener):
    """Who listens on a node."""

    host: str


@dataclass(frozen=True, kw_only=True)
class SelectedRow(SelectedNic):
    """An interface that a library takes."""

    host: str


class SelectionRow(msgspec.Struct, frozen=True):
    """What NCCL and Gloo take on all nodes; a library that would fail takes nothing there."""

    nccl: tuple[SelectedRow, ...]
    gloo: tuple[SelectedRow, ...]


class ProbeRow(msgspec.Struct, frozen=True, rename=_RENAMED):
    """One port of one host, tried from one node. `by`: distdiag, http, ssh, other, silent; empty if it is not open."""

    from_: str
    to: str
    address: str
    port: int
    state: str
    by: str
    said: str
    local_address: str
    interface: str
    rtt_s: float | None
    error: str


class PairRow(msgspec.Struct, frozen=True, rename=_RENAMED):
    """One direction between two nodes, with a listener of ours. `purpose`: port, or ranks (an ephemeral port)."""

    from_: str
    to: str
    address: str
    port: int
    purpose: str
    state: str
    interface: str
    rtt_s: float | None
    throughput_bytes_per_s: float | None
    error: str


class PortsData(msgspec.Struct, frozen=True):
    """The facts of the answer. `exports` are the variables to set, per host; "" is for all of them.

    `hosts` has a row for each host that was asked for with --hosts.
    """

    hosts: tuple[HostResult, ...]
    interfaces: tuple[InterfaceRow, ...]
    ib_ports: tuple[IbPortRow, ...]
    choice: SelectionRow
    listeners: tuple[ListenerRow, ...]
    probes: tuple[ProbeRow, ...]
    pairs: tuple[PairRow, ...]
    ephemeral_ports: tuple[int, int] | None
    free_port: int | None
    exports: dict[str, dict[str, str]]
