"""Ranks at fault versus ranks that suffer, by stages, errors and cut connections. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.diagnosis.wording import counted
from distdiag.facts import machine
from distdiag.knowledge import logs
from distdiag.launch.rank_runs import Outcome
from distdiag.launch.wording import found
from distdiag.record import record
from distdiag.report import Finding, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.cluster.records import StuckSocket
    from distdiag.cluster.rendezvous_test import RendezvousTest
    from distdiag.launch.rank_runs import RankTimeline
    from distdiag.launch.record import RunRecord
    from distdiag.launch.types import Request

_BUSY = 0.2
"""Share of a core; a sleeping process, including torch's own threads, uses under 0.01."""
_READS_BYTES = 64 * 2**10


@record
class Trouble:
    """An error reported by a rank: its kind (see rank.py) and details."""

    rank: int
    kind: str
    message: str
    details: Mapping[str, object]


@record
class Attribution:
    """Ranks by cause; `troubles` excludes consequences of other ranks' errors."""

    died: tuple[int, ...]
    lost: tuple[int, ...]
    """Contact with their node was lost."""
    missing: tuple[int, ...]
    troubles: tuple[Trouble, ...]
    standstill: bool
    """No rank makes progress, and none is to blame."""
    only_consequences: bool = False
    """Ranks that died or reported an error merely lost their connection to others."""


def attribute(outcome: Outcome, traces: list[RankTimeline], stages: Sequence[str]) -> Attribution:
    """Separate causes from consequences."""
    troubles = [trouble for trace in traces for trouble in _troubles(trace)]
    died = [trace for trace in traces if trace.died]
    # Stalled, or interrupted while stalled; if no rank could be inspected, the positions suffice.
    inspected = outcome is Outcome.STALLED or any(trace.inspection for trace in traces)
    lost = tuple(trace.rank for trace in traces if trace.lost)
    missing = _missing(traces, stages) if inspected and not died and not lost else ()
    roots = [trouble for trouble in troubles if not _sounds_like_consequence(trouble.message)]
    real_deaths = [trace for trace in died if not _sounds_like_consequence(trace.ending.tail if trace.ending else "")]
    only_consequences = not (real_deaths or roots or missing or lost)
    if not only_consequences:
        died, troubles = real_deaths, roots
    failed = (trouble.rank for trouble in troubles if trouble.kind != "port-foreign")
    if 0 in (*(trace.rank for trace in died), *failed, *missing, *lost):
        # Without rank 0, a foreign answer at the address is a consequence.
        troubles = [trouble for trouble in troubles if trouble.kind != "port-foreign"]
    return Attribution(
        tuple(trace.rank for trace in died),
        lost,
        missing,
        tuple(troubles),
        outcome is Outcome.STALLED and not (missing or died or troubles or lost),
        only_consequences,
    )


def is_at_work(trace: RankTimeline) -> bool:
    """Return whether a silent rank computes, waits for a core or reads files: it may be slow or in an endless loop.

    A waiting GPU rank may spin, and the reads of a waiting rank are messages.
    """
    inspection = trace.inspection
    if inspection is None or inspection.state in machine.STOPPED:
        return False
    if trace.is_waiting:
        return _on_cpu(trace) and inspection.busy > _BUSY
    return inspection.state == "R" or inspection.busy > _BUSY or inspection.read_bytes > _READS_BYTES


def _on_cpu(trace: RankTimeline) -> bool:
    return all(event.payload["started"].get("device") == "cpu" for event in trace.events if "started" in event.payload)


def _missing(traces: list[RankTimeline], stages: Sequence[str]) -> tuple[int, ...]:
    live = [trace for trace in traces if trace.ending is None]
    states = {trace.rank: trace.inspection.state if trace.inspection else "" for trace in live}
    stopped = tuple(rank for rank, state in states.items() if state in machine.STOPPED)
    if stopped:
        return stopped
    if any(trace.gave_up or trace.has("held") for trace in traces):
        return ()
    positions = {trace.rank: trace.position(stages) for trace in traces}
    last = min(positions.values())
    if last < max(positions.values()):
        return tuple(rank for rank, place in positions.items() if place == last)
    if not all(trace.is_waiting for trace in traces):
        return ()  # each works on its own, and may sleep in the kernel for that
    in_kernel = tuple(rank for rank, state in states.items() if state == "D")
    return in_kernel if len(in_kernel) < len(live) else ()


def _troubles(trace: RankTimeline) -> list[Trouble]:
    found = [event.payload["trouble"] for event in trace.events if "trouble" in event.payload]
    return [Trouble(trace.rank, str(details["kind"]), str(details.get("message", "")), details) for details in found]


def _sounds_like_consequence(words: str) -> bool:
    known = logs.recognise(words)
    return known is not None and known.role == "consequence"


_PEER = re.compile(r"\[(?:::ffff:)?([0-9a-fA-F.:]+)\]:\d+|(?:peer|from|to) ([\w.:-]+)<\d+>")
"""Gloo's pair.cc: "Read error [10.0.0.3]:40114: Connection reset by peer"; NCCL: "remote peer node3<46588>"."""
_LINES = 8


