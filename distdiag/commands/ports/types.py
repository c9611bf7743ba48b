"""Request, facts and report data of ports."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec  # noqa: TID253 - this module is only imported when the command runs

from distdiag.agent.port_scan import PortResult
from distdiag.cluster.host_results import HostError, HostResult  # noqa: TC001

# msgspec reads the annotations.
from distdiag.cluster.rendezvous_test import LookUp, NetworkPath, PathTest
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.ports.collect import NodePorts  # noqa: TC001
from distdiag.diagnosis import nic_selection
from distdiag.diagnosis.nic_selection import SelectedNic  # noqa: TC001
from distdiag.errors import UsageError
from distdiag.record import record

COMMAND = "ports"
USUAL_PORT = 29500
"""torch's default MASTER_PORT."""


@record(kw_only=True)
class Request:
    """The options."""

    program: str
    cluster: Cluster
    targets: tuple[tuple[str, int], ...] = ()
    ports: tuple[int, ...] = ()
    named: bool = False
    """Whether ports were typed."""
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
    """The reports of all nodes, by fleet name; `hosts` maps these to labels."""

    nodes: dict[str, NodePorts] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    scanned: dict[str, list[PortResult]] = field(default_factory=dict)
    """node -> the ports of other hosts it probed."""
    paths: list[NetworkPath] = field(default_factory=list)
    lookups: list[LookUp] = field(default_factory=list)
    taken: dict[str, dict[str, str]] = field(default_factory=dict)
    """node -> port -> its holder, if we could not listen."""
    silent: list[str] = field(default_factory=list)
    doubles: tuple[str, ...] = ()
    """Hosts that are the same machine as another one in the list."""
    rows: tuple[HostResult, ...] = ()
    refusals: dict[str, HostError] = field(default_factory=dict)
    local: bool = True
    named: bool = False
    """The ports were typed; the default port has no listener before a job runs."""
    interrupted: bool = False

    @property
    def host(self) -> str:
        """A label for all: the first node's."""
        return next(iter(self.hosts.values()), "nodes")

    def path_test(self) -> PathTest:
        """Return the probes between nodes, for judgement."""
        return PathTest(
            hosts=self.hosts,
            networks={name: node.network for name, node in self.nodes.items()},
            addresses={name: address_of(node) for name, node in self.nodes.items()},
            paths=self.paths,
            lookups=self.lookups,
            silent=tuple(self.silent),
        )


def address_of(node: NodePorts) -> str:
    """Return the address at which other nodes should reach a node."""
    return nic_selection.address_of(node.network.interfaces, node.variables)


@record(kw_only=True)
class Choice:
    """The interfaces NCCL and Gloo use on a node; empty for a library that would fail."""

    nccl: tuple[SelectedNic, ...]
    gloo: tuple[SelectedNic, ...]


@record(kw_only=True)
class ProbeRow(PortResult):
    """A port of a host, probed from the node `source`. `by`: distdiag, http, ssh, other, silent; empty if not open."""

    source: str
    by: str


class PortsData(msgspec.Struct, frozen=True):
    """The data of the report. `nodes`, `choice` and `exports`, variables to set, are by host; "" for all hosts.

    `hosts` has a row for each host of --hosts.
    """

    hosts: tuple[HostResult, ...]
    nodes: dict[str, NodePorts]
    choice: dict[str, Choice]
    probes: tuple[ProbeRow, ...]
    pairs: tuple[NetworkPath, ...]
    """Both ways between nodes, by host, to our own listeners."""
    exports: dict[str, dict[str, str]]
