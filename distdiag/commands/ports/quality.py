"""What open ways and names say besides: strangers, large packets that vanish, loss, taken ports, MASTER_ADDR. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.ports.choice import address_of
from distdiag.commands.ports.cover import Culprit, explain, merged
from distdiag.commands.ports.findings import EVIDENCE, finding, is_flaky, way_line
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
_ENOUGH_WAYS = 3
_MANY_PACKETS = 150


def about_quality(seen: Seen) -> list[Finding]:
    """Judge ways that are open, after a fashion."""
    return [*_dead_interfaces(seen), *_strangers(seen), *_swallowed(seen), *_lossy(seen), *_taken(seen)]


def _dead_interfaces(seen: Seen) -> list[Finding]:
    """Find interfaces that NCCL would use as well and that lead nowhere: it takes all of them, and hangs."""
    bad = [way for way in seen.ways if way.purpose == "also" and not way.is_open]
    if not bad:
        return []
    names = sorted({name for way in bad if (name := _interface_at(seen.nodes.get(way.target), way.probe.address))})
    good = sorted({way.probe.interface for way in seen.ways if way.purpose == "ranks" and way.is_open} - {""})
    hosts = tuple(dict.fromkeys(seen.hosts[way.target] for way in bad))
    lines = tuple(f"export NCCL_SOCKET_IFNAME='={name}'" for name in good[:1])
    return [
        finding(
            "nccl-dead-interface",
            Level.FAIL,
            f"NCCL would use {', '.join(names)} on {fold(hosts)} as well, and nobody is reached over it",
            detail="It spreads its connections over all that it takes, and hangs in those that lead nowhere.",
            where=Where(hosts=hosts),
            evidence=tuple(way_line(seen, way) for way in bad[:EVIDENCE]),
            fix=Fix(text=f"let it take {good[0]} only" if good else "name the interface that works", commands=lines),
        )
    ]


def _interface_at(node: Ports | None, address: str) -> str:
    nics = node.nics if node is not None else ()
    return next((nic.name for nic in nics if any(one.partition("/")[0] == address for one in nic.addresses)), "")


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
    bad = [way for way in seen.ways if _is_swallowed(way)]
    if not bad or _some_comes_through(seen):
        return []
    directed = [
        (way.source, way.target) if way.probe.verdict == "swallowed-up" else (way.target, way.source) for way in bad
    ]
    ends = sorted({node for edge in directed for node in edge})
    mtus: dict[int | None, list[str]] = {}
    for node in ends:
        mtus.setdefault(_mtu(seen.nodes.get(node)), []).append(seen.hosts[node])
    probe = bad[0].probe
    known = [way for way in seen.ways if way.is_open or way in bad]
    words = _directions(seen, merged(explain([(way.source, way.target) for way in known], set(directed))))
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
                    f"sudo ip link set dev {device} mtu 1280",
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
    """Name the nodes on whose ways many packets had to be sent again, or little came through in time."""
    some = _some_comes_through(seen)
    if any(_is_swallowed(way) for way in seen.ways) and not some:
        return []  # large packets that vanish are sent again as well
    hopeless = [
        way for way in seen.ways if way.probe.verdict == "lossy" or is_flaky(seen, way) or (some and _is_swallowed(way))
    ]
    slow = [way for way in hopeless if way.probe.verdict == "lossy" and not way.probe.retransmits]
    lossy = [way for way in hopeless if way not in slow] + [way for way in seen.ways if _loses(way)]
    worst = max((way.probe.retransmits for way in lossy), default=0)
    found = [_bad_link(seen, "link-slow", Level.FAIL, "little comes through", slow)] if slow else []
    # One burst that a busy machine drops is 45 packets: that alone says nothing about a link.
    if any(way in hopeless for way in lossy) or len(lossy) >= _ENOUGH_WAYS or worst >= _MANY_PACKETS:
        level = Level.FAIL if any(way in hopeless for way in lossy) else Level.WARN
        found.append(_bad_link(seen, "link-lossy", level, "packets are lost", lossy))
    return found


def _is_swallowed(way: Way) -> bool:
    return way.probe.verdict.startswith("swallowed")


def _some_comes_through(seen: Seen) -> bool:
    """Tell whether large packets do come through somewhere, if few: a link that swallows them swallows all."""
    return any(way.probe.verdict == "lossy" for way in seen.ways)


def _loses(way: Way) -> bool:
    """Tell whether more was sent again than nodes that all send at once cost each other."""
    share = _LOSSY_SHARE * way.probe.bulk_bytes / _PACKET_BYTES
    return way.probe.verdict == "ok" and way.probe.retransmits >= max(_ENOUGH_PACKETS, share)


def _bad_link(seen: Seen, id_: str, level: Level, what: str, bad: Sequence[Way]) -> Finding:
    edges = {edge for way in bad for edge in ((way.source, way.target), (way.target, way.source))}
    where = _directions(seen, merged(explain([(way.source, way.target) for way in seen.ways], edges)))
    hosts = tuple(dict.fromkeys(seen.hosts[node] for way in bad for node in (way.source, way.target)))
    device = bad[0].probe.interface or "eth0"
    return finding(
        id_,
        level,
        f"{what}: {where}",
        detail="Collectives work over such a link, many times slower.",
        where=Where(hosts=hosts),
        evidence=tuple(f"{way_line(seen, way)}, {way.probe.retransmits} packets sent again" for way in bad[:EVIDENCE]),
        fix=Fix(
            text="see the error counters and the speed of the interfaces, cables and switch ports on that way",
            commands=(f"ip -s link show dev {device}", f"cat /sys/class/net/{device}/speed"),
        ),
    )


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
    own = {entry.partition("/")[0] for node in seen.nodes.values() for nic in node.nics for entry in nic.addresses}
    of_first = next((node.names.fqdn for node in seen.nodes.values()), "")
    for one in seen.lookups:
        if one.name != of_first and _master_addr(seen, one.node) != one.name:
            continue  # another node's MASTER_ADDR: this one does not use it
        if not one.addresses:
            wrong.setdefault((one.name, ""), []).append(seen.hosts[one.node])
        elif all(is_loopback(address) for address in one.addresses) and len(seen.nodes) > 1:
            wrong.setdefault((one.name, ", ".join(one.addresses)), []).append(seen.hosts[one.node])
        elif not own & set(one.addresses):
            wrong.setdefault((one.name, f"{', '.join(one.addresses)}, which is none of these nodes,"), []).append(
                seen.hosts[one.node]
            )
    return [*(_name(seen, name, address, hosts) for (name, address), hosts in wrong.items()), *_masters_differ(seen)]


def _master_addr(seen: Seen, node: str) -> str:
    return seen.nodes[node].variables.get("MASTER_ADDR", "") if node in seen.nodes else ""


def _masters_differ(seen: Seen) -> list[Finding]:
    """Say where MASTER_ADDR is set to something else than elsewhere, or set on some nodes only."""
    values: dict[str, list[str]] = {}
    for node in seen.nodes:
        values.setdefault(_master_addr(seen, node), []).append(seen.hosts[node])
    if len(values) < 2:
        return []
    odd = min(values.items(), key=lambda entry: (len(entry[1]), not entry[0]))[1]
    told = "; ".join(f"{value or 'not set'} on {fold(hosts)}" for value, hosts in values.items())
    return [
        finding(
            "master-addr-differs",
            Level.WARN,
            f"MASTER_ADDR differs: {told}",
            detail="Ranks that are led to different places wait for each other for ever. A launcher may set it anew.",
            where=Where(hosts=tuple(odd)),
            fix=Fix(
                text="set the same on all nodes, or on none and let the launcher do it",
                commands=(f"export MASTER_ADDR={address_of(seen.nodes[next(iter(seen.nodes))])}", "unset MASTER_ADDR"),
            ),
        )
    ]


def _name(seen: Seen, name: str, address: str, hosts: list[str]) -> Finding:
    first = next(iter(seen.nodes))
    master = any(_master_addr(seen, node) == name for node in seen.nodes)
    what = "MASTER_ADDR" if master else f"the name of {seen.hosts[first]}"
    title = f"{what}, {name!r}, resolves to {address} on {fold(hosts)}"
    if not address:
        title = f"{fold(hosts)} cannot resolve {name!r}, {what}"
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
