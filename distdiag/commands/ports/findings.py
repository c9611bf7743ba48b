"""What the ways between nodes mean: who drops what, in which direction, and what opens it. Pure."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.ports.cover import Culprit, explain
from distdiag.commands.ports.model import COMMAND
from distdiag.node.network import is_loopback
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.ports.check import Seen
    from distdiag.commands.ports.collect import Ports
    from distdiag.commands.ports.model import Way

_EVIDENCE = 6
_LOSSY_SHARE = 0.05
"""Packets sent again of those that the data takes: all nodes send at once here, which alone costs up to 3 of 100."""
_PACKET_BYTES = 1400
_ENOUGH_PACKETS = 8


def finding(id_: str, level: Level, title: str, **rest: object) -> Finding:
    """Make a finding of this command."""
    return Finding(id=f"{COMMAND}.{id_}", level=level, title=title, **rest)  # type: ignore[arg-type]


def about_ways(seen: Seen) -> list[Finding]:
    """Judge all ways that were tried."""
    found = [*_closed(seen), *_strangers(seen), *_swallowed(seen), *_lossy(seen)]
    return found + _taken(seen)


def _closed(seen: Seen) -> list[Finding]:
    """Explain ways that are closed, for each kind of answer; the same culprit for both kinds of port is named once."""
    found: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], dict[str, Culprit]] = {}
    verdicts = dict.fromkeys(way.probe.verdict for way in seen.ways)
    for verdict in verdicts:
        if verdict in ("ok", "lossy", "stranger", "swallowed-up", "swallowed-down"):
            continue
        for purpose in ("port", "ranks"):
            ways = [way for way in seen.ways if way.purpose == purpose]
            closed = {(way.source, way.target) for way in ways if way.probe.verdict == verdict}
            for one in explain([(way.source, way.target) for way in ways], closed):
                found.setdefault((verdict, one.kind, one.nodes, one.others), {})[purpose] = one
    return [_judged(seen, key[0], purposes) for key, purposes in found.items()]


def _judged(seen: Seen, verdict: str, purposes: dict[str, Culprit]) -> Finding:
    one = next(iter(purposes.values()))
    ways = [
        way
        for way in seen.ways
        if one.kind == "all" or (way.purpose in purposes and (way.source, way.target) in purposes[way.purpose].edges)
    ]
    ways = [way for way in ways if way.probe.verdict == verdict] or ways
    guilty = one.nodes if one.kind in ("in", "out", "all") else one.others
    hosts = tuple(seen.hosts[node] for node in (*one.nodes, *one.others))
    kinds = {"port": "port", "ranks": "rank-ports", "port ranks": "way"}
    return finding(
        f"{kinds[' '.join(sorted(purposes))]}-{verdict}",
        Level.FAIL,
        _title(seen, one, verdict, purposes, ways),
        detail=_detail(seen, one, verdict, purposes),
        where=Where(hosts=hosts),
        evidence=tuple(_line(seen, way) for way in ways[:_EVIDENCE]),
        fix=_fix(seen, guilty, verdict, one, purposes, ways),
    )


def _title(seen: Seen, one: Culprit, verdict: str, purposes: dict[str, Culprit], ways: Sequence[Way]) -> str:
    names = fold(seen.hosts[node] for node in one.nodes)
    others = fold(seen.hosts[node] for node in one.others)
    drops = {
        "filtered": "drops what {way}",
        "refused": "resets what {way}: a firewall, as somebody listens",
        "rejected": "turns away what {way}",
        "silent": "lets connections in and then nothing more: {way}",
        "broken": "cuts connections: {way}",
        "name": "cannot be resolved: {way}",
    }.get(verdict, verdict + ": {way}")
    where = _which(purposes, ways)
    if one.kind == "all":
        return f"no node reaches another {where}: {_word(verdict)}"
    if one.kind == "in":
        return f"{names} {drops.format(way='comes in')} {where}"
    if one.kind == "out":
        return f"{names} {drops.format(way='goes out')} {where}"
    back = _back(seen, one)
    return f"{names} -> {others}: {_word(verdict)} {where}{back}"


def _word(verdict: str) -> str:
    return {
        "filtered": "no answer",
        "refused": "refused by a firewall",
        "rejected": "turned away",
        "silent": "connected, then nothing",
        "broken": "cut",
        "name": "the address does not resolve",
    }.get(verdict, verdict)


def _which(purposes: dict[str, Culprit], ways: Sequence[Way]) -> str:
    """Say which ports: a certain one, those of ranks, or all."""
    certain = sorted({way.probe.port for way in ways if way.purpose == "port"})
    if tuple(purposes) == ("ranks",):
        return "at ephemeral ports, which ranks use among themselves"
    if tuple(purposes) == ("port",):
        return f"at port {', '.join(map(str, certain))}"
    return "at every tried port"


def _back(seen: Seen, one: Culprit) -> str:
    """Say whether the other direction works."""
    reverse = {(target, source) for source, target in one.edges}
    ways = [way for way in seen.ways if (way.source, way.target) in reverse]
    if not ways:
        return ""
    return "; the other way round it works" if all(way.is_open for way in ways) else ""


def _detail(seen: Seen, one: Culprit, verdict: str, purposes: dict[str, Culprit]) -> str:
    parts = []
    if one.kind in ("in", "out") and len(one.nodes) == 1:
        node = one.nodes[0]
        other = [way for way in seen.ways if (way.source if one.kind == "in" else way.target) == node]
        if other and all(way.is_open for way in other):
            parts.append("What goes out of it works." if one.kind == "in" else "What comes in at it works.")
    if tuple(purposes) == ("ranks",):
        parts.append("The rendezvous port is open, so torch's store works; then Gloo or NCCL times out, naming nobody.")
    if tuple(purposes) == ("port",):
        parts.append("Ephemeral ports are open: it is this port.")
    if verdict == "filtered":
        parts.append("A closed port would answer: these packets are dropped.")
    if one.kind == "pair" and len(one.nodes) == 1 and len(one.others) == 1:
        parts.append("Which of the two ends drops them cannot be seen from here.")
    return " ".join(parts)


def _fix(
    seen: Seen,
    guilty: Sequence[str],
    verdict: str,
    one: Culprit,
    purposes: dict[str, Culprit],
    ways: Sequence[Way],
) -> Fix:
    if verdict == "name":
        return Fix(text="give the nodes addresses that all can resolve, in DNS or /etc/hosts")
    node = seen.nodes.get(guilty[0])
    ports = _to_open(node, purposes, ways)
    names = fold(seen.hosts[name] for name in guilty)
    text = f"let TCP {', '.join(ports)} {'out of' if one.kind == 'out' else 'into'} {names}"
    cloud = "; in a cloud, a security group that allows all traffic from itself"
    return Fix(text=text + cloud, commands=opening(node, ports) if node is not None else ())


def _to_open(node: Ports | None, purposes: dict[str, Culprit], ways: Sequence[Way]) -> list[str]:
    ports = sorted({str(way.probe.port) for way in ways if way.purpose == "port"})
    if "ranks" in purposes or not ports:
        low, high = node.ephemeral_ports if node is not None and node.ephemeral_ports else (32768, 60999)
        ports.append(f"{low}-{high}")
    return ports


def opening(node: Ports, ports: Sequence[str]) -> tuple[str, ...]:
    """Give the commands that open ports with the firewall of a node: the active one, else the tool that is there."""
    tools = {"firewalld": "firewall-cmd", "ufw": "ufw", "nftables": "nft", "iptables": "iptables"}
    active = [tools[name] for name in node.firewall.active if tools[name] in node.firewall.tools]
    tool = next(iter([*active, *node.firewall.tools]), "")
    sudo = "" if node.root else "sudo "
    source = subnet(node)
    if tool == "firewall-cmd":
        opened = " ".join(f"--add-port={port}/tcp" for port in ports)
        return (f"{sudo}firewall-cmd --permanent {opened} && {sudo}firewall-cmd --reload",)
    if tool == "ufw":
        return tuple(f"{sudo}ufw allow proto tcp from {source} to any port {port.replace('-', ':')}" for port in ports)
    if tool == "nft":
        return (f"{sudo}nft list ruleset | grep -nE 'drop|reject|dport'",)
    if tool == "iptables":
        return tuple(
            f"{sudo}iptables -I INPUT -p tcp -s {source} --dport {port.replace('-', ':')} -j ACCEPT" for port in ports
        )
    return ()


def subnet(node: Ports) -> str:
    """Give the network of a node's main interface: 10.0.0.0/24."""
    from distdiag.commands.ports.choice import suggested

    nic = suggested(node.nics)
    return str(ipaddress.ip_interface(nic.addresses[0]).network) if nic is not None else "0.0.0.0/0"


def _line(seen: Seen, way: Way) -> str:
    probe = way.probe
    how = f": {probe.error}" if probe.error else ""
    by = f" from {probe.interface}" if probe.interface else ""
    to = f"{probe.address} port {probe.port} ({seen.hosts[way.target]})"
    return f"{seen.hosts[way.source]}{by} -> {to}: {probe.verdict}{how}"


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
            evidence=tuple(_line(seen, way) for way in ways[:_EVIDENCE]),
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
                *(_line(seen, way) for way in bad[:_EVIDENCE]),
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
    from distdiag.commands.ports.choice import address_of

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
                f"{_line(seen, way)}, {way.probe.retransmits} packets sent again" for way in bad[:_EVIDENCE]
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
            evidence=tuple(f"{host}: {who}" for host, who in found[:_EVIDENCE]),
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
    from distdiag.commands.ports.choice import address_of

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
