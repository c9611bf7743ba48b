"""Findings about unusable hosts; one error on many hosts is one finding. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostResult, HostState
from distdiag.cluster.hosts import fold, fold_within
from distdiag.fold import by_key
from distdiag.ids import Id
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_EVIDENCE_LINES = 8
_ROOM = 160
"""Maximum length of a list of hosts in a title; `where` has all of them."""
_WORDS = {
    HostState.UNKNOWN_NAME: "cannot be resolved",
    HostState.FILTERED: "does not respond",
    HostState.REFUSED: "refuses the connection",
    HostState.NO_ROUTE: "is unreachable",
    HostState.NOT_SSH: "failed the ssh handshake",
    HostState.HOST_KEY_UNKNOWN: "has an unknown host key",
    HostState.HOST_KEY_CHANGED: "has a changed host key",
    HostState.HOST_KEY_REVOKED: "has a revoked host key",
    HostState.AUTH: "denies access",
    HostState.NOT_RUNNING: "is not running",
    HostState.NO_PYTHON: "has no usable Python",
    HostState.TIMEOUT: "did not answer in time",
    HostState.PROTOCOL_ERROR: "returned an invalid answer",
    HostState.FAILED: "could not be used",
    HostState.KILLED: "killed the agent",
    HostState.LOST: "stopped responding",
    HostState.CANCELLED: "had not finished when interrupted",
}

_REMEDIES = {
    HostState.UNKNOWN_NAME: "check the spelling, and this machine's DNS",
    HostState.FILTERED: "host down, or a firewall drops the packets; check that it is up, or leave it out",
    HostState.REFUSED: "nothing listens there: start sshd, or give its port (ssh://host:port, or ~/.ssh/config)",
    HostState.NO_ROUTE: "check the route to it, and whether its network is up",
    HostState.NOT_SSH: "another program may listen on that port; give ssh's port: --hosts ssh://host:port",
    HostState.HOST_KEY_REVOKED: "this key is marked as no longer trusted: the host needs a new key",
    HostState.AUTH: "log in by hand once and check what it requires (key, user, agent)",
    HostState.TIMEOUT: "check what blocks there, or increase --host-timeout SECONDS",
    HostState.FAILED: "run a command there by hand and read its output",
    HostState.KILLED: "check what kills processes there: a memory or time limit, or a login policy",
    HostState.PROTOCOL_ERROR: "check what a login there prints: a forced command, or login files that wait or print",
}


def host_findings(refusals: Mapping[str, HostError], rows: Iterable[HostResult]) -> list[Finding]:
    """Return one finding per kind of error, with all of its hosts.

    This machine alone has no row, but may still fail.
    """
    order = dict.fromkeys([*(row.host for row in rows), *refusals])
    refused = ((host, refusals[host]) for host in order if host in refusals)
    groups = by_key(((own.state, own.stage, own.message.replace(host, "it")), host) for host, own in refused)
    return [_finding(hosts, [refusals[host] for host in hosts]) for hosts in groups.values()]


def _finding(hosts: list[str], refusals: list[HostError]) -> Finding:
    refusal = refusals[0]
    words = _WORDS[refusal.state]
    text = refusal.hint or _REMEDIES.get(refusal.state, "")
    commands = tuple(dict.fromkeys(command for own in refusals for command in own.commands))
    folded = fold(hosts)
    several = f"{len(hosts)} hosts, {folded}" if len(folded) <= _ROOM else fold_within(hosts, _ROOM)
    title = f"{folded} {words}" if len(hosts) == 1 else f"{several}: each {words}"
    return Finding(
        id=Id(f"hosts.{refusal.state}"),
        level=Level.UNKNOWN,
        title=f"{title}: {refusal.message}" if refusal.message else title,
        where=Where(hosts=tuple(hosts)),
        evidence=refusals[0].evidence if len(hosts) == 1 else _evidence(hosts, refusals),
        fix=None if not text else Fix(text=text, commands=commands),
    )


def _evidence(hosts: list[str], refusals: list[HostError]) -> tuple[str, ...]:
    """Return the last line of each host, up to the limit of lines."""
    pairs = zip(hosts, refusals, strict=True)
    lines = [f"{host}: {refusal.evidence[-1]}" for host, refusal in pairs if refusal.evidence]
    more = (f"... and {len(lines) - _EVIDENCE_LINES} more",) if len(lines) > _EVIDENCE_LINES else ()
    return (*lines[:_EVIDENCE_LINES], *more)


def summary_of(rows: Iterable[HostResult]) -> str:
    """Count the hosts by state: "997 ok, 2 filtered, 1 auth"."""
    return ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in rows).items())
