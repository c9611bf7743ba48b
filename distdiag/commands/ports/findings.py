"""What the ways between nodes mean: who drops what, in which direction, and what opens it. Pure."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.ports.choice import suggested
from distdiag.commands.ports.cover import Culprit, explain
from distdiag.commands.ports.model import COMMAND
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.ports.check import Seen
    from distdiag.commands.ports.collect import Ports
    from distdiag.commands.ports.model import Way

EVIDENCE = 6


def finding(id_: str, level: Level, title: str, **rest: object) -> Finding:
    """Make a finding of this command."""
    return Finding(id=f"{COMMAND}.{id_}", level=level, title=title, **rest)  # type: ignore[arg-type]


def about_closed(seen: Seen) -> list[Finding]:
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
        evidence=tuple(way_line(seen, way) for way in ways[:EVIDENCE]),
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
    nic = suggested(node.nics)
    return str(ipaddress.ip_interface(nic.addresses[0]).network) if nic is not None else "0.0.0.0/0"


def way_line(seen: Seen, way: Way) -> str:
    """Write one way as evidence."""
    probe = way.probe
    how = f": {probe.error}" if probe.error else ""
    by = f" from {probe.interface}" if probe.interface else ""
    to = f"{probe.address} port {probe.port} ({seen.hosts[way.target]})"
    return f"{seen.hosts[way.source]}{by} -> {to}: {probe.verdict}{how}"
