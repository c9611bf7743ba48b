"""What open ways and names say besides: strangers, large packets that vanish, loss, taken ports, MASTER_ADDR. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.ports.choice import address_of
from distdiag.commands.ports.cover import Culprit, explain
from distdiag.commands.ports.findings import EVIDENCE, finding, way_line
from distdiag.node.network import is_loopback
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.ports.check import Seen
    from distdiag.commands.ports.collect import Ports
    from distdiag.commands.ports.model import Way

_LOSSY_SHARE = 0.05
"""Packets sent again of those that the data takes: all nodes send at once here, which alone costs up to 3 of 100."""
_PACKET_BYTES = 1400
_ENOUGH_PACKETS = 8


def about_quality(seen: Seen) -> list[Finding]:
    """Judge ways that are open, after a fashion."""
    return [*_strangers(seen), *_swallowed(seen), *_lossy(seen), *_taken(seen)]


def _strangers(seen: Seen) -> list[Finding]:
    """Name ports at which somebody else answers, though we listen there: a proxy, or another machine."""
    found: dict[tuple[str, str], list[Way]] = {}
    for way in seen.ways:
        if way.probe.verdict == "stranger":
            found.setdefault((way.target, way.probe.said), []).append(way)
    return [
        finding(
            "stranger",
            Level.FAIL,
            f"something else answers at {seen.hosts[target]} ({ways[0].probe.address})"
            + (f", it says {said!r}" if said else ""),
            detail="A proxy in between, or another machine with this address: torch would wait there for ever.",
            where=Where(hosts=(seen.hosts[target], *dict.fromkeys(seen.hosts[way.source] for way in ways))),
            evidence=tuple(way_line(seen, way) for way in ways[:EVIDENCE]),
            fix=Fix(text="see who has this address, and which proxy stands between"),
        )
        for (target, said), ways in found.items()
    ]


def _swallowed(seen: Seen) -> list[Finding]:
    """Find the ways on which large packets vanish: some link carries less than the interfaces think."""
    bad = [way for way in seen.ways if way.probe.verdict.startswith("swallowed")]
    if not bad:
        return []
    directed = [
        (way.source, way.target) if way.probe.verdict == "swallowed-up" else (way.target, way.source) for way in bad
    ]
    ends = sorted({node for edge in directed for node in edge})
    mtus: dict[int | None, list[str]] = {}
    for node in ends:
        mtus.setdefault(_mtu(seen.nodes.get(node)), []).append(seen.hosts[node])
    probe = bad[0].probe
    words = _directions(seen, explain([(way.source, way.target) for way in seen.ways], set(directed)))
    device = probe.interface or "eth0"
    largest = max((mtu for mtu in mtus if mtu), default=1500)
    return [
        finding(
            "mtu-black-hole",
            Level.FAIL,
            f"large packets vanish: {words}",
            detail="Small ones come through, so torch's init works and the first large collective hangs. A link in "
            "between carries smaller packets than the interfaces send, and nobody tells them.",
            where=Where(hosts=tuple(seen.hosts[node] for node in ends)),
            evidence=(
                *(f"MTU {mtu or 'unknown'} on {fold(hosts)}" for mtu, hosts in mtus.items()),
                *(way_line(seen, way) for way in bad[:EVIDENCE]),
            ),
            fix=Fix(
                text="set the same MTU along the whole path; to see whether it is this, lower it at both ends",
                commands=(
                    f"ip link set dev {device} mtu 1280",
                    f"ping -c 3 -M do -s {largest - 28} {probe.resolved[0] if probe.resolved else probe.address}",
                ),
            ),
        )
    ]


def _directions(seen: Seen, culprits: Sequence[Culprit]) -> str:
    """Say in which directions: into and out of node1; node2 -> node3."""
    sides: dict[tuple[str, ...], list[str]] = {}
    words = []
    for one in culprits:
        names = fold(seen.hosts[node] for node in one.nodes)
        if one.kind in ("in", "out"):
            sides.setdefault(one.nodes, []).append("into" if one.kind == "in" else "out of")
        elif one.kind == "pair":
            words.append(f"{names} -> {fold(seen.hosts[node] for node in one.others)}")
        else:
            words.append("between all nodes")
    whole = [f"{' and '.join(ways)} {fold(seen.hosts[node] for node in nodes)}" for nodes, ways in sides.items()]
    return "; ".join([*whole, *words])


def _mtu(node: Ports | None) -> int | None:
    if node is None:
        return None
    own = address_of(node)
    return next((nic.mtu for nic in node.nics if any(one.partition("/")[0] == own for one in nic.addresses)), None)


def _lossy(seen: Seen) -> list[Finding]:
    """Name ways on which many packets had to be sent again."""
    bad = [
        way
        for way in seen.ways
        if way.probe.verdict == "lossy"
        or (
            way.probe.verdict == "ok"
            and way.probe.retransmits >= max(_ENOUGH_PACKETS, _LOSSY_SHARE * way.probe.bulk_bytes / _PACKET_BYTES)
        )
    ]
    if not bad or any(way.probe.verdict.startswith("swallowed") for way in seen.ways):
        return []
    hosts = tuple(dict.fromkeys(seen.hosts[node] for way in bad for node in (way.source, way.target)))
    hopeless = any(way.probe.verdict == "lossy" for way in bad)
    return [
        finding(
            "link-lossy",
            Level.FAIL if hopeless else Level.WARN,
            f"packets are lost between {fold(hosts)}",
            detail="Collectives work over such a link, many times slower.",
            where=Where(hosts=hosts),
            evidence=tuple(
                f"{way_line(seen, way)}, {way.probe.retransmits} packets sent again" for way in bad[:EVIDENCE]
            ),
            fix=Fix(
                text="see the error counters of the interfaces, cables and switch ports on that way",
                commands=(f"ip -s link show dev {bad[0].probe.interface or 'eth0'}",),
            ),
        )
    ]


def _taken(seen: Seen) -> list[Finding]:
    """Say at which nodes a port was somebody else's, so that it could not be tried."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for node, ports in seen.taken.items():
        for port, who in ports.items():
            groups.setdefault(port, []).append((seen.hosts[node], who))
    return [
        finding(
            "port-taken",
            Level.WARN,
            f"port {port} on {fold(host for host, _ in found)} is taken, so it was not tried there",
            where=Where(hosts=tuple(host for host, _ in found)),
            evidence=tuple(f"{host}: {who}" for host, who in found[:EVIDENCE]),
            fix=Fix(text="a running job has it, or one that was left over: end it, or take another port (--port)"),
        )
        for port, found in groups.items()
    ]


