"""Findings about single ports: open (and the service), closed, filtered, in use. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.agent import handshake
from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.commands.ports.types import COMMAND
from distdiag.diagnosis.connectivity import EVIDENCE_LINES
from distdiag.facts.network import is_loopback
from distdiag.ids import Id, Shared
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from distdiag.agent.port_scan import PortResult
    from distdiag.commands.ports.types import PortsFacts
    from distdiag.facts.listeners import Listener

_FEW = 16
"""Up to this many ports per host, a closed port is a finding: more are a scan."""
_OWN, _WORDS = 6, 3
_INSTANT_S = 0.05


def finding(id_: Id | Shared, level: Level, title: str, **rest: object) -> Finding:
    """Return a finding of this command."""
    return Finding(id=id_.of(COMMAND) if isinstance(id_, Shared) else id_, level=level, title=title, **rest)  # type: ignore[arg-type]


def known_as(result: PortResult) -> str:
    """Classify the service on an open port by its first line."""
    if result.state != "open":
        return ""
    if result.said.startswith(handshake.PROTOCOL):
        return "distdiag"
    if result.said.startswith("HTTP/") or "<html" in result.said.lower() or "<!doctype" in result.said.lower():
        return "http"
    if result.said.startswith("SSH-"):
        return "ssh"
    return "other" if result.said else "silent"


def held_by(listener: Listener) -> str:
    """Format a listener: "pid 7 (python train.py)"; long command lines are cut, folders dropped."""
    if listener.pid is None:
        return "a process of another user"
    words = [word.rpartition("/")[2] for word in listener.command.split()[:_WORDS]]
    return f"pid {listener.pid} ({' '.join(words)})"


def port_findings(facts: PortsFacts) -> list[Finding]:
    """Judge all single ports."""
    return [*_scanned(facts), *_taken(facts)]


def _taken(facts: PortsFacts) -> list[Finding]:
    """Report ports held by other programs, which could not be tested."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for node, ports in facts.taken.items():
        for port, who in ports.items():
            groups.setdefault(port, []).append((facts.hosts[node], who))
    return [
        finding(
            Shared.PORT_TAKEN,
            Level.WARN,
            f"port {port} is in use on {fold(host for host, _ in owners)}, so it was not tested there",
            where=Where(hosts=tuple(host for host, _ in owners)),
            evidence=tuple(f"{host}: {who}" for host, who in owners[:EVIDENCE_LINES]),
            fix=Fix(text="a running job or a leftover process holds it: end it, or test another port (--port)"),
        )
        for port, owners in groups.items()
    ]


def _scanned(facts: PortsFacts) -> list[Finding]:
    """Merge results with one state into one finding per source node and host."""
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
        return _closed(facts, where, tried, at) if len(tried) <= _FEW else None
    titles: dict[str, tuple[str, Id | Shared]] = {
        "filtered": (
            f"no answer from {where} on {plural} {ports}: packets dropped, or host down",
            Shared.PORT_FILTERED,
        ),
        "rejected": (f"connection to {where} {plural} {ports} rejected: {first.error.lower()}", Shared.PORT_REJECTED),
        "no-route": (f"no route to {where}: {first.error.lower()}", Shared.PORT_NO_ROUTE),
        "name": (f"cannot resolve {host}: {first.error}", Shared.ADDRESS_UNRESOLVED),
        "denied": (
            f"this machine blocks connections to {where} {plural} {ports}: {first.error.lower()}",
            Id.PORTS_DENIED,
        ),
    }
    title, id_ = titles[state]
    detail, fix = _advice(state, first, facts, source, ports)
    return finding(id_, Level.FAIL, title, detail=detail, where=at, evidence=evidence, fix=fix)


