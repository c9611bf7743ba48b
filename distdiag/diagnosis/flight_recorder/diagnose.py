"""Report of flight-recorder, from the dumps of all nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.diagnosis.flight_recorder.causes import Kind, find_causes
from distdiag.diagnosis.flight_recorder.findings import all_ended, finding_of, notes, undecided
from distdiag.diagnosis.flight_recorder.matching import Job, match
from distdiag.diagnosis.flight_recorder.types import COMMAND, CallRow, FlightRecorder, RankRow
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.verdicts import worst_first
from distdiag.facts.recorder.collect import NO_READER
from distdiag.facts.recorder.read_dump import ENDED, FAILED, STARTED
from distdiag.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.diagnosis.flight_recorder.matching import Call
    from distdiag.diagnosis.flight_recorder.types import Request
    from distdiag.facts.recorder.collect import NodeDumps
    from distdiag.saved_facts import Gathered

_STATES = {ENDED: "ended", FAILED: "failed", STARTED: "started"}


def diagnose(request: Request, gathered: Gathered[NodeDumps]) -> Report[FlightRecorder]:
    """Match the dumps of all ranks and report which rank is stuck, and why."""
    nodes = gathered.facts
    job = match((dump for node in nodes for dump in node.dumps), request.world_size)
    hosts = {dump.path: dump.host or node.host for node in nodes for dump in node.dumps}
    causes = find_causes(job)
    gone = {pipe.rank for node in nodes for pipe in node.pipes if pipe.answer == NO_READER}
    found = [finding_of(cause, job, request, gone) for cause in causes]
    found += notes(job, nodes, gathered, {rank for cause in causes for rank in cause.ranks}, request)
    found += host_findings(gathered.refusals, gathered.rows)
    rows = tuple(_rows(job, hosts, {rank for cause in causes for rank in cause.ranks if cause.kind is not Kind.LATE}))
    if all(cause.kind is Kind.LATE for cause in causes) and job.dumps:
        still = [row.rank for row in rows if row.waiting is not None]
        found.append(undecided(still) if still else all_ended(job, request, is_slow=bool(causes)))
    found = worst_first(found)
    return Report(
        command=COMMAND,
        data=FlightRecorder(world_size=job.world_size, ranks=rows),
        findings=tuple(found),
        summary=found[0].title if found else "no flight recorder dump found",
        interrupted=gathered.interrupted,
    )


def _rows(job: Job, hosts: dict[str, str], accused: set[int]) -> Iterable[RankRow]:
    for rank in range(job.world_size):
        dump = job.dumps.get(rank)
        waiting = [part.pending[min(part.pending)] for part in job.parts.get(rank, {}).values() if part.pending]
        if dump is not None:
            waiting += [
                call for pair in job.pairs.values() for call in (*pair.sends[:1], *pair.recvs[:1]) if call.rank == rank
            ]
        oldest = min(waiting, key=lambda call: call.record, default=None)
        status = (
            ("old dump" if rank in job.outdated else "no dump")
            if dump is None
            else "idle"
            if oldest is None
            else "waits"
        )
        if oldest is not None and oldest.state == FAILED:
            status = "failed"
        yield RankRow(
            rank=rank,
            host=hosts.get(dump.path, "") if dump is not None else "",
            path=dump.path if dump is not None else "",
            form=dump.form if dump is not None else "",
            backends=dump.backends if dump is not None else (),
            entries=dump.count if dump is not None else 0,
            truncated=dump is not None and dump.truncated,
            status=status,
            accused=rank in accused,
            error=dump.error if dump is not None else "",
            waiting=_row(job, oldest),
            last=_row(job, job.last.get(rank)),
            recent=tuple(row for call in job.recent.get(rank, ()) if (row := _row(job, call)) is not None),
        )


def _row(job: Job, call: Call | None) -> CallRow | None:
    if call is None:
        return None
    function, file, line = call.site or ("", "", 0)
    source, target = call.pair or (None, None)
    return CallRow(
        group=job.groups[call.group].label,
        operation=call.operation.name,
        number=None if call.pair is not None or call.operation.name in ("send", "recv") else call.seq,
        state=_STATES.get(call.state, "scheduled"),
        created_ns=call.created_ns,
        function=function,
        file=file,
        line=line,
        source=source,
        target=target,
    )
