"""What the ways between nodes mean: who drops what, in which direction, and what opens it. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.ports.choice import address_of
from distdiag.commands.ports.cover import Culprit, explain, merged
from distdiag.commands.ports.model import COMMAND
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.ports.check import Seen
    from distdiag.commands.ports.collect import Ports
    from distdiag.commands.ports.model import Way

EVIDENCE = 6
_ITS_OWN = ("no-route", "no-port")
"""Answers of the source's own kernel: no packet was sent."""
_FEW_WAYS = 4
"""Up to so many ways, between two nodes, it is told which end they fail at."""


def finding(id_: str, level: Level, title: str, **rest: object) -> Finding:
    """Make a finding of this command."""
    return Finding(id=f"{COMMAND}.{id_}", level=level, title=title, **rest)  # type: ignore[arg-type]


def about_closed(seen: Seen) -> list[Finding]:
    """Explain ways that are closed, for each kind of answer; the same culprit for both kinds of port is named once."""
    main = [way for way in seen.ways if way.purpose in ("port", "ranks")]
    if len(main) > _FEW_WAYS and not any(way.is_open for way in main):
        return [_nothing_works(seen, main)]
    found: list[Finding] = []
    for verdict in dict.fromkeys(way.probe.verdict for way in main):
        if verdict not in ("ok", "lossy", "stranger", "swallowed-up", "swallowed-down"):
            found += [_judged(seen, verdict, one, purposes) for one, purposes in _culprits(seen, verdict)]
    return found


def _nothing_works(seen: Seen, ways: Sequence[Way]) -> Finding:
    """Say that no way at all is open, whatever the single answers are."""
    verdicts = Counter(way.probe.verdict for way in ways)
    nodes = tuple(dict.fromkeys(node for way in ways for node in (way.source, way.target)))
    purposes = tuple(dict.fromkeys(way.purpose for way in ways))
    return _judged(seen, verdicts.most_common(1)[0][0], Culprit(kind="all", nodes=nodes), purposes)


def is_flaky(seen: Seen, way: Way) -> bool:
    """Tell whether a way is closed and another try over the same is not: no firewall does that, loss does."""
    same = (way.source, way.target, way.purpose)
    return not way.is_open and any(
        one.is_open for one in seen.ways if (one.source, one.target, one.purpose) == same and one is not way
    )


def _cannot_answer(seen: Seen, way: Way) -> bool:
    """Whether no answer comes because the other end has no route back: that is a finding of its own."""
    back = (way.target, way.source)
    return way.probe.verdict == "filtered" and any(
        one.probe.verdict == "no-route" and (one.source, one.target) == back for one in seen.ways
    )


def _culprits(seen: Seen, verdict: str) -> list[tuple[Culprit, tuple[str, ...]]]:
    """Find who is behind one kind of answer, and at which kinds of port: (culprit, purposes)."""
    purposes: dict[tuple[str, tuple[str, ...], tuple[str, ...]], dict[str, Culprit]] = {}
    for purpose in ("port", "ranks"):
        ways = [way for way in seen.ways if way.purpose == purpose]
        closed = {
            (way.source, way.target)
            for way in ways
            if way.probe.verdict == verdict and not is_flaky(seen, way) and not _cannot_answer(seen, way)
        }
        for one in explain([(way.source, way.target) for way in ways], closed):
            purposes.setdefault((one.kind, one.nodes, one.others), {})[purpose] = one
    groups: dict[tuple[str, ...], list[Culprit]] = {}
    for each in purposes.values():
        groups.setdefault(tuple(each), []).append(next(iter(each.values())))
    return [(one, kinds) for kinds, culprits in groups.items() for one in merged(culprits)]


