"""The answer of ports, as --json prints it. `from` is a word of Python, hence the renamed keys."""

from __future__ import annotations

import msgspec  # noqa: TID253 - imported lazily, with the diagnosis

from distdiag.cluster.rows import Row  # noqa: TC001 - encoded by its annotations

_RENAMED = {"from_": "from"}


class InterfaceRow(msgspec.Struct, frozen=True):
    """One interface of a node."""

    host: str
    name: str
    kind: str
    addresses: tuple[str, ...]
    up: bool
    running: bool
    mtu: int | None
    speed_bits_per_s: int | None
    default_route: bool


class IbPortRow(msgspec.Struct, frozen=True):
    """One port of an RDMA device."""

    host: str
    device: str
    port: int
    state: str
    link: str
    rate_bits_per_s: int | None
    netdevs: tuple[str, ...]


class Taken(msgspec.Struct, frozen=True):
    """An interface that a library takes."""

    host: str
    name: str
    address: str
    kind: str


class ChoiceRow(msgspec.Struct, frozen=True):
    """What NCCL and Gloo take on all nodes; a library that would fail takes nothing there."""

    nccl: tuple[Taken, ...]
    gloo: tuple[Taken, ...]


class ListenerRow(msgspec.Struct, frozen=True):
    """Who listens on a node."""

    host: str
    address: str
    port: int
    pid: int | None
    command: str


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

    hosts: tuple[Row, ...]
    interfaces: tuple[InterfaceRow, ...]
    ib_ports: tuple[IbPortRow, ...]
    choice: ChoiceRow
    listeners: tuple[ListenerRow, ...]
    probes: tuple[ProbeRow, ...]
    pairs: tuple[PairRow, ...]
    ephemeral_ports: tuple[int, int] | None
    free_port: int | None
    exports: dict[str, dict[str, str]]