def _closed(facts: PortsFacts, where: str, tried: list[PortResult], at: Where) -> Finding:
    """Report ports without a listener; on this machine, with the actual listeners."""
    ports = fold_ranks(result.port for result in tried)
    own = _listening_here(facts, tried[0].address)
    if facts.named:
        fix = Fix(
            text="start what should listen there, such as rank 0 of the job; or correct MASTER_ADDR and MASTER_PORT"
        )
    else:
        fix = Fix(text="nothing, before a job runs: rank 0 listens there. To try another port: HOST:PORT")
    return finding(
        Id.PORTS_CLOSED,
        Level.FAIL if facts.named else Level.WARN,
        f"{where} is reachable, but nothing listens on {'ports' if len(tried) > 1 else 'port'} {ports}",
        detail="It refused the connection: the path is open and no firewall needs a change. (A firewall that "
        'rejects with "port unreachable" looks the same.)',
        where=at,
        evidence=own,
        fix=fix,
    )


def _listening_here(facts: PortsFacts, address: str) -> tuple[str, ...]:
    """List the Python processes that listen at an address, if it belongs to a probing node."""
    for name in facts.scanned:
        node = facts.nodes.get(name)
        nics = node.network.interfaces if node is not None else ()
        if node is not None and (is_loopback(address) or any(address in nic.plain_addresses for nic in nics)):
            python = [own for own in node.listeners if "python" in own.command]
            return tuple(f"listening here: port {own.port}, {held_by(own)}" for own in python[:_OWN])
    return ()


def _evidence(source: str, tried: list[PortResult]) -> tuple[str, ...]:
    return tuple(
        f"{source} -> {result.address or result.host} port {result.port}: {result.error or result.state}"
        + (f" after {result.seconds:.1f} s" if result.seconds >= _INSTANT_S else "")
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
                f"Other ports of the host answer ({known}): it is up, and a firewall drops these packets.",
                Fix(text=f"allow inbound TCP {ports} on that host, or in its security group"),
            )
        return (
            "No tested port answers, and a closed port would. A firewall drops everything, or no running host has "
            "this address.",
            Fix(
                text="check whether the host is up and what filters the packets",
                commands=(f"ping -c 3 -W 1 {first.address}", f"ip neigh show {first.address}"),
            ),
        )
    if state == "rejected":
        if others or first.seconds < 1.0:
            return (
                "The rejection came at once: a firewall rejects packets instead of dropping them (firewalld does).",
                Fix(text=f"allow inbound TCP {ports} on that host"),
            )
        return (
            "No machine on this network answers for that address: the host is down, or the address is wrong.",
            Fix(text="check whether it is up", commands=(f"ip neigh show {first.address}",)),
        )
    if state == "no-route":
        return "", Fix(text="check the routes", commands=(f"ip route get {first.address}",))
    if state == "name":
        return "", Fix(
            text="check the spelling, or add it to DNS or /etc/hosts",
            commands=(f"getent hosts {shlex.quote(first.host)}",),
        )
    return "", Fix(
        text="check this machine's rules for outgoing packets", commands=("sudo nft list ruleset | grep -n output",)
    )


def _open(where: str, tried: list[PortResult], at: Where) -> Finding | None:
    """Report an open port on a host other than intended: loopback, a web server or a proxy."""
    home = [
        result
        for result in tried
        if is_loopback(result.address) and not is_loopback(result.host) and result.host != "localhost"
    ]
    if home:
        return finding(
            Shared.ADDRESS_LOOPBACK,
            Level.WARN,
            f"{home[0].host} resolves to {home[0].address} here, so this machine tested itself",
            where=at,
            fix=Fix(
                text="set its real address in /etc/hosts or DNS",
                commands=(f"getent hosts {shlex.quote(home[0].host)}",),
            ),
        )
    strangers = [result for result in tried if known_as(result) == "http"]
    if strangers:
        return finding(
            Id.PORTS_HTTP,
            Level.WARN,
            f"a web server or proxy answers on {where} port {fold_ranks(result.port for result in strangers)}",
            detail="A proxy on the path answers for any address, so an open port proves nothing. torch prints here: "
            "Ping failed, invalid value.",
            where=at,
            evidence=tuple(f"port {result.port} sent {result.said!r}" for result in strangers[:3]),
            fix=Fix(text="check whether that is the server you mean"),
        )
    return None
