"""What single ports of hosts said: open and by whom, closed, filtered; the advice follows the state. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks
from distdiag.commands.ports.findings import finding
from distdiag.node import handshake
from distdiag.node.network import is_loopback
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from distdiag.commands.ports.check import Seen
    from distdiag.node.scan import Tried

_FEW = 16
"""Ports of a host up to which a closed one is worth a word: more are a search."""


def known_as(one: Tried) -> str:
    """Tell who is behind an open port, by its first line."""
    if one.state != "open":
        return ""
    if one.said.startswith(handshake.PROTOCOL):
        return "distdiag"
    if one.said.startswith("HTTP/") or "<html" in one.said.lower() or "<!doctype" in one.said.lower():
        return "http"
    if one.said.startswith("SSH-"):
        return "ssh"
    if one.said:
        return "other"
    return "silent"


def about_tried(seen: Seen) -> list[Finding]:
    """Make one finding of each state, for each node that tried and each host."""
    groups: dict[tuple[str, str, str, str], list[Tried]] = {}
    for node, tried in seen.tried.items():
        for one in tried:
            groups.setdefault((node, one.host, one.state, one.error), []).append(one)
    found: list[Finding] = []
    for (node, host, state, _), ports in groups.items():
        judged = _judged(seen, seen.hosts[node], host, state, ports)
        found += [judged] if judged is not None else []
    return found


def _judged(seen: Seen, source: str, host: str, state: str, tried: list[Tried]) -> Finding | None:
    ports = fold_ranks(one.port for one in tried)
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
            Level.FAIL if seen.checks or seen.named else Level.WARN,
            f"{where} is reached, and nobody listens at {plural} {ports}",
            detail="It answered with a refusal: the way is free, no firewall needs opening. (A firewall that rejects "
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
            "filtered",
        ),
        "rejected": (f"{where} at {plural} {ports} is turned away: {first.error.lower()}", "rejected"),
        "no-route": (f"there is no route to {where}: {first.error.lower()}", "no-route"),
        "name": (f"{host} cannot be resolved: {first.error}", "name"),
        "denied": (
            f"this machine does not let us connect to {where} {plural} {ports}: {first.error.lower()}",
            "denied",
        ),
    }
    title, id_ = titles[state]
    detail, fix = _advice(state, first, seen, source, ports)
    return finding(id_, Level.FAIL, title, detail=detail, where=at, evidence=evidence, fix=fix)


def _evidence(source: str, tried: list[Tried]) -> tuple[str, ...]:
    return tuple(
        f"{source} -> {one.address or one.host} port {one.port}: {one.error or one.state} after {one.seconds:.1f} s"
        for one in tried[:3]
    )


def _advice(state: str, first: Tried, seen: Seen, source: str, ports: str) -> tuple[str, Fix]:
    others = [
        one
        for tried in seen.tried.values()
        for one in tried
        if one.host == first.host and one.state in ("open", "closed")
    ]
    if state == "filtered":
        if others:
            known = ", ".join(str(one.port) for one in others[:4])
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


def _open(where: str, tried: list[Tried], at: Where) -> Finding | None:
    """Say who answers, if it is worth a word; loopback is never the other host."""
    home = [one for one in tried if is_loopback(one.address) and not is_loopback(one.host) and one.host != "localhost"]
    if home:
        return finding(
            "loopback",
            Level.WARN,
            f"{home[0].host} resolves to {home[0].address} here: this machine answered itself",
            where=at,
            fix=Fix(
                text="give it its real address in /etc/hosts or DNS",
                commands=(f"getent hosts {shlex.quote(home[0].host)}",),
            ),
        )
    strangers = [one for one in tried if known_as(one) == "http"]
    if strangers:
        return finding(
            "http",
            Level.WARN,
            f"at {where} port {fold_ranks(one.port for one in strangers)} a web server or proxy answers",
            detail="A proxy in between answers for any address: an open port proves nothing then. Torch says here: "
            "Ping failed, invalid value.",
            where=at,
            evidence=tuple(f"port {one.port} says {one.said!r}" for one in strangers[:3]),
            fix=Fix(text="see whether it is the one that you mean"),
        )
    return None