def _judged(seen: Seen, verdict: str, one: Culprit, purposes: tuple[str, ...]) -> Finding:
    ways = [
        way
        for way in seen.ways
        if way.probe.verdict == verdict
        and way.purpose in purposes
        and (one.kind == "all" or (way.source, way.target) in one.edges)
    ]
    guilty = one.nodes if one.kind in ("in", "out", "all") else one.others
    hosts = tuple(seen.hosts[node] for node in (*one.nodes, *one.others))
    accused = tuple(dict.fromkeys(seen.hosts[way.source] for way in ways)) if verdict in _ITS_OWN else hosts
    ends = dict.fromkeys(seen.hosts[node] for way in ways for node in (way.source, way.target))
    kinds = {"port": "port", "ranks": "rank-ports", "port ranks": "way"}
    return finding(
        f"{kinds[' '.join(sorted(purposes))]}-{verdict}",
        Level.FAIL,
        _title(seen, one, verdict, purposes, ways),
        detail=_detail(seen, one, verdict, purposes),
        where=Where(hosts=accused),
        witnesses=Witnesses(hosts=tuple(host for host in ends if host not in accused)),
        evidence=tuple(way_line(seen, way) for way in ways[:EVIDENCE]),
        fix=_other_interface(seen, one) or _fix(seen, guilty, verdict, one, purposes, ways),
    )


def _other_interface(seen: Seen, one: Culprit) -> Fix | None:
    """Where nothing goes over the chosen interfaces and all over others, those are the fix, and no firewall."""
    spare = [way for way in seen.ways if way.purpose == "other"]
    if one.kind != "all" or not spare or not all(way.is_open for way in spare):
        return None
    names = {way.probe.interface for way in spare} - {""}
    lines = [f"export NCCL_SOCKET_IFNAME='={name}' GLOO_SOCKET_IFNAME={name}" for name in sorted(names)]
    return Fix(
        text=f"take the interface over which they do reach each other: {', '.join(sorted(names))}",
        commands=tuple(lines),
    )


def _title(seen: Seen, one: Culprit, verdict: str, purposes: tuple[str, ...], ways: Sequence[Way]) -> str:
    names = fold(seen.hosts[node] for node in one.nodes)
    others = fold(seen.hosts[node] for node in one.others)
    drops = {
        "filtered": "drops what {way}",
        "refused": "resets what {way}: a firewall, as somebody listens",
        "rejected": "turns away what {way}",
        "silent": "lets connections in and then nothing more: {way}",
        "broken": "cuts connections: {way}",
        "cut-off": "carries some data and then none: {way}",
        "no-route": "has no route: its own kernel refuses what {way}",
        "no-port": "has no local port left for what {way}",
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
        "cut-off": "some data, then nothing",
        "no-route": "no route, says its own kernel",
        "no-port": "no local port is left",
        "name": "the address does not resolve",
    }.get(verdict, verdict)


def _which(purposes: tuple[str, ...], ways: Sequence[Way]) -> str:
    """Say which ports: a certain one, those of ranks, or all."""
    certain = sorted({way.probe.port for way in ways if way.purpose == "port"})
    if purposes == ("ranks",):
        return "at ephemeral ports, which ranks use among themselves"
    if purposes == ("port",):
        return f"at port {', '.join(map(str, certain))}"
    return "at every tried port"


def _back(seen: Seen, one: Culprit) -> str:
    """Say whether the other direction works."""
    reverse = {(target, source) for source, target in one.edges}
    ways = [way for way in seen.ways if (way.source, way.target) in reverse]
    if not ways:
        return ""
    return "; the other way round it works" if all(way.is_open for way in ways) else ""


def _detail(seen: Seen, one: Culprit, verdict: str, purposes: tuple[str, ...]) -> str:
    parts = []
    if one.kind in ("in", "out") and len(one.nodes) == 1:
        node = one.nodes[0]
        other = [way for way in seen.ways if (way.source if one.kind == "in" else way.target) == node]
        if other and all(way.is_open for way in other):
            parts.append("What goes out of it works." if one.kind == "in" else "What comes in at it works.")
    if purposes == ("ranks",):
        parts.append("The rendezvous port is open, so torch's store works; then Gloo or NCCL times out, naming nobody.")
    if purposes == ("port",):
        parts.append("Ephemeral ports are open: it is this port.")
    if verdict == "filtered":
        parts.append("A closed port would answer: these packets are dropped.")
    if one.kind == "pair" and len(one.nodes) == 1 and len(one.others) == 1 and verdict not in _ITS_OWN:
        parts.append("Which of the two ends drops them cannot be seen from here.")
    return " ".join(parts)


