"""What single ports say: of hosts, open and by whom, closed, filtered; of nodes, taken; of servers, not ours. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.agent import handshake
from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.commands.ports.types import COMMAND
from distdiag.diagnosis.connectivity import EVIDENCE_LINES
from distdiag.facts.network import is_loopback
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from distdiag.agent.port_scan import PortResult
    from distdiag.commands.ports.types import PortsFacts

_FEW = 16
"""Ports of a host up to which a closed one is worth a word: more are a search."""


def finding(name: str, level: Level, title: str, **rest: object) -> Finding:
    """Make a finding of this command."""
    return Finding(id=f"{COMMAND}.{name}", level=level, title=title, **rest)  # type: ignore[arg-type]


def known_as(result: PortResult) -> str:
    """Classify who is behind an open port, by its first line."""
    if result.state != "open":
        return ""
    if result.said.startswith(handshake.PROTOCOL):
        return "distdiag"
    if result.said.startswith("HTTP/") or "<html" in result.said.lower() or "<!doctype" in result.said.lower():
        return "http"
    if result.said.startswith("SSH-"):
        return "ssh"
    return "other" if result.said else "silent"


def port_findings(facts: PortsFacts) -> list[Finding]:
    """Judge all single ports."""
    return [*_scanned(facts), *_taken(facts), *_unserved(facts)]


def _taken(facts: PortsFacts) -> list[Finding]:
    """Say at which nodes a port was somebody else's, so that it could not be tried."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for node, ports in facts.taken.items():
        for port, who in ports.items():
            groups.setdefault(port, []).append((facts.hosts[node], who))
    return [
        finding(
            "port-taken",
            Level.WARN,
            f"port {port} on {fold(host for host, _ in owners)} is taken, so it was not tried there",
            where=Where(hosts=tuple(host for host, _ in owners)),
            evidence=tuple(f"{host}: {who}" for host, who in owners[:EVIDENCE_LINES]),
            fix=Fix(text="a running job has it, or one that was left over: end it, or take another port (--port)"),
        )
        for port, owners in groups.items()
    ]


def _unserved(facts: PortsFacts) -> list[Finding]:
    """Say which servers could not be checked: that is no proof of anything."""
    words = {
        "stranger": "something answers at {name}, and it is no `distdiag ports serve`",
        "busy": "what answers at {name} hung up at once: a `serve` that has too many guests does so",
        "midway": "the `distdiag ports serve` at {name} went away midway",
    }
    return [
        finding(
            "not-checked",
            Level.UNKNOWN,
            words[why].format(name=name),
            fix=Fix(
                text="start it there, and check again",
                commands=(f"distdiag ports serve --port {name.rpartition(':')[2]}",),
            ),
        )
        for name, why in facts.unserved.items()
    ]


def _scanned(facts: PortsFacts) -> list[Finding]:
    """Make one finding of each state, for each node that tried and each host."""
    groups: dict[tuple[str, str, str, str], list[PortResult]] = {}
    for node, results in facts.scanned.items():
        for result in results:
            groups.setdefault((node, result.host, result.state, result.error), []).append(result)
    found = [
        _judged(facts, facts.hosts[node], host, state, results) for (node, host, state, _), results in groups.items()
    ]
    return [judged for judged in found if judged is not None]


