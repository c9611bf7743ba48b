"""The facts of the nodes and the steps of all ranks -> what every command on ranks reports of them. Pure."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from distdiag.cluster.hosts import name_ranks
from distdiag.cluster.unreached_hosts import summary_of
from distdiag.diagnosis.connectivity import Case, path_findings
from distdiag.launch import findings, rank_errors
from distdiag.launch.attribution import attribute, cut
from distdiag.launch.environment_checks import (
    about_hosts,
    networks_that_differ,
    nodes_that_differ,
    pcie_findings,
    surroundings,
)
from distdiag.launch.record import Inventory, NotStarted
from distdiag.launch.types import RankResult, Rendezvous, Status, Versions
from distdiag.launch.wording import where, who
from distdiag.report import Finding, Fix, Level, Report, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.rank_runs import RankTimeline
    from distdiag.cluster.records import PausedTold
    from distdiag.cluster.rendezvous_test import RendezvousTest
    from distdiag.launch.attribution import Attribution
    from distdiag.launch.record import Asked, Data, Job, Plan, RunRecord, SavedRun
    from distdiag.launch.types import Request


def findings_of(request: Request, scene: Inventory, plan: Plan, course: RunRecord) -> list[Finding]:
    """Say what went wrong with nodes, paths and ranks, and what was not tested."""
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


def facts_of(request: Request, scene: Inventory, plan: Plan, course: RunRecord) -> dict[str, Any]:
    """Give the fields of RunFacts."""
    parts, _ = _judged(request, course)
    return {
        "world_size": plan.nproc,
        "backend": plan.backend,
        "device": plan.device,
        "timeout_s": request.timeout_s,
        "versions": _versions(started(course.traces)),
        "ranks": tuple(_rank_result(trace, parts, request) for trace in course.traces),
        "outcome": course.outcome,
        "log_dirs": dict(course.log_dirs),
        "hosts": scene.rows,
        "rendezvous": _rendezvous(course.meeting),
    }


def _judged(request: Request, course: RunRecord) -> tuple[Attribution, list[Finding]]:
    """Tell who is to blame; where it is a connection, that is a finding of its own."""
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
    """Report why no rank was started."""
    request = job.request
    found = [*why.why, *_paths(request, why.meeting), *about_hosts(why.scene)]
    facts = {
        "world_size": why.plan.nproc if why.plan else request.nproc or 0,
        "backend": why.plan.backend if why.plan else request.backend,
        "device": why.plan.device if why.plan else request.device,
        "timeout_s": request.timeout_s,
        "versions": Versions(),
        "ranks": (),
        "outcome": "not-run",
        "log_dirs": {},
        "hosts": why.scene.rows,
        "rendezvous": _rendezvous(why.meeting),
    }
    summary = worst_of(found) or "no rank was started"
    if why.interrupted:
        summary = f"interrupted before any rank was started; hosts: {summary_of(why.scene.rows)}"
    return Report(
        command=request.command,
        data=job.no_data(request, why, facts),
        findings=tuple(found),
        summary=summary,
        interrupted=why.interrupted,
    )


def worst_of(found: Sequence[Finding]) -> str:
    """Give the first thing that is wrong or unknown, and how many more there are; empty if there is none."""
    wrong = [finding for finding in found if finding.level in (Level.FAIL, Level.UNKNOWN)]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{wrong[0].title}{more}" if wrong else ""


def how_far(ranks: Sequence[RankResult], stages: Sequence[str]) -> str:
    """Say which ranks had reached which stage."""
    reached = [(stage, [rank.rank for rank in ranks if rank.stage == stage]) for stage in stages]
    return ", ".join(f"{name_ranks(group)} had reached {stage}" for stage, group in reached if group)


def payloads(traces: Sequence[RankTimeline], key: str) -> list[Any]:
    """List what the ranks told under this key, in order of rank."""
    told: list[Mapping[str, Any]] = [event.payload for trace in traces for event in trace.events]
    return [payload[key] for payload in told if key in payload]


def started(traces: Sequence[RankTimeline]) -> dict[str, Any]:
    """Give what the first rank that came so far told of its torch and device."""
    return next(iter(payloads(traces, "started")), {})


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
    told = started([trace])
    last = trace.last
    status = _status(trace, parts)
    return RankResult(
        rank=trace.rank,
        local_rank=trace.local_rank,
        host=trace.host,
        pid=trace.pid,
        device=told.get("device"),
        device_name=told.get("device_name"),
        capability=told.get("capability"),
        free_bytes=told.get("free_bytes"),
        total_bytes=told.get("total_bytes"),
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
        return "; ".join(trouble.message or trouble.kind for trouble in mine) or "does not agree with the other ranks"
    return None


def _versions(told: dict[str, Any]) -> Versions:
    return Versions(**{name: told.get(name) for name in ("python", "torch", "cuda", "hip", "nccl")})


_MUCH = 0.2
_OTHERS = 0.5
"""Of such a rank's share: what the others may have at most, or it is the machine that is busy."""


