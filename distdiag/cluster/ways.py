"""What the probes between nodes mean: which way is closed, in which direction, and the cause that torch hides. Pure.

Torch prints the same words, or none, for most of these; what it prints is said beside the cause.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.cluster.meeting import leads_home
from distdiag.node.network import is_loopback
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.cluster.meeting import Meeting, Path

_LOSSY_RETRANSMITS = 4
"""Packets sent again for the 64 KiB of one probe, about 50 full packets: more than a busy switch costs."""


def way_findings(command: str, meeting: Meeting, again: Callable[[str], str]) -> list[Finding]:
    """Judge a meeting; `again` gives the command that tries it once more, with these options added."""
    judge = _Judge(command, meeting, again)
    return [*judge.silent(), *judge.closed(), *judge.lossy(), *judge.names()]


class _Judge:
    def __init__(self, command: str, meeting: Meeting, again: Callable[[str], str]) -> None:
        self._command = command
        self._meeting = meeting
        self._again = again

    def silent(self) -> list[Finding]:
        """Nodes that did not even answer us."""
        if not self._meeting.silent:
            return []
        hosts = self._called(self._meeting.silent)
        return [self._finding("host-silent", Level.UNKNOWN, f"{fold(hosts)} did not answer in time", hosts=hosts)]

    def closed(self) -> list[Finding]:
        """One finding for each kind of closed way."""
        groups: dict[tuple[str, str], list[Path]] = {}
        # Without a route nobody can be answered either.
        no_answer = {(path.source, path.target) for path in self._meeting.paths if path.probe.verdict == "no-route"}
        for path in self._meeting.paths:
            verdict = path.probe.verdict
            if verdict in ("ok", "lossy") or (verdict == "filtered" and (path.target, path.source) in no_answer):
                continue
            if leads_home(path) and path.source != path.target:
                verdict = "loopback"
            groups.setdefault((path.purpose, verdict), []).append(path)
        if any(purpose == "rendezvous" for purpose, _ in groups):
            # The same wall twice: what ranks need is tried again when the rendezvous works.
            groups = {key: paths for key, paths in groups.items() if key[0] == "rendezvous"}
        return [self._closed(purpose, verdict, paths) for (purpose, verdict), paths in groups.items()]

    def _closed(self, purpose: str, verdict: str, paths: list[Path]) -> Finding:
        sources = self._called(dict.fromkeys(path.source for path in paths))
        targets = self._called(dict.fromkeys(path.target for path in paths))
        probe = paths[0].probe
        what, why, fix = self._words(purpose, verdict, paths)
        port = f"port {probe.port}, the rendezvous port" if purpose == "rendezvous" else "the ports that ranks use"
        address = f" ({probe.address})" if len(targets) == 1 and probe.address != targets[0] else ""
        target = f"{fold(targets)}{address}"
        said = {"name": probe.address, "said": probe.said, "error": probe.error.lower()}
        title = what.format(source=fold(sources), target=target, port=port, **said)
        hosts = (*sources, *targets)
        accused = self._accused(verdict, sources, targets, paths)
        found = self._finding(
            _ids(purpose, verdict),
            Level.FAIL,
            title,
            detail=why,
            hosts=accused,
            evidence=tuple(self._evidence(path) for path in paths[:4]),
            fix=fix,
        )
        return replace(found, witnesses=Witnesses(hosts=tuple(host for host in hosts if host not in accused)))

    def _accused(
        self, verdict: str, sources: Sequence[str], targets: Sequence[str], paths: Sequence[Path]
    ) -> tuple[str, ...]:
        """Find who is at fault: whose own kernel says no; else the node that all of these ways have in common."""
        if verdict in ("no-route", "no-port", "name", "loopback"):
            return tuple(sources)
        ends = [{self._meeting.hosts[path.source], self._meeting.hosts[path.target]} for path in paths]
        well = {
            self._meeting.hosts[node]
            for path in self._meeting.paths
            if path.probe.verdict in ("ok", "lossy")
            for node in (path.source, path.target)
        }
        common = [host for host in (*sources, *targets) if all(host in pair for pair in ends)]
        # Where several are in all of them: whoever has no way that works.
        return tuple(dict.fromkeys([host for host in common if host not in well] or common or (*sources, *targets)))

    def _words(self, purpose: str, verdict: str, paths: list[Path]) -> tuple[str, str, Fix]:
        probe = paths[0].probe
        if verdict == "loopback":
            return (
                "on {source} the name {name} leads to {source} itself, not to {target}",
                f"It resolves to {', '.join(probe.resolved)} there. Torch says only that the client socket timed out.",
                Fix(
                    text="put the address of that node into /etc/hosts or DNS, or name it by its address",
                    commands=(self._again("--master-addr ADDRESS"),),
                ),
            )
        if verdict == "name":
            return (
                "{source} cannot resolve {name}, the rendezvous address",
                f"The resolver there says: {probe.error}.",
                Fix(text="name rank 0's node by its address", commands=(self._again("--master-addr ADDRESS"),)),
            )
        if verdict == "stranger":
            return (
                "another program than ours answers {source} at {target} {port}"
                + (', it says "{said}"' if probe.said else ""),
                "Torch would wait there for ever.",
                Fix(text="take another port", commands=(self._again("--master-port 0"),)),
            )
        if verdict in ("swallowed-up", "swallowed-down"):
            return self._swallowed(verdict, paths)
        if verdict in ("no-route", "no-port"):
            return _by_its_own_kernel(verdict, paths)
        if verdict in ("broken", "cut-off"):
            return _cut(verdict, paths)
        what = {
            "filtered": "{source} gets no answer from {target} at {port}: the packets are dropped",
            "refused": "{source} is refused by {target} at {port}: a firewall answers with a reset",
            "rejected": "{source} is turned away on the way to {target} at {port}: {error}",
            "silent": "{source} connects to {target} at {port}, and then nothing more comes through",
        }[verdict]
        return what, self._why_closed(purpose, verdict, paths), self._fix_for_closed(purpose, paths)

    def _swallowed(self, verdict: str, paths: list[Path]) -> tuple[str, str, Fix]:
        direction = ("{source}", "{target}") if verdict == "swallowed-up" else ("{target}", "{source}")
        what = f"large packets from {direction[0]} to {direction[1]} vanish: small ones come through"
        interface = paths[0].probe.interface or "eth0"
        network = self._meeting.networks.get(paths[0].source)
        mtu = next((one.mtu for one in network.interfaces if one.name == interface), None) if network else None
        return (
            what,
            f"The path carries smaller packets than its ends think (MTU {mtu or 'unknown'} at {interface}), and nobody "
            "tells them. Torch's init works and the first large collective times out.",
            Fix(
                text="set the same MTU along the whole path (switch ports, bonds, VLANs, tunnels); to see whether "
                "it is this, lower it at both ends for a test",
                commands=(f"ip link set dev {interface} mtu 1280", self._ping(paths[0], mtu or 1500)),
            ),
        )

    def _ping(self, path: Path, mtu: int) -> str:
        # The largest packet that this interface may send, less the headers of IP and ICMP.
        return f"ping -c 3 -M do -s {mtu - 28} {path.probe.resolved[0] if path.probe.resolved else path.probe.address}"

    def _why_closed(self, purpose: str, verdict: str, paths: list[Path]) -> str:
        torch = {
            "filtered": "Torch says nothing for minutes, then only that the client socket has timed out.",
            "refused": "Torch's words are the same as for a dropped packet: the client socket has timed out.",
            "rejected": "Torch prints a wrong address with it.",
        }.get(verdict, "")
        if purpose == "ranks":
            torch = "Torch's store works, and then Gloo or NCCL times out connecting the ranks, without naming a peer."
        return f"{self._scope(purpose, paths)} {torch}".strip()

    def _scope(self, purpose: str, paths: list[Path]) -> str:
        """Say what else works between the same hosts: is it the port, or the host?"""
        if purpose != "rendezvous":
            return "The rendezvous port is open; ranks talk over ephemeral ports."
        source, target = paths[0].source, paths[0].target
        other = [
            path
            for path in self._meeting.paths
            if (path.source, path.target, path.purpose) == (source, target, "ranks")
        ]
        if other and all(path.probe.verdict == "ok" for path in other):
            return f"Another port of the same host ({other[0].probe.port}) is open, so it is this port."
        well = self._called({path.source for path in self._meeting.paths if path.probe.verdict == "ok"} - {source})
        if well:
            return f"No tried port of it is open from there; {fold(well)} reaches it."
        return "No tried port of it is open."

    def _fix_for_closed(self, purpose: str, paths: list[Path]) -> Fix:
        path = paths[0]
        target = self._meeting.hosts.get(path.target, path.target)
        network = self._meeting.networks.get(path.target)
        tools = network.firewall_tools if network else ()
        ports = str(path.probe.port)
        if purpose == "ranks" and network and network.ephemeral_ports:
            ports = "-".join(map(str, network.ephemeral_ports))
        commands = [_open_ports(tools[0], ports)] if tools else []
        if purpose == "rendezvous":
            commands.append(self._again("--master-port 0"))
        where = f"let TCP {'ports' if '-' in ports else 'port'} {ports} in on {target}"
        sources = self._called(dict.fromkeys(one.source for one in paths))
        more = "; or try a port that is open" if purpose == "rendezvous" else ""
        return Fix(text=f"{where} from {fold(sources)}{more}", commands=tuple(commands))

    def lossy(self) -> list[Finding]:
        """Ways that work and lose packets."""
        sent_again: dict[frozenset[str], int] = {}
        for path in self._meeting.paths:
            pair = frozenset((path.source, path.target))
            sent_again[pair] = sent_again.get(pair, 0) + path.probe.retransmits
        bad = [
            path
            for path in self._meeting.paths
            if path.probe.verdict == "lossy"
            or (
                path.probe.verdict == "ok"
                and path.probe.retransmits
                and sent_again[frozenset((path.source, path.target))] >= _LOSSY_RETRANSMITS
            )
        ]
        if not bad or any(path.probe.verdict.startswith("swallowed") for path in self._meeting.paths):
            return []  # large packets that vanish are sent again as well
        hosts = self._called(dict.fromkeys(name for path in bad for name in (path.source, path.target)))
        hopeless = any(path.probe.verdict == "lossy" for path in bad)
        return [
            self._finding(
                "link-lossy",
                Level.FAIL if hopeless else Level.WARN,
                f"packets are lost between {fold(hosts)}",
                detail="Torch works over such a link, many times slower.",
                hosts=hosts,
                evidence=tuple(self._evidence(path) for path in bad[:6]),
                fix=Fix(
                    text="see the error counters of the interfaces, cables and switch ports on that way",
                    commands=(f"ip -s link show dev {bad[0].probe.interface or 'eth0'}",),
                ),
            )
        ]

    def names(self) -> list[Finding]:
        """What torchrun trips over, though our own ranks do not: they are told addresses and interfaces."""
        return [*self._own_names(), *self._name_elsewhere()]

    def _own_names(self) -> list[Finding]:
        groups: dict[str, list[str]] = {}
        for node, network in self._meeting.networks.items():
            found = network.names.host_addresses
            if found and all(is_loopback(address) for address in found):
                groups.setdefault(", ".join(found), []).append(node)
        return [self._own_name(address, nodes) for address, nodes in groups.items()]

    def _own_name(self, leads_to: str, nodes: list[str]) -> Finding:
        hosts = self._called(nodes)
        interface = self._meeting.interfaces.get(nodes[0], "eth0")
        own = self._meeting.networks[nodes[0]].names.host_name
        commands = [f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"]
        if self._meeting.head in nodes:
            commands.append(
                f"torchrun --rdzv-conf is_host=1 --local-addr={self._meeting.address} ...   # on rank 0's node"
            )
        return self._finding(
            "name-loopback",
            Level.WARN,
            f"{fold(hosts)} resolves its own name ({own}) to {leads_to}",
            detail="Our ranks were told addresses and are not hit. Torchrun's c10d rendezvous then does not see that "
            "it is the host, and Gloo binds to loopback: both end in a timeout that looks like a firewall.",
            hosts=hosts,
            fix=Fix(
                text="put the real address of each node into its /etc/hosts, or tell torch", commands=tuple(commands)
            ),
        )

    def _name_elsewhere(self) -> list[Finding]:
        head = self._meeting.networks.get(self._meeting.head)
        bad = [one for one in self._meeting.lookups if not one.addresses]
        if head is None or not bad or self._own_names():
            return []
        hosts = self._called(dict.fromkeys(one.node for one in bad))
        return [
            self._finding(
                "name-unresolved",
                Level.WARN,
                f"{fold(hosts)} cannot resolve {bad[0].name}, the name that {self._meeting.hosts[self._meeting.head]} "
                "has for itself",
                detail="Torchrun tells the other nodes this name as MASTER_ADDR, and they time out.",
                hosts=hosts,
                fix=Fix(
                    text="tell torchrun the address instead, on every node its own",
                    commands=(f"torchrun --local-addr={self._meeting.address} ...   # on rank 0's node",),
                ),
            )
        ]

    def _evidence(self, path: Path) -> str:
        probe = path.probe
        source = self._meeting.hosts.get(path.source, path.source)
        knocks = f" after {probe.knocks} attempts" if probe.knocks > 1 else ""
        sent_again = f", {probe.retransmits} packets sent again" if probe.retransmits else ""
        how = f": {probe.error}" if probe.error else ""
        how += f" ({probe.route})" if probe.route else ""
        return f"{source} -> {probe.address} port {probe.port}: {probe.verdict}{how}{knocks}{sent_again}"

    def _called(self, nodes: object) -> tuple[str, ...]:
        names = [self._meeting.hosts.get(node, node) for node in nodes]  # type: ignore[attr-defined]
        return tuple(dict.fromkeys(names))

    def _finding(
        self,
        name: str,
        level: Level,
        title: str,
        *,
        hosts: tuple[str, ...],
        detail: str = "",
        evidence: tuple[str, ...] = (),
        fix: Fix | None = None,
    ) -> Finding:
        return Finding(
            id=f"{self._command}.{name}",
            level=level,
            title=title,
            detail=detail,
            where=Where(hosts=tuple(dict.fromkeys(hosts))),
            evidence=evidence,
            fix=fix,
        )


def _by_its_own_kernel(verdict: str, paths: Sequence[Path]) -> tuple[str, str, Fix]:
    probe = paths[0].probe
    address = probe.resolved[0] if probe.resolved else probe.address
    if verdict == "no-port":
        return (
            "{source} has no local port left for a connection to {target}: {error}",
            "Every connection takes a port of net.ipv4.ip_local_port_range, and all are in use, by this or another "
            "program of that node.",
            Fix(
                text="see how large the range is and who uses it; make it larger there",
                commands=(
                    "ss -s; cat /proc/sys/net/ipv4/ip_local_port_range",
                    "sudo sysctl -w net.ipv4.ip_local_port_range='1024 65535'",
                ),
            ),
        )
    return (
        "{source} has no way to {target}: its own kernel says {error}",
        f"No packet was sent. Its routing table says: {probe.route}." if probe.route else "No packet was sent.",
        Fix(
            text="correct the routes there: one is missing, or says blackhole, unreachable or prohibit",
            commands=(f"ip route get {address}", "ip route show table all | grep -v 'table local'"),
        ),
    )


def _cut(verdict: str, paths: Sequence[Path]) -> tuple[str, str, Fix]:
    error = paths[0].probe.error
    if verdict == "broken":
        what = "{source} connects to {target} at {port}, and the connection is cut: {error}"
        why = "It was open, so this is no closed port: whatever stands between ends connections."
    else:
        what = "data between {source} and {target} stops midway at {port}: {error}"
        why = "The first packets came through one after the other, and then none: a cable loses some of all."
    return (
        (
            what,
            why,
            Fix(
                text="see which rule of a firewall, proxy or limit on connections does that, on both and between them",
                commands=("nft list ruleset | grep -nE 'reject|drop|quota|ct (bytes|count|state)|limit'",),
            ),
        )
        if error
        else (what.replace(": {error}", ""), why, Fix(text="see what stands between them"))
    )


def _ids(purpose: str, verdict: str) -> str:
    if verdict in ("swallowed-up", "swallowed-down"):
        return "mtu-black-hole"
    if verdict == "loopback":
        return "address-loopback"
    if verdict == "name":
        return "address-unresolved"
    if verdict == "stranger":
        return "port-foreign"
    return f"{'port' if purpose == 'rendezvous' else 'rank-ports'}-{verdict}"


def _open_ports(tool: str, ports: str) -> str:
    """Write the command that lets TCP ports in, for the firewall tool that the node has."""
    return {
        "firewall-cmd": f"firewall-cmd --add-port={ports}/tcp",
        "ufw": f"ufw allow proto tcp to any port {ports.replace('-', ':')}",
        "nft": f"nft list ruleset | grep -nE 'drop|reject|{ports.partition('-')[0]}'",
        "iptables": f"iptables -I INPUT -p tcp --dport {ports.replace('-', ':')} -j ACCEPT",
    }[tool]