def _judged(facts: PortsFacts, source: str, host: str, state: str, tried: list[PortResult]) -> Finding | None:
    ports = fold_ranks(result.port for result in tried)
    first = tried[0]
    where = f"{host} ({first.address})" if first.address and first.address != host else host
    plural = "ports" if len(tried) > 1 else "port"
    at = Where(hosts=(source,))
    evidence = _evidence(source, tried)
    if state == "open":
        return _open(where, tried, at)
    if state == "closed":
        few = len(tried) <= _FEW
        if not few:
            return None
        return finding(
            "closed",
            Level.FAIL if facts.checks or facts.named else Level.WARN,
            f"{where} is reached, and nobody listens at {plural} {ports}",
            detail="It answered with a refusal: the path is free, no firewall needs opening. (A firewall that rejects "
            'with "port unreachable" looks the same.)',
            where=at,
            evidence=evidence,
            fix=Fix(
                text="start what should listen there; or let distdiag listen for a test, on that host",
                commands=(f"distdiag ports serve --port {first.port}",),
            ),
        )
    titles = {
        "filtered": (
            f"no answer from {where} at {plural} {ports}: dropped on the way, or the host is down",
            "port-filtered",
        ),
        "rejected": (f"{where} at {plural} {ports} is turned away: {first.error.lower()}", "port-rejected"),
        "no-route": (f"there is no route to {where}: {first.error.lower()}", "port-no-route"),
        "name": (f"{host} cannot be resolved: {first.error}", "address-unresolved"),
        "denied": (
            f"this machine does not let us connect to {where} {plural} {ports}: {first.error.lower()}",
            "denied",
        ),
    }
    title, id_ = titles[state]
    detail, fix = _advice(state, first, facts, source, ports)
    return finding(id_, Level.FAIL, title, detail=detail, where=at, evidence=evidence, fix=fix)


def _evidence(source: str, tried: list[PortResult]) -> tuple[str, ...]:
    return tuple(
        f"{source} -> {result.address or result.host} port {result.port}: {result.error or result.state} "
        f"after {result.seconds:.1f} s"
        for result in tried[:3]
    )


def _advice(state: str, first: PortResult, facts: PortsFacts, source: str, ports: str) -> tuple[str, Fix]:
    others = [
        result
        for results in facts.scanned.values()
        for result in results
        if result.host == first.host and result.state in ("open", "closed")
    ]
    if state == "filtered":
        if others:
            known = ", ".join(str(other.port) for other in others[:4])
            return (
                f"Other ports of it answer ({known}): the host is up, and a firewall drops these.",
                Fix(text=f"let TCP {ports} in on that host, or in its security group"),
            )
        return (
            "No tried port of it answers; a closed one would. A firewall drops everything, or nobody has this address.",
            Fix(
                text="see whether the host is up, and who filters",
                commands=(f"ping -c 3 -W 1 {first.address}", f"ip neigh show {first.address}"),
            ),
        )
    if state == "rejected":
        if others or first.seconds < 1.0:
            return (
                "The refusal came at once: a firewall rejects with a message (firewalld does so).",
                Fix(text=f"let TCP {ports} in on that host"),
            )
        return (
            "Nobody in this network answers for that address: the host is down, or the address is wrong.",
            Fix(text="see whether it is up", commands=(f"ip neigh show {first.address}",)),
        )
    if state == "no-route":
        return "", Fix(text="see the routes", commands=(f"ip route get {first.address}",))
    if state == "name":
        return "", Fix(
            text="check the spelling, or add it to DNS or /etc/hosts",
            commands=(f"getent hosts {shlex.quote(first.host)}",),
        )
    return "", Fix(
        text="see the rules for outgoing packets of this machine", commands=("sudo nft list ruleset | grep -n output",)
    )


def _open(where: str, tried: list[PortResult], at: Where) -> Finding | None:
    """Say who answers, if it is worth a word; loopback is never the other host."""
    home = [
        result
        for result in tried
        if is_loopback(result.address) and not is_loopback(result.host) and result.host != "localhost"
    ]
    if home:
        return finding(
            "address-loopback",
            Level.WARN,
            f"{home[0].host} resolves to {home[0].address} here: this machine answered itself",
            where=at,
            fix=Fix(
                text="give it its real address in /etc/hosts or DNS",
                commands=(f"getent hosts {shlex.quote(home[0].host)}",),
            ),
        )
    strangers = [result for result in tried if known_as(result) == "http"]
    if strangers:
        return finding(
            "http",
            Level.WARN,
            f"at {where} port {fold_ranks(result.port for result in strangers)} a web server or proxy answers",
            detail="A proxy in between answers for any address: an open port proves nothing then. Torch says here: "
            "Ping failed, invalid value.",
            where=at,
            evidence=tuple(f"port {result.port} says {result.said!r}" for result in strangers[:3]),
            fix=Fix(text="see whether it is the one that you mean"),
        )
    return None