def _fix(
    seen: Seen,
    guilty: Sequence[str],
    verdict: str,
    one: Culprit,
    purposes: tuple[str, ...],
    ways: Sequence[Way],
) -> Fix:
    if verdict == "name":
        return Fix(text="give the nodes addresses that all can resolve, in DNS or /etc/hosts")
    if (fix := _fix_without_opening(seen, verdict, ways)) is not None:
        return fix
    node = seen.nodes.get(guilty[0])
    ports = _to_open(node, purposes, ways)
    names = fold(seen.hosts[name] for name in guilty)
    text = f"let TCP {', '.join(ports)} {'out of' if one.kind == 'out' else 'into'} {names}"
    cloud = "; in a cloud, a security group that allows all traffic from itself"
    if node is None:
        return Fix(text=text + cloud)
    if one.kind == "out":
        sudo = "" if node.root else "sudo "
        return Fix(text=text + cloud, commands=(f"{sudo}nft list ruleset | grep -n -A20 'hook output'",))
    return Fix(text=text + cloud, commands=opening(node, ports, source_of(seen)))


def _fix_without_opening(seen: Seen, verdict: str, ways: Sequence[Way]) -> Fix | None:
    """Give the fix where no firewall keeps a port closed."""
    sources = fold(dict.fromkeys(seen.hosts[way.source] for way in ways))
    probe = ways[0].probe
    if verdict == "no-route":
        return Fix(
            text=f"on {sources}, correct the route: it is missing, or says blackhole, unreachable or prohibit",
            commands=(
                f"ip route get {probe.resolved[0] if probe.resolved else probe.address}",
                "ip route show table all | grep -v 'table local'",
            ),
        )
    if verdict == "no-port":
        return Fix(
            text=f"on {sources}, see who uses the local ports; a larger range helps where they are needed",
            commands=(
                "ss -s; cat /proc/sys/net/ipv4/ip_local_port_range",
                "sudo sysctl -w net.ipv4.ip_local_port_range='1024 65535'",
            ),
        )
    if verdict in ("broken", "cut-off"):
        return Fix(
            text="the port is open: see which rule, proxy or limit ends connections, at both ends and between them",
            commands=("sudo nft list ruleset | grep -nE 'reject|drop|quota|ct (bytes|count|state)|limit'",),
        )
    return None


def _to_open(node: Ports | None, purposes: tuple[str, ...], ways: Sequence[Way]) -> list[str]:
    ports = sorted({str(way.probe.port) for way in ways if way.purpose == "port"})
    if "ranks" in purposes or not ports:
        low, high = node.ephemeral_ports if node is not None and node.ephemeral_ports else (32768, 60999)
        ports.append(f"{low}-{high}")
    return ports


def opening(node: Ports, ports: Sequence[str], source: str) -> tuple[str, ...]:
    """Give the commands that open ports to a network with a node's firewall: the active one, else the tool there is."""
    tools = {"firewalld": "firewall-cmd", "ufw": "ufw", "nftables": "nft", "iptables": "iptables"}
    active = [tools[name] for name in node.firewall.active if tools[name] in node.firewall.tools]
    tool = next(iter([*active, *node.firewall.tools]), "")
    sudo = "" if node.root else "sudo "
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


def source_of(seen: Seen) -> str:
    """Give the smallest network that holds the addresses of all nodes: 10.0.0.0/24."""
    found = [ipaddress.ip_address(address) for node in seen.nodes.values() if (address := address_of(node))]
    same = [one for one in found if found and one.version == found[0].version]
    if not same:
        return "0.0.0.0/0"
    network = ipaddress.ip_network(same[0])
    while not all(one in network for one in same):
        network = network.supernet()
    return str(network if network.prefixlen < 24 or network.version == 6 else network.supernet(new_prefix=24))


def way_line(seen: Seen, way: Way) -> str:
    """Write one way as evidence."""
    probe = way.probe
    how = f": {probe.error}" if probe.error else ""
    how += f" ({probe.route})" if probe.route else ""
    by = f" from {probe.interface}" if probe.interface else ""
    to = f"{probe.address} port {probe.port} ({seen.hosts[way.target]})"
    return f"{seen.hosts[way.source]}{by} -> {to}: {probe.verdict}{how}"