@record
class Broken:
    """A broken connection of a rank: its host, the peer's host, and the evidence."""

    source: str
    target: str
    evidence: str


def cut(
    parts: Attribution, traces: Sequence[RankTimeline], request: Request, course: RunRecord
) -> tuple[Attribution, list[Finding]]:
    """Find cut connections: ranks report only lost peers, but no rank was lost.

    Return the attribution without ranks that are only witnesses, and the finding; else the same attribution and [].
    """
    hurt = {*parts.died, *(trouble.rank for trouble in parts.troubles)}
    if course.meeting is None or not hurt or parts.missing or parts.lost or not parts.only_consequences:
        return parts, []
    names = _names(course.meeting)
    host = {trace.rank: trace.host for trace in traces}
    messages = [(trouble.rank, trouble.message) for trouble in parts.troubles]
    messages += [(trace.rank, trace.ending.tail) for trace in traces if trace.rank in parts.died and trace.ending]
    broken = [
        Broken(
            host[rank],
            target,
            f"rank {rank} ({host[rank]}): {words[max(0, match.start() - 40) : match.end() + 80].strip()}",
        )
        for rank, words in messages
        for match in _PEER.finditer(words)
        if (target := names.get(match[1] or match[2]))
        and target != host[rank]
        # A failing rank exits and its peers lose it, which is no evidence against them.
        and not _was_over_before(rank, target, traces)
    ]
    if not broken:
        return parts, []
    accused, witnesses = _accuse_of_cuts(broken)
    blamed = replace(
        parts,
        died=tuple(rank for rank in parts.died if host[rank] in accused),
        troubles=tuple(trouble for trouble in parts.troubles if host[trouble.rank] in accused),
    )
    return blamed, [_cut(broken, accused, witnesses, traces, request)]


def _accuse_of_cuts(broken: Sequence[Broken]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return accused hosts and witnesses; both ends of a path if one may have been lost because it lost the other.

    Ranks give up within milliseconds of each other, and one late report makes the rank that left first look like the
    last. The ranks that lost the first end saw nothing of that path: no witnesses.
    """
    accused, witnesses = accuse(broken)
    lost = {connection.target for connection in broken if connection.source in accused}
    if len(accused) == len(lost) == 1:
        return (*accused, *lost), ()
    return accused, witnesses


def _was_over_before(rank: int, host: str, traces: Sequence[RankTimeline]) -> bool:
    """Return whether a rank of this host had given up before this rank did."""
    mine = next((trace.over_at for trace in traces if trace.rank == rank), None)
    theirs = [trace.over_at for trace in traces if trace.host == host and trace.over_at is not None]
    return mine is not None and bool(theirs) and min(theirs) < mine


def _cut(
    broken: Sequence[Broken],
    accused: Sequence[str],
    witnesses: Sequence[str],
    traces: Sequence[RankTimeline],
    request: Request,
) -> Finding:
    seen_by = tuple(trace.rank for trace in traces if trace.host in witnesses)
    return found(
        "connections-cut",
        request,
        Where(hosts=tuple(accused)),
        witnesses=Witnesses(hosts=tuple(witnesses), ranks=seen_by),
        evidence=list(dict.fromkeys(connection.evidence for connection in broken))[:_LINES],
        which=f"{'of' if witnesses else 'between'} {fold(accused)}",
        accused=fold(accused),
        seen_by=fold(witnesses),
    )


def stuck(traces: Iterable[RankTimeline], meeting: RendezvousTest | None) -> list[Broken]:
    """List the connections on which the kernel of a silent rank's node retransmits without an answer."""
    names = _names(meeting) if meeting is not None else {}
    return [
        Broken(trace.host, target, f"rank {trace.rank} ({trace.host}): {format_stuck(connection)}")
        for trace in traces
        if trace.inspection is not None
        for connection in trace.inspection.stuck
        if (target := names.get(_address(connection))) and target != trace.host
    ]


def format_stuck(connection: StuckSocket) -> str:
    """Format a connection that retransmits without an answer."""
    times = f", {counted(connection.retransmits, 'retransmit')}" if connection.retransmits else ""
    if connection.state == "SYN_SENT":
        return f"connecting to {connection.remote}, no answer{times}"
    return f"connected to {connection.remote}, {connection.unanswered_bytes} bytes without an answer{times}"


def _address(connection: StuckSocket) -> str:
    return connection.remote.rpartition(":")[0].strip("[]")


def accuse(broken: Sequence[Broken]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return accused hosts and witnesses: the host common to all connections, else all ends."""
    ends = [(connection.source, connection.target) for connection in broken]
    hosts = tuple(dict.fromkeys(host for both in ends for host in both))
    common = [host for host in hosts if all(host in both for both in ends)]
    if len(hosts) > 2 and len(common) == 1:
        return (common[0],), tuple(host for host in hosts if host != common[0])
    return hosts, ()


def _names(meeting: RendezvousTest) -> Mapping[str, str]:
    """Map addresses and names to hosts."""
    found = {host: host for host in meeting.hosts.values()}
    for node, network in meeting.networks.items():
        for interface in network.interfaces:
            if not interface.loopback:
                found.update({entry.partition("/")[0]: meeting.hosts[node] for entry in interface.addresses})
    return found
