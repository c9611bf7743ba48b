"""Findings about single ports: open (and the service), closed, filtered, in use. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.agent import handshake
from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.diagnosis.connectivity import EVIDENCE_LINES
from distdiag.diagnosis.verdicts import finding
from distdiag.facts.network.interfaces import is_loopback
from distdiag.fold import by_key
from distdiag.report import Finding, Where

if TYPE_CHECKING:
    from distdiag.agent.port_scan import PortResult
    from distdiag.commands.ports.types import PortsFacts
    from distdiag.facts.network.listeners import Listener

_FEW = 16
"""Up to this many ports per host, a closed port is a finding: more are a scan."""
_OWN, _WORDS = 6, 3
_INSTANT_S = 0.05


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
    taken = ((node, port, who) for node, ports in facts.taken.items() for port, who in ports.items())
    groups = by_key((port, (facts.hosts[node], who)) for node, port, who in taken)
    return [
        finding(
            "ports.port-taken",
            {"port": port, "hosts": fold(host for host, _ in owners)},
            where=Where(hosts=tuple(host for host, _ in owners)),
            evidence=tuple(f"{host}: {who}" for host, who in owners[:EVIDENCE_LINES]),
        )
        for port, owners in groups.items()
    ]


def _scanned(facts: PortsFacts) -> list[Finding]:
    """Merge results with one state into one finding per source node and host."""
    every = ((node, result) for node, results in facts.scanned.items() for result in results)
    groups = by_key(((node, result.host, result.state, result.error), result) for node, result in every)
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
    row = f"ports.{state}"
    if state in ("filtered", "rejected"):
        others = _other_answers(facts, host)
        row += "-port" if others or (state == "rejected" and first.seconds < 1.0) else "-host"
        known = ", ".join(str(other.port) for other in others[:4])
    else:
        known = ""
    words = {"where": where, "ports": ports, "plural": plural, "host": host, "error": first.error, "known": known}
    words |= {"reason": first.error.lower(), "address": first.address, "named": shlex.quote(host)}
    return finding(row, words, where=at, evidence=evidence)


def _closed(facts: PortsFacts, where: str, tried: list[PortResult], at: Where) -> Finding:
    """Report ports without a listener; on this machine, with the actual listeners."""
    ports = fold_ranks(result.port for result in tried)
    own = _listening_here(facts, tried[0].address)
    words = {"where": where, "ports": ports, "plural": "ports" if len(tried) > 1 else "port"}
    return finding("ports.closed" if facts.named else "ports.closed-unasked", words, where=at, evidence=own)


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


def _other_answers(facts: PortsFacts, host: str) -> list[PortResult]:
    """List the ports of a host that answered."""
    results = (result for results in facts.scanned.values() for result in results)
    return [result for result in results if result.host == host and result.state in ("open", "closed")]


def _open(where: str, tried: list[PortResult], at: Where) -> Finding | None:
    """Report an open port on a host other than intended: loopback, a web server or a proxy."""
    home = [
        result
        for result in tried
        if is_loopback(result.address) and not is_loopback(result.host) and result.host != "localhost"
    ]
    if home:
        words = {"host": home[0].host, "address": home[0].address, "named": shlex.quote(home[0].host)}
        return finding("ports.address-loopback", words, where=at)
    strangers = [result for result in tried if known_as(result) == "http"]
    if not strangers:
        return None
    return finding(
        "ports.http",
        {"where": where, "ports": fold_ranks(result.port for result in strangers)},
        where=at,
        evidence=tuple(f"port {result.port} sent {result.said!r}" for result in strangers[:3]),
    )
