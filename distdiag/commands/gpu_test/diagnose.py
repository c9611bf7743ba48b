"""Facts of the node and the steps of all ranks -> Report. Pure: the same answer for recorded facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.cluster.launch import Outcome
from distdiag.cluster.reached import summary_of
from distdiag.cluster.ways import way_findings
from distdiag.commands.gpu_test import findings, troubles
from distdiag.commands.gpu_test.blame import blame
from distdiag.commands.gpu_test.model import STAGES, Device, GpuTest, RankResult, Rendezvous, Status, Versions
from distdiag.commands.gpu_test.surroundings import about_hosts, nodes_that_differ, surroundings
from distdiag.commands.gpu_test.words import again
from distdiag.report import Level, Report

if TYPE_CHECKING:
    from distdiag.cluster.launch import Trace
    from distdiag.cluster.meeting import Meeting
    from distdiag.commands.gpu_test.blame import Blame
    from distdiag.commands.gpu_test.model import Course, Plan, Request, Scene
    from distdiag.report import Finding


def diagnose(request: Request, scene: Scene, plan: Plan, course: Course) -> Report[GpuTest]:
    """Say what the run shows."""
    parts = blame(course.outcome, course.traces)
    ranks = tuple(_rank_result(trace, parts) for trace in course.traces)
    found = [
        *_ways(request, course.meeting),
        *findings.unsupported_archs(course.traces),
        *findings.nodes_lost(parts, course.traces, course),
        *findings.died(parts, course.traces, request),
        *findings.missing(parts, course.traces, request, course),
        *troubles.findings_of(parts, course.traces, request),
        *findings.standstill(parts, course.traces, request, course),
        *about_hosts(scene),
        *nodes_that_differ(scene.places, course.traces),
        *surroundings(request, plan, scene.places),
    ]
    interrupted = course.outcome is Outcome.INTERRUPTED
    started = _started(course.traces)
    data = GpuTest(
        world_size=plan.nproc,
        backend=plan.backend,
        device=plan.device,
        size_bytes=request.size_bytes,
        memory_bytes=min(_payloads(course.traces, "memory_bytes"), default=None),
        timeout_s=request.timeout_s,
        versions=_versions(started),
        arch_list=tuple(started.get("arch_list") or ()),
        ranks=ranks,
        outcome=course.outcome,
        log_dirs=dict(course.log_dirs),
        hosts=scene.rows,
        rendezvous=_rendezvous(course.meeting),
    )
    return Report(
        command="gpu-test",
        data=data,
        findings=tuple(found),
        summary=_interrupted(ranks, found) if interrupted else _summary(found, scene, plan),
        interrupted=interrupted,
    )


def not_run(
    request: Request,
    scene: Scene,
    why: list[Finding],
    plan: Plan | None = None,
    meeting: Meeting | None = None,
    *,
    interrupted: bool = False,
) -> Report[GpuTest]:
    """Report why no rank was started."""
    data = GpuTest(
        world_size=plan.nproc if plan else request.nproc or 0,
        backend=plan.backend if plan else request.backend,
        device=plan.device if plan else request.device,
        size_bytes=request.size_bytes,
        memory_bytes=None,
        timeout_s=request.timeout_s,
        versions=Versions(),
        arch_list=(),
        ranks=(),
        outcome="not-run",
        log_dirs={},
        hosts=scene.rows,
        rendezvous=_rendezvous(meeting),
    )
    found = [*why, *_ways(request, meeting), *about_hosts(scene)]
    wrong = [finding for finding in found if finding.level in (Level.FAIL, Level.UNKNOWN)]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    summary = f"{wrong[0].title}{more}" if wrong else "no rank was started"
    if interrupted:
        summary = f"interrupted before any rank was started; hosts: {summary_of(scene.rows)}"
    return Report(command="gpu-test", data=data, findings=tuple(found), summary=summary, interrupted=interrupted)


def _ways(request: Request, meeting: Meeting | None) -> list[Finding]:
    if meeting is None:
        return []
    return way_findings("gpu-test", meeting, lambda extra: again(request, extra=extra))


def _rendezvous(meeting: Meeting | None) -> Rendezvous | None:
    if meeting is None:
        return None
    return Rendezvous(
        host=meeting.hosts[meeting.head],
        address=meeting.address,
        port=meeting.port,
        interfaces={meeting.hosts[node]: name for node, name in meeting.interfaces.items()},
        ways_tried=len(meeting.paths),
        ways_open=sum(path.probe.verdict in ("ok", "lossy") for path in meeting.paths),
    )


def _rank_result(trace: Trace, parts: Blame) -> RankResult:
    started = _started([trace])
    last = trace.last
    status = _status(trace, parts)
    return RankResult(
        rank=trace.rank,
        local_rank=trace.local_rank,
        host=trace.host,
        pid=trace.pid,
        device=started.get("device"),
        device_name=started.get("device_name"),
        capability=started.get("capability"),
        free_bytes=started.get("free_bytes"),
        total_bytes=started.get("total_bytes"),
        stage=last.stage if last is not None else STAGES[0],
        doing=last.note if last is not None else "starting Python",
        status=status,
        error=_error(trace, parts, status),
        elapsed_s=trace.ending.elapsed_s if trace.ending else last.elapsed_s if last is not None else 0.0,
    )


def _status(trace: Trace, parts: Blame) -> Status:
    if trace.rank in parts.lost:
        return Status.LOST
    if trace.rank in parts.died:
        return Status.DIED
    if trace.rank in parts.missing:
        return Status.MISSING
    if trace.rank in troubles.failed_ranks(parts):
        return Status.FAILED
    return Status.OK if trace.finished else Status.WAITING


def _error(trace: Trace, parts: Blame, status: Status) -> str | None:
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


def _started(traces: list[Trace]) -> dict[str, Any]:
    return next(iter(_payloads(traces, "started")), {})


def _payloads(traces: list[Trace], key: str) -> list[Any]:
    return [event.payload[key] for trace in traces for event in trace.events if key in event.payload]


def _versions(started: dict[str, Any]) -> Versions:
    return Versions(**{name: started.get(name) for name in ("python", "torch", "cuda", "hip", "nccl")})


def _summary(found: list[Finding], scene: Scene, plan: Plan) -> str:
    wrong = [finding for finding in found if finding.level in (Level.FAIL, Level.UNKNOWN)]
    if wrong:
        return wrong[0].title + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
    kind = "GPU" if plan.device is Device.CUDA else "CPU"
    who = f"{plan.nproc} ranks" if plan.nproc > 1 else "1 rank"
    done = (
        "talk to each other, reduce correctly and hold their memory" if plan.nproc > 1 else "works and holds its memory"
    )
    warnings = "".join(f"; but {finding.title}" for finding in found if finding.level is Level.WARN)
    where = fold(dict.fromkeys(place.host for place in scene.places))
    return f"{who} on {where} {done} ({plan.backend}, {kind}){warnings}"


def _interrupted(ranks: tuple[RankResult, ...], found: list[Finding]) -> str:
    wrong = [finding.title for finding in found if finding.level in (Level.FAIL, Level.UNKNOWN)]
    if wrong:
        return f"interrupted; {wrong[0]}"
    reached = [(stage, [rank.rank for rank in ranks if rank.stage == stage]) for stage in STAGES]
    return "interrupted; " + ", ".join(f"{name_ranks(group)} had reached {stage}" for stage, group in reached if group)
