"""Hosts that could not be used, as findings: the same trouble of many hosts is one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostResult, HostState
from distdiag.cluster.hosts import fold
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_EVIDENCE_LINES = 8
_WORDS = {
    HostState.UNKNOWN_NAME: "has no address",
    HostState.FILTERED: "does not answer at all",
    HostState.REFUSED: "refuses the connection",
    HostState.NO_ROUTE: "cannot be reached",
    HostState.NOT_SSH: "does not speak ssh",
    HostState.HOST_KEY_UNKNOWN: "has a host key that is not known here",
    HostState.HOST_KEY_CHANGED: "has another host key than the known one",
    HostState.HOST_KEY_REVOKED: "has a revoked host key",
    HostState.AUTH: "does not let us in",
    HostState.NO_PYTHON: "has no usable Python",
    HostState.TIMEOUT: "did not answer in time",
    HostState.NONSENSE: "does not run what it is asked to",
    HostState.FAILED: "could not be used",
    HostState.KILLED: "ended what was started there",
    HostState.LOST: "went away",
    HostState.CANCELLED: "was not finished when interrupted",
}

_REMEDIES = {
    HostState.UNKNOWN_NAME: "check the spelling, and the name server of this machine",
    HostState.FILTERED: "it is down, or a firewall drops the packets; see whether it is up, or leave it out",
    HostState.REFUSED: "nothing listens there: start sshd, or give its port (ssh://host:port, or ~/.ssh/config)",
    HostState.NO_ROUTE: "see the route to it, and whether its network is up",
    HostState.NOT_SSH: "another program listens on that port; give the right one: --hosts ssh://host:port",
    HostState.HOST_KEY_REVOKED: "somebody marked this key as one not to trust any more: the host needs a new one",
    HostState.AUTH: "log in by hand once, and see what it wants (key, user, agent)",
    HostState.TIMEOUT: "see what holds it up there; or give it longer: --host-timeout SECONDS",
    HostState.FAILED: "run a command there by hand, and see what it says",
    HostState.KILLED: "see who ends processes there: a limit of memory or time, or a policy for logins",
    HostState.NONSENSE: "see what a login there prints: a forced command, or login files that wait or talk",
}


def host_findings(refusals: Mapping[str, HostError], rows: Iterable[HostResult]) -> list[Finding]:
    """Make one finding of each trouble, for all hosts that have it.

    This machine alone has no row, and may go away all the same.
    """
    groups: dict[tuple[HostState, str, str], list[str]] = {}
    for host in dict.fromkeys([*(row.host for row in rows), *refusals]):
        refusal = refusals.get(host)
        if refusal is not None:
            words = refusal.message.replace(host, "it")
            groups.setdefault((refusal.state, refusal.stage, words), []).append(host)
    return [_finding(hosts, [refusals[host] for host in hosts]) for hosts in groups.values()]


def _finding(hosts: list[str], refusals: list[HostError]) -> Finding:
    refusal = refusals[0]
    words = _WORDS[refusal.state]
    text = refusal.hint or _REMEDIES.get(refusal.state, "")
    commands = tuple(dict.fromkeys(command for own in refusals for command in own.commands))
    title = f"{fold(hosts)} {words}" if len(hosts) == 1 else f"{len(hosts)} hosts, {fold(hosts)}: each {words}"
    return Finding(
        id=f"hosts.{refusal.state}",
        level=Level.UNKNOWN,
        title=f"{title}: {refusal.message}" if refusal.message else title,
        where=Where(hosts=tuple(hosts)),
        evidence=refusals[0].evidence if len(hosts) == 1 else _evidence(hosts, refusals),
        fix=None if not text else Fix(text=text, commands=commands),
    )


def _evidence(hosts: list[str], refusals: list[HostError]) -> tuple[str, ...]:
    """Return the last line of each host, as far as there is room."""
    pairs = zip(hosts, refusals, strict=True)
    lines = [f"{host}: {refusal.evidence[-1]}" for host, refusal in pairs if refusal.evidence]
    more = (f"... and {len(lines) - _EVIDENCE_LINES} more",) if len(lines) > _EVIDENCE_LINES else ()
    return (*lines[:_EVIDENCE_LINES], *more)


def summary_of(rows: Iterable[HostResult]) -> str:
    """Count the hosts by state: "997 ok, 2 filtered, 1 auth"."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in counts.items())