def paused(request: Request, traces: Sequence[RankTimeline], told: Mapping[int, Sequence[PausedTold]]) -> list[Finding]:
    """Name ranks that were stopped, throttled or had no core; `told` is what each of them measured."""
    shares = {rank: _share(those, "paused_ns") for rank, those in told.items() if those}
    # That there is no core for anybody is the machine's business; whoever is stopped or throttled is so by himself.
    stopped = _odd({rank: share - _share(told[rank], "no_core_ns") for rank, share in shares.items()})
    throttled = [rank for rank in stopped if _share(told[rank], "throttled_ns") > shares[rank] / 3]
    named = [trace for trace in traces if trace.rank in (stopped or _odd(shares))]
    if not named:
        return []
    share = median(shares[trace.rank] for trace in named)
    why = "it was stopped" if stopped else "other programs had its cores"
    why = "its CPU quota was used up" if throttled and throttled == stopped else why
    return [
        Finding(
            id=f"{request.command}.rank-paused",
            # A busy machine is no fault of the rank.
            level=Level.FAIL if stopped else Level.WARN,
            title=f"{who(named)} did not run for {share:.0%} of the time: {why}",
            detail="Its best moments are as good as anybody's, so medians and best times do not show it; all others "
            "wait for it.",
            where=where(named),
            evidence=tuple(
                f"rank {rank}: {share:.0%} of the time not running, {_share(told[rank], 'no_core_ns'):.0%} for want of "
                f"a core, {_share(told[rank], 'throttled_ns'):.0%} by a CPU quota"
                for rank, share in sorted(shares.items(), key=lambda entry: -entry[1])[:8]
            ),
            fix=Fix(
                text="see its container's CPU quota (nr_throttled), what sends it signals, and what else runs there",
                commands=(
                    "grep -r nr_throttled /sys/fs/cgroup --include=cpu.stat | grep -v ' 0$'",
                    "ps -eo pid,stat,psr,pcpu,cmd --sort=-pcpu | head -20",
                ),
            ),
        )
    ]


def without_core(told: Mapping[int, Sequence[PausedTold]]) -> float:
    """Return the part of the time that the median rank waited for a core."""
    return median([_share(those, "no_core_ns") for those in told.values() if those] or [0.0])


def _odd(shares: Mapping[int, float]) -> list[int]:
    """List ranks with a large share, if all others have a much smaller one."""
    odd = sorted(rank for rank, share in shares.items() if share > _MUCH)
    others = [share for rank, share in shares.items() if rank not in odd]
    return odd if odd and others and max(others) < _OTHERS * min(shares[rank] for rank in odd) else []


def _share(told: Sequence[PausedTold], key: Literal["paused_ns", "no_core_ns", "throttled_ns"]) -> float:
    return sum(int(one[key]) for one in told) / max(1, sum(one["of_ns"] for one in told))