def about_names(seen: Seen) -> list[Finding]:
    """Judge names: MASTER_ADDR, and the first node's own name, as each node resolves them."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for one in seen.lookups:
        if not one.addresses:
            wrong.setdefault((one.name, ""), []).append(seen.hosts[one.node])
        elif all(is_loopback(address) for address in one.addresses) and len(seen.nodes) > 1:
            wrong.setdefault((one.name, ", ".join(one.addresses)), []).append(seen.hosts[one.node])
    return [_name(seen, name, address, hosts) for (name, address), hosts in wrong.items()]


def _name(seen: Seen, name: str, address: str, hosts: list[str]) -> Finding:
    first = next(iter(seen.nodes))
    master = any(ports.variables.get("MASTER_ADDR") == name for ports in seen.nodes.values())
    what = "MASTER_ADDR" if master else f"the name of {seen.hosts[first]}"
    title = f"{what}, {name}, resolves to {address} on {fold(hosts)}"
    if not address:
        title = f"{fold(hosts)} cannot resolve {name}, {what}"
    return finding(
        "master-addr",
        Level.FAIL if master else Level.WARN,
        title,
        detail="Each node must be led to the node of rank 0; loopback leads to itself. Torchrun hands this name around."
        if address
        else "Torchrun hands this name around, and the others time out.",
        where=Where(hosts=tuple(hosts)),
        fix=Fix(
            text="name the address instead, on all nodes",
            commands=(f"export MASTER_ADDR={address_of(seen.nodes[first])}",),
        ),
    )
