"""Judge probes between nodes: the closed path, its direction, the node at fault, and the fix. Pure.

The same fault has the same finding in every command that probes paths. For most of these faults torch prints identical
messages, or none; the detail of a finding quotes them.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from distdiag.agent.probe_server import BULK_BYTES
from distdiag.cluster.hosts import fold
from distdiag.cluster.rendezvous_test import PORT, RANKS
from distdiag.diagnosis import verdicts
from distdiag.diagnosis.nic_selection import export_line, exports, suggested
from distdiag.diagnosis.root_cause import Culprit, fewest_culprits, merged, pairs
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import counted
from distdiag.facts.network.interfaces import is_loopback
from distdiag.fold import by_key
from distdiag.ids import Shared
from distdiag.record import record
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from distdiag.cluster.rendezvous_test import LookUp, NetworkPath, PathTest
    from distdiag.facts.network.interfaces import Network

EVIDENCE_LINES = 6
_FEW_PATHS = 4
"""With up to this many paths (two nodes), each is judged separately if all are closed."""
_BY_ITS_OWN_KERNEL = ("no-route", "no-port")
"""No packet was sent."""
_AT_THE_SOURCE = (*_BY_ITS_OWN_KERNEL, "name", "loopback")
"""The fault is at the node that connects, whatever it connects to."""
_JUDGED_ELSEWHERE = ("stranger", "swallowed-up", "swallowed-down", "busy")
_PURPOSES = {(PORT,): "port", (RANKS,): "rank-ports", (PORT, RANKS): "path"}
_IDS = {"name": Shared.ADDRESS_UNRESOLVED, "loopback": Shared.ADDRESS_LOOPBACK}
_LISTS = {"ufw": "ufw status numbered", "iptables": "iptables -S INPUT"}
_FEW_RETRANSMITS = 4
"""Packets sent again for the 64 KiB of a small probe, about 50 full packets: more than a busy switch costs."""
_LOSSY_SHARE = 0.05
"""Packets sent again of those that much data takes: nodes that all send at once cost each other up to 3 of 100."""
_PACKET_BYTES = 1400
_SLOW_SHARE, _SLOW_BYTES_PER_S = 0.25, 25e6
"""Of the fastest quarter of the paths: among three nodes a slow one is an end of four of the six. Above 25 MB/s, 10 ms
for 256 KiB, latency and the processes at both ends decide, not the link."""
_ENOUGH_PACKETS = 8
_ENOUGH_PATHS = 3
_MANY_PACKETS = 150
"""One burst dropped by a busy machine is 45 packets: alone that proves no fault of a link that carried much data."""


@record(kw_only=True)
class Case:
    """A test to be judged, and for which command."""

    command: str
    test: PathTest
    head: str = ""
    """Rank 0's node."""
    rendezvous_port: int | None = None
    """Port where ranks will meet; None if no job is to be started."""
    again: Callable[[str], str] | None = None
    """Writes the command line that tries it once more, with these options added."""

    def host(self, node: str) -> str:
        """Return the host name of a node."""
        return self.test.hosts.get(node, node)

    def named(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the hosts of nodes, without repeats."""
        return tuple(dict.fromkeys(self.host(node) for node in nodes))

    def retry(self, options: str) -> tuple[str, ...]:
        """Return the command that repeats the test, if any."""
        return (self.again(options),) if self.again is not None else ()

    def finding(
        self,
        verdict: str,
        paths: Sequence[NetworkPath] = (),
        /,
        **given: Any,  # noqa: ANN401 - see verdicts.finding
    ) -> Finding:
        """Return the finding of a verdict, with some paths as evidence."""
        given.setdefault("evidence", tuple(evidence_line(self, path) for path in paths[:EVIDENCE_LINES]))
        return finding(f"path.{verdict}", {"command": self.command}, **given)


def path_findings(case: Case) -> list[Finding]:
    """Judge all tested paths, and the names that torch would advertise."""
    checks = (_silent, _busy, _closed, _foreign, _large_packets, _lossy, _own_names, _heads_name)
    return [found for check in checks for found in check(case)]


def _silent(case: Case) -> list[Finding]:
    hosts = case.named(case.test.silent)
    return [case.finding("no-answer", where=Where(hosts=hosts), hosts=fold(hosts))] if hosts else []


def _busy(case: Case) -> list[Finding]:
    """Report probes without packet loss or a timely answer: the network is not at fault."""
    paths = [path for path in _main(case) if _verdict(path) == "busy" and not _is_flaky(case, path)]
    if not paths:
        return []
    hosts, sources = case.named(path.target for path in paths), case.named(path.source for path in paths)
    return [
        case.finding(
            "busy",
            paths,
            where=Where(hosts=hosts),
            witnesses=Witnesses(hosts=tuple(host for host in sources if host not in hosts)),
            sources=fold(sources),
            hosts=fold(hosts),
            all=fold(dict.fromkeys((*hosts, *sources))),
        )
    ]


# Closed paths


def _closed(case: Case) -> list[Finding]:
    """Explain closed paths by kind of answer; a culprit for both kinds of port is named once."""
    paths = _main(case)
    edges = {_edge(path) for path in paths}
    if len(edges) > 2 and len(paths) > _FEW_PATHS and not any(p.is_open or _verdict(p) == "busy" for p in paths):
        culprits = fewest_culprits(edges, edges)
        if culprits[0].kind == "all" and any(_verdict(path) not in _JUDGED_ELSEWHERE for path in paths):
            return [_nothing_works(case, culprits[0], paths)]
    verdicts = dict.fromkeys(_verdict(path) for path in paths if not path.is_open)
    return [
        _closed_finding(case, verdict, culprit, purposes)
        for verdict in verdicts
        if verdict not in _JUDGED_ELSEWHERE
        for culprit, purposes in _culprits(case, verdict)
    ]


def _main(case: Case) -> list[NetworkPath]:
    """List the paths over the ranks' addresses."""
    return [path for path in case.test.paths if path.purpose in (PORT, RANKS)]


def _edge(path: NetworkPath) -> tuple[str, str]:
    return path.source, path.target


def _verdict(path: NetworkPath) -> str:
    """Return the probe's verdict; "loopback" if the address leads back to the source."""
    leads_home = any(is_loopback(address) for address in path.probe.resolved)
    return "loopback" if leads_home and not path.is_open and path.source != path.target else path.probe.verdict


def _nothing_works(case: Case, all_nodes: Culprit, paths: Sequence[NetworkPath]) -> Finding:
    """Report that all paths are closed, for whatever mix of reasons."""
    verdicts = Counter(_verdict(path) for path in paths)
    verdict = next(verdict for verdict, _ in verdicts.most_common() if verdict not in _JUDGED_ELSEWHERE)
    purposes = tuple(purpose for purpose in (PORT, RANKS) if any(path.purpose == purpose for path in paths))
    return _closed_finding(case, verdict, all_nodes, purposes)


def _is_flaky(case: Case, path: NetworkPath) -> bool:
    """Return whether loss closes a path, not a firewall: another try over it is open, or it opened and data stopped.

    The latter only if every other path of its ends is open, and one of them loses packets.
    """
    if path.is_open:
        return False
    same = [other for other in case.test.paths if _edge(other) == _edge(path) and other.purpose == path.purpose]
    if any(other.is_open for other in same):
        return True
    near = [other for other in case.test.paths if other not in same and {*_edge(other)} & {*_edge(path)}]
    alone = path.probe.verdict in _STOPS and all(other.is_open or _is_swallowed(other) for other in near)
    return alone and any(_loses(case, other) or other.probe.verdict == "lossy" for other in near)


_STOPS = ("silent", "cut-off")
"""Verdicts on connections that open."""


def _is_explained_elsewhere(case: Case, path: NetworkPath) -> bool:
    """Return whether another finding covers it: no route back from the other end, or another program at the address."""
    back = _edge(path)[::-1]
    return any(
        (_edge(other) == back and other.probe.verdict == "no-route" and path.probe.verdict == "filtered")
        or (_edge(other) == _edge(path) and other.probe.address == path.probe.address and _verdict(other) == "stranger")
        for other in case.test.paths
    )


def _culprits(case: Case, verdict: str) -> list[tuple[Culprit, tuple[str, ...]]]:
    """Find the culprits for one kind of answer: (culprit, purposes of the closed ports)."""
    by_culprit: dict[tuple[str, tuple[str, ...], tuple[str, ...]], dict[str, Culprit]] = {}
    for purpose in (PORT, RANKS):
        paths = [path for path in case.test.paths if path.purpose == purpose]
        closed = {
            _edge(path)
            for path in paths
            if _verdict(path) == verdict and not _is_flaky(case, path) and not _is_explained_elsewhere(case, path)
        }
        found = pairs(closed) if verdict in _AT_THE_SOURCE else fewest_culprits(map(_edge, paths), closed)
        for culprit in found:
            by_culprit.setdefault((culprit.kind, culprit.nodes, culprit.others), {})[purpose] = culprit
    by_purposes = by_key((tuple(each), next(iter(each.values()))) for each in by_culprit.values())
    return [(culprit, purposes) for purposes, group in by_purposes.items() for culprit in merged(group)]


def _closed_finding(case: Case, verdict: str, culprit: Culprit, purposes: tuple[str, ...]) -> Finding:
    paths = [
        path
        for path in case.test.paths
        if path.purpose in purposes
        and (culprit.kind == "all" or (_edge(path) in culprit.edges and _verdict(path) == verdict))
    ]
    accused = _accused(case, culprit, verdict)
    ends = case.named(node for path in paths for node in _edge(path))
    row = _row(case, verdict, culprit, purposes, paths)
    return Finding(
        id=(_IDS.get(verdict) or Shared(f"{_PURPOSES[purposes]}-{verdict}")).of(case.command),
        level=Level.FAIL,
        title=_title(case, culprit, row),
        detail=_detail(case, culprit, verdict, purposes, row),
        where=Where(hosts=accused),
        witnesses=Witnesses(hosts=tuple(host for host in ends if host not in accused)),
        evidence=tuple(evidence_line(case, path) for path in paths[:EVIDENCE_LINES]),
        fix=_other_interface(case, culprit) or _own_fix(case, verdict, row) or _opening(case, culprit, purposes, paths),
    )


@record(kw_only=True)
class _Closed(verdicts.Verdict):
    """The texts of a way to be closed; `title`: of a pair of nodes.

    `everywhere`: all paths are. `node`: all paths into or out of a node. `torch`: what torch prints for a closed port.
    """

    everywhere: str = "{name}"
    node: str = ""
    torch: str = ""
    detail: str = ""
    fix: str = ""


@cache
def _closed_rows() -> dict[str, _Closed]:
    return verdicts.rows("path_verdicts", "closed", _Closed)


def _row(
    case: Case, verdict: str, culprit: Culprit, purposes: tuple[str, ...], paths: Sequence[NetworkPath]
) -> _Closed:
    """Return the texts of a verdict, filled in."""
    probe = paths[0].probe
    other = case.host(culprit.others[0]) if len(culprit.others) == 1 else probe.address
    words = {
        "source": fold(case.named(culprit.nodes)),
        "sources": fold(case.named(path.source for path in paths)),
        "target": fold(case.named(culprit.others)) + (f" ({probe.address})" if probe.address != other else ""),
        "port": _ports_words(case, purposes, paths),
        "way": "inbound" if culprit.kind == "in" else "outbound",
        "error": probe.error,
        "reason": probe.error.lower(),
        "address": probe.address,
        "resolved": ", ".join(probe.resolved),
        "route": probe.route,
        "destination": _destination(paths[0]),
    }
    return verdicts.filled(_closed_rows()[verdict], words)


def _accused(case: Case, culprit: Culprit, verdict: str) -> tuple[str, ...]:
    """Return the hosts at fault: sources failing locally, else the culprit; of a pair, the end without open paths."""
    if verdict in _AT_THE_SOURCE or culprit.kind != "pair":
        return case.named(culprit.nodes)
    ends = (*culprit.nodes, *culprit.others)
    well = {node for path in case.test.paths if path.is_open for node in _edge(path)}
    return case.named([node for node in ends if node not in well] or ends)


def _title(case: Case, culprit: Culprit, row: _Closed) -> str:
    if culprit.kind == "all":
        return row.everywhere
    return row.node if culprit.kind != "pair" else row.title + _reverse_words(case, culprit)


def _ports_words(case: Case, purposes: tuple[str, ...], paths: Sequence[NetworkPath]) -> str:
    """Format the kind of ports: given ports, those of ranks, or all."""
    certain = sorted({path.probe.port for path in paths if path.purpose == PORT})
    if purposes == (RANKS,):
        return "ephemeral ports (used between ranks)"
    if purposes == (PORT,):
        meets = " (rendezvous)" if certain == [case.rendezvous_port] else ""
        return f"port {', '.join(map(str, certain))}{meets}"
    return "every tested port"


def _reverse_words(case: Case, culprit: Culprit) -> str:
    """Format the state of the other direction, if tested."""
    back = {(target, source) for source, target in culprit.edges}
    paths = [path for path in case.test.paths if _edge(path) in back]
    return "; the reverse direction works" if paths and all(path.is_open for path in paths) else ""


def _detail(case: Case, culprit: Culprit, verdict: str, purposes: tuple[str, ...], row: _Closed) -> str:
    parts = [row.detail]
    if verdict not in _AT_THE_SOURCE:
        torch = row.torch if PORT in purposes else ""
        parts = [_other_direction(case, culprit), _scope(case, culprit, purposes), row.detail, torch]
        if culprit.kind == "pair" and len(_accused(case, culprit, verdict)) == 2:
            parts.append("This test cannot decide which of the two ends is at fault.")
    return " ".join(filter(None, parts))


def _other_direction(case: Case, culprit: Culprit) -> str:
    if culprit.kind not in ("in", "out") or len(culprit.nodes) != 1:
        return ""
    end = 0 if culprit.kind == "in" else 1
    other = [path for path in case.test.paths if _edge(path)[end] == culprit.nodes[0]]
    works = "Its outbound connections work." if culprit.kind == "in" else "Its inbound connections work."
    return works if other and all(path.is_open for path in other) else ""


def _scope(case: Case, culprit: Culprit, purposes: tuple[str, ...]) -> str:
    """Format whether the port or the host is at fault, by other paths between the same hosts."""
    if purposes == (RANKS,):
        return "The rendezvous port is open, so torch's store works; then Gloo or NCCL times out and names no host."
    ranks = [path for path in case.test.paths if _edge(path) in culprit.edges and path.purpose == RANKS]
    if purposes == (PORT,):
        return "Ephemeral ports are open: only this port is blocked." if ranks and all(r.is_open for r in ranks) else ""
    if culprit.kind != "pair":
        return ""
    well = [path.source for path in case.test.paths if path.is_open and path.target in culprit.others]
    others = case.named(node for node in well if node not in culprit.nodes)
    return (
        f"No tested port is open from there; {fold(others)} can reach it."
        if others
        else "No tested port of it is open."
    )


# What opens a closed path


def _other_interface(case: Case, culprit: Culprit) -> Fix | None:
    """Suggest other interfaces if all paths over the chosen ones are closed and all over the others open."""
    spare = [path for path in case.test.paths if path.purpose == "other"]
    if culprit.kind != "all" or not spare or not all(path.is_open for path in spare):
        return None
    names = sorted({path.probe.interface for path in spare} - {""})
    return Fix(
        text=f"use the interface over which they reach each other: {', '.join(names)}",
        commands=tuple(export_line({"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name}) for name in names),
    )


def _own_fix(case: Case, verdict: str, row: _Closed) -> Fix | None:
    """Return the fix for a port closed by anything but a firewall."""
    again = case.retry("--master-addr ADDRESS") if verdict in _IDS else ()
    return Fix(text=row.fix, commands=(*row.commands, *again)) if row.fix else None


def _opening(case: Case, culprit: Culprit, purposes: tuple[str, ...], paths: Sequence[NetworkPath]) -> Fix:
    guilty = culprit.others if culprit.kind == "pair" else culprit.nodes
    network = case.test.networks.get(guilty[0])
    ports = _ports_to_open(network, purposes, paths)
    where = f"{'out of' if culprit.kind == 'out' else 'into'} {fold(case.named(guilty))}"
    text = f"allow TCP {', '.join(ports)} {where}; in a cloud, use a security group that allows traffic within itself"
    commands: tuple[str, ...] = ()
    if network is not None and culprit.kind == "out":
        commands = (f"{_sudo(network)}nft list ruleset | grep -n -A20 'hook output'",)
    elif network is not None:
        commands = opening(network, ports, _common_network(case.test))
    if purposes == (PORT,) and case.again is not None:
        text += "; or use an open port"
        commands += case.retry("--master-port 0")
    return Fix(text=text, commands=commands)


def _destination(path: NetworkPath) -> str:
    return path.probe.resolved[0] if path.probe.resolved else path.probe.address


def _ports_to_open(network: Network | None, purposes: tuple[str, ...], paths: Sequence[NetworkPath]) -> list[str]:
    ports = sorted({str(path.probe.port) for path in paths if path.purpose == PORT})
    if RANKS in purposes or not ports:
        low, high = network.ephemeral_ports if network is not None and network.ephemeral_ports else (32768, 60999)
        ports.append(f"{low}-{high}")
    return ports


def _sudo(network: Network) -> str:
    return "" if network.is_root else "sudo "


def opening(network: Network, ports: Sequence[str], source: str) -> tuple[str, ...]:
    """Write the commands that let TCP ports in from a network, for the firewall tool that the node has.

    `source`: "" if unknown: then the rules are listed, as ports are not to be opened to everybody.
    """
    tool, sudo = next(iter(network.firewall_tools), ""), _sudo(network)
    if tool in _LISTS and not source:
        return (f"{sudo}{_LISTS[tool]}",)
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


def _common_network(test: PathTest) -> str:
    """Return the smallest network with the addresses of all nodes: 10.0.0.0/24; "" if unknown or wider than /8."""
    found = []
    for node, network in test.networks.items():
        nic = suggested(network.interfaces)
        for text in (test.addresses.get(node, ""), nic.plain_addresses[0] if nic is not None else ""):
            try:
                found.append(ipaddress.ip_address(text))
            except ValueError:  # unknown, or a name
                continue
            break
    same = [address for address in found if address.version == found[0].version]
    if not same:
        return ""
    wide = ipaddress.ip_network(same[0])
    while not all(address in wide for address in same):
        wide = wide.supernet()
    if wide.prefixlen < 8:  # such as 10.0.0.1 and 192.168.0.1
        return ""
    return str(wide if wide.prefixlen < 24 or wide.version == 6 else wide.supernet(new_prefix=24))


# Faults of open paths


def _foreign(case: Case) -> list[Finding]:
    """Report ports answered by another program in the agent's place: a proxy, or another machine."""
    found = by_key(((path.target, path.probe.said), path) for path in case.test.paths if _verdict(path) == "stranger")
    return [
        case.finding(
            "foreign",
            paths,
            where=Where(hosts=case.named([target, *(path.source for path in paths)])),
            sources=fold(case.named(path.source for path in paths)),
            target=case.host(target),
            address=paths[0].probe.address,
            port=paths[0].probe.port,
            answer=answer,
            other="or use another port" if case.again else "",
            again="".join(case.retry("--master-port 0")),
        )
        for (target, answer), paths in found.items()
    ]


def _large_packets(case: Case) -> list[Finding]:
    """Report paths that drop large packets: a link on the path has a smaller MTU than the interfaces."""
    bad = [path for path in case.test.paths if _is_swallowed(path)]
    if not bad or _some_large_packets_arrive(case):
        return []
    directed = {_edge(path) if path.probe.verdict == "swallowed-up" else _edge(path)[::-1] for path in bad}
    tried = {_edge(path) for path in case.test.paths if path.is_open or path in bad}
    ends = sorted({node for edge in directed for node in edge})
    mtus = by_key((_mtu(case, node, bad), case.host(node)) for node in ends)
    device = bad[0].probe.interface or "eth0"
    largest = max((mtu for mtu in mtus if mtu), default=1500)
    mtu_lines = (f"MTU {mtu or 'unknown'} on {fold(hosts)}" for mtu, hosts in mtus.items())
    return [
        case.finding(
            "mtu-black-hole",
            **_blamed(case, tried | directed, directed),
            evidence=(*mtu_lines, *(evidence_line(case, path) for path in bad[:EVIDENCE_LINES])),
            directions=_directions(case, tried | directed, directed),
            device=device,
            size=largest - 28,  # the largest packet that this interface may send, less the headers of IP and ICMP
            destination=_destination(bad[0]),
        )
    ]


def _mtu(case: Case, node: str, paths: Sequence[NetworkPath]) -> int | None:
    network = case.test.networks.get(node)
    address = case.test.addresses.get(node, "")
    used = {path.probe.interface for path in paths if path.source == node}
    nics = network.interfaces if network is not None else ()
    return next((nic.mtu for nic in nics if address in nic.plain_addresses or nic.name in used), None)


def _directions(case: Case, tried: Collection[tuple[str, str]], bad: Collection[tuple[str, str]]) -> str:
    """Format directions: "into and out of node1", "from node2 to node3"."""
    culprits = merged(fewest_culprits(sorted(tried), bad))
    if all(culprit.kind == "pair" for culprit in culprits) and {(b, a) for a, b in bad} == set(bad):
        nodes = {node for edge in bad for node in edge}
        common = set.intersection(*({*edge} for edge in bad)) if len(nodes) > 2 else set()
        ends = filter(None, (sorted(common), sorted(nodes - common)))
        return f"between {' and '.join(fold(case.named(each)) for each in ends)}"
    sides: dict[tuple[str, ...], list[str]] = {}
    words = []
    for culprit in culprits:
        if culprit.kind in ("in", "out"):
            sides.setdefault(culprit.nodes, []).append("into" if culprit.kind == "in" else "out of")
        elif culprit.kind == "pair":
            words.append(f"from {fold(case.named(culprit.nodes))} to {fold(case.named(culprit.others))}")
        else:
            words.append("between all nodes")
    whole = [f"{' and '.join(moves)} {fold(case.named(nodes))}" for nodes, moves in sides.items()]
    return ", and ".join([*whole, *words])


def _blamed(
    case: Case, tried: Collection[tuple[str, str]], bad: Collection[tuple[str, str]], *, spare_pairs: bool = False
) -> dict[str, object]:
    """Return the nodes accused by bad paths: those bad in general, else both ends; the remaining ends are witnesses.

    With `spare_pairs`, if either of two ends may be at fault, both are witnesses.
    """
    culprits = [
        each for each in merged(fewest_culprits(sorted(tried), bad)) if not (spare_pairs and each.kind == "pair")
    ]
    ends = sorted({node for edge in bad for node in edge})
    accused = case.named(node for culprit in culprits for node in (*culprit.nodes, *culprit.others))
    witnesses = tuple(host for host in case.named(ends) if host not in accused)
    return {"where": Where(hosts=accused), "witnesses": Witnesses(hosts=witnesses)}


def _is_swallowed(path: NetworkPath) -> bool:
    return path.probe.verdict.startswith("swallowed")


def _some_large_packets_arrive(case: Case) -> bool:
    """Return whether a few large packets arrive, as with loss: too small an MTU drops all of them.

    Proof is a path with partial success, the way back between the same nodes, or loss on another path of the node
    common to all such paths: elsewhere a busy machine loses packets too.
    """
    swallowed = [{*_edge(path)} for path in case.test.paths if _is_swallowed(path)]
    common = set.intersection(*swallowed) if swallowed else set()
    return any(
        path.probe.verdict == "lossy"
        or (path.probe.bulk_s is not None and path.probe.bulk_bytes >= BULK_BYTES and {*_edge(path)} in swallowed)
        or (_loses(case, path) and common & {*_edge(path)})
        for path in case.test.paths
    )


def _lossy(case: Case) -> list[Finding]:
    """Name the nodes whose paths had many retransmissions, or transferred too little in time."""
    paths = case.test.paths
    some = _some_large_packets_arrive(case)
    if any(map(_is_swallowed, paths)) and not some:
        return []  # large packets that vanish are sent again as well
    hopeless = [
        path
        for path in paths
        if path.probe.verdict == "lossy" or _is_flaky(case, path) or (some and _is_swallowed(path))
    ]
    slow = [path for path in hopeless if path.probe.verdict == "lossy" and not path.probe.retransmits]
    lost = [path for path in hopeless if path not in slow]
    lossy = [*lost, *(path for path in paths if path not in hopeless and _loses(case, path))]
    found = [_bad_link(case, "link-slow", Level.FAIL, "very low throughput", slow)] if slow else []
    if lost or _is_heavy_loss(lossy):
        level = Level.FAIL if lost else Level.WARN
        found.append(_bad_link(case, "link-lossy", level, "packet loss", lossy))
    return found


def _loses(case: Case, path: NetworkPath) -> bool:
    """Return whether retransmissions exceed the cost of nodes all sending at once."""
    probe = path.probe
    if probe.verdict != "ok" or not probe.retransmits:
        return False
    if probe.bulk_bytes > BULK_BYTES:
        return probe.retransmits >= max(_ENOUGH_PACKETS, _LOSSY_SHARE * probe.bulk_bytes / _PACKET_BYTES)
    small = [
        other.probe.retransmits
        for other in case.test.paths
        if set(_edge(other)) == set(_edge(path)) and 0 < other.probe.bulk_bytes <= BULK_BYTES
    ]
    return probe.bulk_bytes > 0 and sum(small) >= _FEW_RETRANSMITS


def _is_heavy_loss(lossy: Sequence[NetworkPath]) -> bool:
    worst = max((path.probe.retransmits for path in lossy), default=0)
    small = [path for path in lossy if path.probe.bulk_bytes <= BULK_BYTES]
    return bool(small) or len(lossy) >= _ENOUGH_PATHS or worst >= _MANY_PACKETS


def slow_paths(paths: Iterable[NetworkPath], share: float = _SLOW_SHARE) -> list[NetworkPath]:
    """Return the paths with less than a share of the throughput of the fastest quarter; none between two nodes."""
    rates = {path: rate for path in paths if (rate := _rate(path)) is not None}
    if len({node for path in rates for node in _edge(path)}) < 3:
        return []
    typical = sorted(rates.values(), reverse=True)[len(rates) // 4]
    return [path for path, rate in rates.items() if rate < min(share * typical, _SLOW_BYTES_PER_S)]


def slow_links(case: Case) -> list[Finding]:
    """Name the nodes with relatively slow paths, unless packet loss explains it."""
    slow = slow_paths(case.test.paths)
    if not slow or _lossy(case):
        return []
    rates = {path: _rate(path) or 0.0 for path in case.test.paths}
    fast = median(rate for path, rate in rates.items() if rate and path not in slow)
    most = max(rates[path] for path in slow)
    what = f"at most {most / 1e6:.3g} MB/s ({fast / 1e6:.3g} MB/s on other paths)"
    rows = (f"{case.host(path.source)} -> {case.host(path.target)}: {rates[path] / 1e6:.3g} MB/s" for path in slow)
    return [replace(_bad_link(case, "link-slow", Level.WARN, what, slow), evidence=tuple(islice(rows, EVIDENCE_LINES)))]


def _rate(path: NetworkPath) -> float | None:
    """Return the bytes per second of a large transfer."""
    probe = path.probe
    return probe.bulk_bytes / probe.bulk_s if probe.bulk_s and probe.bulk_bytes > BULK_BYTES else None


def _bad_link(case: Case, verdict: str, level: Level, what: str, bad: Sequence[NetworkPath]) -> Finding:
    """Name a bad path. Loss is random, so other paths of the guilty end may look good: a pair accuses neither end."""
    edges = {edge for path in bad for edge in (_edge(path), _edge(path)[::-1])}
    tried = {_edge(path) for path in case.test.paths} | edges
    return case.finding(
        verdict,
        bad,
        level=level,
        **_blamed(case, tried, edges, spare_pairs=len(case.test.networks) > 2),
        what=what,
        directions=_directions(case, tried, edges),
        device=bad[0].probe.interface or "eth0",
    )


# Names that break torchrun but not the ranks that distdiag starts: these get addresses and interfaces


def _own_names(case: Case) -> list[Finding]:
    own = {node: network.names.host_addresses for node, network in case.test.networks.items()}
    groups = by_key((", ".join(found), node) for node, found in own.items() if found and all(map(is_loopback, found)))
    return [_own_name(case, addresses, nodes) for addresses, nodes in groups.items() if len(own) > 1]


def _own_name(case: Case, leads_to: str, nodes: list[str]) -> Finding:
    hosts, network = case.named(nodes), case.test.networks[nodes[0]]
    own = case.test.addresses.get(nodes[0], "")
    nic = next((nic for nic in network.interfaces if own in nic.plain_addresses), None) or suggested(network.interfaces)
    commands = [export_line(exports(nic))] if nic is not None else []
    head = case.test.addresses.get(case.head, "")
    if case.head in nodes and head:
        commands.append(f"torchrun --rdzv-conf is_host=1 --local-addr={head} ...   # on rank 0's node")
    spared = "The ranks that distdiag starts use addresses and are not affected. "
    found = case.finding(
        "name-loopback",
        where=Where(hosts=hosts),
        hosts=fold(hosts),
        own=network.names.host_name,
        leads_to=leads_to,
        spared=spared if case.rendezvous_port is not None else "",
    )
    fix = "put the real address of each node into its /etc/hosts, or set it for torch"
    return replace(found, fix=Fix(text=fix, commands=tuple(commands)))


def unresolved(case: Case) -> Iterator[LookUp]:
    """List the nodes that cannot resolve the host name of rank 0's node."""
    head = case.test.networks.get(case.head)
    return (
        lookup
        for lookup in case.test.lookups
        if head is not None and not lookup.addresses and lookup.name == head.names.fqdn
    )


def _heads_name(case: Case) -> list[Finding]:
    bad = list(unresolved(case))
    if not bad or _own_names(case):
        return []
    hosts = case.named(lookup.node for lookup in bad)
    address = case.test.addresses.get(case.head) or "ADDRESS"
    words = {"hosts": fold(hosts), "named": bad[0].name, "head": case.host(case.head), "address": address}
    return [case.finding("name-unresolved", where=Where(hosts=hosts), **words)]


def evidence_line(case: Case, path: NetworkPath) -> str:
    """Format a path as evidence."""
    probe = path.probe
    interface = f" from {probe.interface}" if probe.interface else ""
    how = f": {probe.error}" if probe.error else ""
    how += f" ({probe.route})" if probe.route else ""
    how += f" after {probe.attempts} attempts" if probe.attempts > 1 else ""
    how += f", {counted(probe.retransmits, 'retransmit')}" if probe.retransmits else ""
    target = f"{probe.address} port {probe.port} ({case.host(path.target)})"
    return f"{case.host(path.source)}{interface} -> {target}: {probe.verdict}{how}"
