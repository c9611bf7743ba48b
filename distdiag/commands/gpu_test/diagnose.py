"""The job of gpu-test on the ranks, and the Report from their outcomes. `diagnose` is pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold_within
from distdiag.cluster.rank_runs import Outcome
from distdiag.commands.gpu_test import compute_findings
from distdiag.commands.gpu_test.types import STAGES, GpuTest, Request, compute_config
from distdiag.commands.gpu_test.view import gpu_test_view
from distdiag.errors import UsageError
from distdiag.launch import rank_report, runner
from distdiag.launch.record import Job
from distdiag.launch.types import Device
from distdiag.report import Level, Report

if TYPE_CHECKING:
    from distdiag.cluster.launch_commands import Recipe
    from distdiag.launch.record import Allocation, Inventory, NotStarted, Plan, RunRecord, SavedRun
    from distdiag.report import Finding
    from distdiag.runner import Subcommand

_MEMORY_ON_CPU_BYTES = 64 * 2**20
_MEMORY_FRACTION = 0.5
_FLOAT_BYTES = 4


def job_of(request: Request) -> Job[Request, GpuTest]:
    """Return the job of the ranks and its diagnosis. Raises UsageError for contradictory options."""
    if request.size_bytes < _FLOAT_BYTES:
        raise UsageError("--size is smaller than one float32 element", hint="use at least 4 bytes")
    return Job(
        request=request,
        rank="distdiag.commands.gpu_test.rank",
        config=_config,
        diagnose=diagnose,
        no_data=no_data,
    )


def _config(request: Request, plan: Plan, share: Allocation, rank: int) -> dict[str, Any]:
    memory = _MEMORY_ON_CPU_BYTES
    if request.memory_fraction is not None and share.memory_available_bytes is not None:
        memory = int(share.memory_available_bytes * request.memory_fraction / share.local_world_size)
    return {
        "size_bytes": request.size_bytes,
        "memory_bytes": memory,
        "memory_fraction": request.memory_fraction or _MEMORY_FRACTION,
        **compute_config(request.compute_s, plan, share),
        "fault": _fault_for(request, rank),
    }


def _fault_for(request: Request, rank: int) -> dict[str, object] | None:
    fault = request.fault
    if fault is None or fault.rank != rank:
        return None
    return {"kind": fault.kind, "stage": fault.stage, "seconds": 2 * request.timeout_s + 5}


def subcommand(recipe: Recipe | None) -> Subcommand[Request, SavedRun, GpuTest]:
    """Return the command. `recipe`: the launcher whose launch commands are printed instead of a test."""
    return runner.subcommand("gpu-test", Request, job_of, lambda _, report: gpu_test_view(report), recipe)


def diagnose(request: Request, scene: Inventory, plan: Plan, course: RunRecord) -> Report[GpuTest]:
    """Return the report of a run."""
    computed = {
        trace.rank: event.payload["computed"]
        for trace in course.traces
        for event in trace.events
        if "computed" in event.payload
    }
    found = [
        *rank_report.findings_of(request, scene, plan, course),
        *compute_findings.findings_of(computed, course.traces, request),
        *_paused(request, course),
    ]
    data = GpuTest(
        **rank_report.facts_of(request, scene, plan, course),
        size_bytes=request.size_bytes,
        memory_bytes=min(rank_report.payloads(course.traces, "memory_bytes"), default=None),
        arch_list=tuple(rank_report.started(course.traces).get("arch_list") or ()),
        computed=computed,
    )
    interrupted = course.outcome is Outcome.INTERRUPTED
    return Report(
        command="gpu-test",
        data=data,
        findings=tuple(found),
        summary=_interrupted(data, found) if interrupted else _summary(found, scene, plan, computed=bool(computed)),
        interrupted=interrupted,
    )


def no_data(request: Request, why: NotStarted, facts: dict[str, Any]) -> GpuTest:
    """Return the facts of a run that started no ranks."""
    return GpuTest(**facts, size_bytes=request.size_bytes, memory_bytes=None, arch_list=(), computed={})


def _paused(request: Request, course: RunRecord) -> list[Finding]:
    """Report ranks that waited for a core while computing; in a test of seconds this is a remark."""
    pauses = {trace.rank: rank_report.payloads([trace], "paused") for trace in course.traces}
    found = rank_report.paused(request, course.traces, pauses)
    return [replace(each, level=Level.INFO) if each.level is Level.WARN else each for each in found]


def _summary(found: list[Finding], scene: Inventory, plan: Plan, *, computed: bool) -> str:
    if wrong := rank_report.worst_of(found):
        return wrong
    on = rank_report.ran_on(plan.backend, "GPU" if plan.device is Device.CUDA else plan.device)
    who, tested = ("1 rank", "startup, memory")
    if plan.nproc > 1:
        who, tested = (f"{plan.nproc} ranks", "communication, all_reduce, memory")
    tested += ", computing" if computed else ""
    warnings = "".join(f"; but {finding.title}" for finding in found if finding.level is Level.WARN)
    where = fold_within((place.host for place in scene.places), 160)
    return f"{who} on {where} passed: {tested} ({on}){warnings}"


def _interrupted(data: GpuTest, found: list[Finding]) -> str:
    wrong = [finding.title for finding in found if finding.level in (Level.FAIL, Level.UNKNOWN)]
    return f"interrupted; {wrong[0] if wrong else rank_report.how_far(data.ranks, STAGES)}"
