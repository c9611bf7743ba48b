"""Report of a run, common to every command that starts ranks. Pure."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from distdiag.cluster.hosts import fold_within, name_ranks
from distdiag.cluster.records import Started
from distdiag.diagnosis.connectivity import Case, path_findings
from distdiag.diagnosis.hosts.unreached_hosts import summary_of
from distdiag.launch import findings, rank_errors
from distdiag.launch.attribution import attribute, cut
from distdiag.launch.environment_checks import (
    about_hosts,
    networks_that_differ,
    nodes_that_differ,
    pcie_findings,
    surroundings,
)
from distdiag.launch.rank_runs import Outcome
from distdiag.launch.record import Inventory, NotStarted
from distdiag.launch.types import RankResult, Rendezvous, RunFacts, Status, Versions
from distdiag.launch.wording import found
from distdiag.report import Finding, Level, Report, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.cluster.records import PausedMessage
    from distdiag.cluster.rendezvous_test import RendezvousTest
    from distdiag.launch.attribution import Attribution
    from distdiag.launch.rank_runs import RankTimeline
    from distdiag.launch.record import Asked, Data, Job, Plan, RunRecord, SavedRun
    from distdiag.launch.types import Request


def findings_of(request: Request, scene: Inventory, plan: Plan, course: RunRecord) -> list[Finding]:
    """Return the faults of nodes, paths and ranks, and the limits of the test."""
    parts, cut = _judged(request, course)
    return [
        *_paths(request, course.meeting),
        *findings.unsupported_archs(course.traces, request),
        *findings.nodes_lost(parts, course.traces, request, course),
        *cut,
        *([] if cut else findings.died(parts, course.traces, request)),
        *findings.missing(parts, course.traces, request, course),
        *([] if cut else rank_errors.findings_of(parts, course.traces, request)),
        *findings.standstill(parts, course.traces, request, course),
        *about_hosts(scene),
        *nodes_that_differ(request, scene.places, course.traces),
        *networks_that_differ(request, course.meeting),
        *surroundings(request, plan, scene.places),
        *pcie_findings(request, scene.places),
    ]


def facts_of(request: Request, scene: Inventory, plan: Plan, course: RunRecord) -> RunFacts:
    """Return the facts common to every command."""
    import msgspec

    parts, _ = _judged(request, course)
    return RunFacts(
        world_size=plan.nproc,
        backend=plan.backend,
        device=plan.device,
        timeout_s=request.timeout_s,
        versions=msgspec.convert(started(course.traces), Versions),
        ranks=tuple(_rank_result(trace, parts, request) for trace in course.traces),
        outcome=course.outcome,
        log_dirs=dict(course.log_dirs),
        hosts=scene.rows,
        rendezvous=_rendezvous(course.meeting),
    )


def _judged(request: Request, course: RunRecord) -> tuple[Attribution, list[Finding]]:
    """Return the attribution of faults; a cut connection has its own finding."""
    return cut(attribute(course.outcome, course.traces, request.stages), course.traces, request, course)


def report_of(job: Job[Asked, Data], record: SavedRun) -> Report[Data]:
    """Judge a run."""
    job = replace(job, request=replace(job.request, program=record.program or job.request.program))
    if record.scene is not None and record.plan is not None and record.course is not None:
        report = job.diagnose(job.request, record.scene, record.plan, record.course)
    else:
        report = not_run(job, record.not_run or NotStarted(scene=Inventory(places=())))
    extra = record.extra
    if extra is None:
        return report
    summary = f"{report.summary}; but {extra.title}" if report.verdict is Verdict.OK else report.summary
    return replace(report, findings=(*report.findings, extra), summary=summary)


def not_run(job: Job[Asked, Data], why: NotStarted) -> Report[Data]:
    """Return the report of a run in which no rank was started."""
    request = job.request
    judged = [*why.why, *_paths(request, why.meeting), *about_hosts(why.scene)]
    data = job.data(
        world_size=why.plan.nproc if why.plan else request.nproc or 0,
        backend=why.plan.backend if why.plan else request.backend,
        device=why.plan.device if why.plan else request.device,
        timeout_s=request.timeout_s,
        versions=Versions(),
        ranks=(),
        outcome="not-run",
        log_dirs={},
        hosts=why.scene.rows,
        rendezvous=_rendezvous(why.meeting),
    )
    summary = worst_of(judged) or "no rank was started"
    if why.interrupted:
        summary = f"interrupted before any rank started; hosts: {summary_of(why.scene.rows)}"
    return Report(
        command=request.command,
        data=data,
        findings=tuple(judged),
        summary=summary,
        interrupted=why.interrupted,
    )


def worst_of(judged: Sequence[Finding]) -> str:
    """Return the first failure or unknown, and the number of others; empty without any."""
    wrong = [finding for finding in judged if finding.level in (Level.FAIL, Level.UNKNOWN)]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{wrong[0].title}{more}" if wrong else ""


def concluded(
    request: Request,
    scene: Inventory,
    outcome: Outcome,
    data: Data,
    judged: Sequence[Finding],
    *,
    passed: Callable[[str], str],
    so_far: str = "",
) -> Report[Data]:
    """Return the report of a run.

    `passed`: the summary without faults, of the tested hosts. `so_far`: the part measured, for an incomplete run.
    """
    interrupted = outcome is Outcome.INTERRUPTED
    wrong = [finding for finding in judged if finding.level in (Level.FAIL, Level.UNKNOWN)]
    if interrupted:
        summary = f"interrupted; {wrong[0].title if wrong else how_far(data.ranks, request.stages)}{so_far}"
    elif wrong:
        summary = f"{worst_of(judged)}{so_far}"
    else:
        warnings = "".join(f"; but {finding.title}" for finding in judged if finding.level is Level.WARN)
        summary = passed(fold_within((place.host for place in scene.places), 160)) + warnings
    return Report(command=request.command, data=data, findings=tuple(judged), summary=summary, interrupted=interrupted)


def how_far(ranks: Sequence[RankResult], stages: Sequence[str]) -> str:
    """Format the ranks by stage reached."""
    reached = [(stage, [rank.rank for rank in ranks if rank.stage == stage]) for stage in stages]
    return ", ".join(f"{name_ranks(group)} had reached {stage}" for stage, group in reached if group)


def payloads(traces: Sequence[RankTimeline], key: str) -> list[Any]:
    """List the values reported by ranks under this key, in order of rank."""
    reported: list[Mapping[str, Any]] = [event.payload for trace in traces for event in trace.events]
    return [payload[key] for payload in reported if key in payload]


def started(traces: Sequence[RankTimeline]) -> Started:
    """Return the torch and device facts of the first rank that reported them; without one, no device."""
    return next(iter(payloads(traces, "started")), Started(device=""))


def _paths(request: Request, meeting: RendezvousTest | None) -> list[Finding]:
    if meeting is None:
        return []
    case = Case(
        command=request.command,
        test=meeting,
        head=meeting.head,
        rendezvous_port=meeting.port,
        again=lambda extra: request.again(extra=extra),
    )
    return path_findings(case)


def _rendezvous(meeting: RendezvousTest | None) -> Rendezvous | None:
    if meeting is None:
        return None
    return Rendezvous(
        host=meeting.hosts[meeting.head],
        address=meeting.address,
        port=meeting.port,
        interfaces={meeting.hosts[node]: name for node, name in meeting.interfaces.items()},
        paths_tried=len(meeting.paths),
        paths_open=sum(path.is_open for path in meeting.paths),
    )


def _rank_result(trace: RankTimeline, parts: Attribution, request: Request) -> RankResult:
    facts = started([trace])
    last = trace.last
    status = _status(trace, parts)
    return RankResult(
        rank=trace.rank,
        local_rank=trace.local_rank,
        host=trace.host,
        pid=trace.pid,
        device=facts.get("device") or None,
        device_name=facts.get("device_name"),
        capability=facts.get("capability"),
        free_bytes=facts.get("free_bytes"),
        total_bytes=facts.get("total_bytes"),
        stage=last.stage if last is not None else request.stages[0],
        doing=last.note if last is not None else "starting Python",
        status=status,
        error=_error(trace, parts, status),
        elapsed_s=trace.ending.elapsed_s if trace.ending else last.elapsed_s if last is not None else 0.0,
    )


def _status(trace: RankTimeline, parts: Attribution) -> Status:
    if trace.rank in parts.lost:
        return Status.LOST
    if trace.rank in parts.died:
        return Status.DIED
    if trace.rank in parts.missing:
        return Status.MISSING
    if trace.rank in rank_errors.failed_ranks(parts):
        return Status.FAILED
    return Status.OK if trace.finished else Status.WAITING


def _error(trace: RankTimeline, parts: Attribution, status: Status) -> str | None:
    if status is Status.LOST:
        return trace.lost
    if status is Status.DIED:
        return findings.how_it_ended(trace)
    if status is Status.MISSING:
        return findings.why_missing(trace)
    if status is Status.FAILED:
        mine = [trouble for trouble in parts.troubles if trouble.rank == trace.rank]
        return "; ".join(trouble.message or trouble.kind for trouble in mine) or "does not match the other ranks"
    return None


_MUCH = 0.2
_OTHERS = 0.5
"""Maximum pause of the others relative to such a rank; above, the machine is busy."""


def _pauses(traces: Sequence[RankTimeline]) -> dict[int, list[PausedMessage]]:
    """Return the measurements by rank: of a whole test, or of each row of allreduce-bench."""
    return {
        trace.rank: [
            *payloads([trace], "paused"),
            *(row["paused"] for row in payloads([trace], "row") if "paused" in row),
        ]
        for trace in traces
    }


def paused(request: Request, traces: Sequence[RankTimeline]) -> list[Finding]:
    """Return ranks that were stopped, throttled or without a core."""
    pauses = _pauses(traces)
    shares = {rank: _share(own, "paused_ns") for rank, own in pauses.items() if own}
    # A lack of cores concerns the whole machine; a rank is stopped or throttled alone.
    stopped = _outliers({rank: share - _share(pauses[rank], "no_core_ns") for rank, share in shares.items()})
    throttled = [rank for rank in stopped if _share(pauses[rank], "throttled_ns") > shares[rank] / 3]
    named = [trace for trace in traces if trace.rank in (stopped or _outliers(shares))]
    if not named:
        return []
    share = median(shares[trace.rank] for trace in named)
    why = "it was stopped" if stopped else "other programs used its cores"
    why = "its CPU quota was used up" if throttled and throttled == stopped else why
    return [
        found(
            "rank-paused",
            request,
            named,
            # A busy machine is not a fault of the rank.
            level=Level.FAIL if stopped else Level.WARN,
            evidence=[
                f"rank {rank}: not running for {share:.0%} of the time: {_share(pauses[rank], 'no_core_ns'):.0%} "
                f"waiting for a core, {_share(pauses[rank], 'throttled_ns'):.0%} throttled by a CPU quota"
                for rank, share in sorted(shares.items(), key=lambda entry: -entry[1])[:8]
            ],
            share=f"{share:.0%}",
            why=why,
        )
    ]


def without_core(traces: Sequence[RankTimeline]) -> float:
    """Return the share of time that the median rank waited for a core."""
    return median([_share(own, "no_core_ns") for own in _pauses(traces).values() if own] or [0.0])


def _outliers(shares: Mapping[int, float]) -> list[int]:
    """List ranks with a large share, if all others have a much smaller share."""
    far = sorted(rank for rank, share in shares.items() if share > _MUCH)
    others = [share for rank, share in shares.items() if rank not in far]
    return far if far and others and max(others) < _OTHERS * min(shares[rank] for rank in far) else []


def _share(pauses: Sequence[PausedMessage], key: Literal["paused_ns", "no_core_ns", "throttled_ns"]) -> float:
    return sum(int(pause[key]) for pause in pauses) / max(1, sum(pause["of_ns"] for pause in pauses))


def ran_on(backend: str, device: str) -> str:
    """Format the tested backend and device for a summary: "gloo, CPU only: no GPU was tested", "nccl, NVIDIA H100"."""
    return f"{backend}, CPU only: no GPU was tested" if device == "cpu" else f"{backend}, {device}"
