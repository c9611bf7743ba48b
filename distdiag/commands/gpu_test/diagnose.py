"""The job of gpu-test on the ranks, and the Report from their outcomes. `diagnose` is pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.gpu_test import compute_findings
from distdiag.commands.gpu_test.types import SIZE_BYTES, GpuTest, Request, compute_config
from distdiag.commands.gpu_test.view import gpu_test_view
from distdiag.errors import UsageError
from distdiag.launch import rank_report, runner
from distdiag.launch.record import Job
from distdiag.launch.types import Device
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.launch.record import Allocation, Inventory, Plan, RunRecord, SavedRun
    from distdiag.report import Finding, Report
    from distdiag.runner import Subcommand

_MEMORY_ON_CPU_BYTES = 64 * 2**20
_MEMORY_FRACTION = 0.5
_FLOAT_BYTES = 4


def job_of(request: Request) -> Job[Request, GpuTest]:
    """Return the job of the ranks and its diagnosis. Raises UsageError for contradictory options."""
    if request.size_bytes is not None and request.size_bytes < _FLOAT_BYTES:
        raise UsageError("--size is smaller than one float32 element", hint="use at least 4 bytes")
    return Job(
        request=request,
        rank="distdiag.commands.gpu_test.rank",
        config=_config,
        diagnose=diagnose,
        data=GpuTest,
    )


def _config(request: Request, plan: Plan, share: Allocation, rank: int) -> dict[str, object]:
    memory = _MEMORY_ON_CPU_BYTES
    if request.memory_fraction is not None and share.memory_available_bytes is not None:
        memory = int(share.memory_available_bytes * request.memory_fraction / share.local_world_size)
    return {
        "size_bytes": request.size_bytes or SIZE_BYTES,
        "memory_bytes": memory,
        "memory_fraction": request.memory_fraction or _MEMORY_FRACTION,
        **compute_config(request.compute_s, plan, share),
        "fault": _fault_for(request, rank),
    }


def _fault_for(request: Request, rank: int) -> dict[str, object] | None:
    fault = request.fault
    if fault is None or rank not in fault.ranks:
        return None
    return {"kind": fault.kind, "stage": fault.place, "seconds": 2 * request.timeout_s + 5}


def subcommand() -> Subcommand[Request, SavedRun, GpuTest]:
    """Return the command."""
    return runner.subcommand("gpu-test", Request, job_of, lambda _, report: gpu_test_view(report))


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
        **vars(rank_report.facts_of(request, scene, plan, course)),
        size_bytes=request.size_bytes or SIZE_BYTES,
        memory_bytes=min(rank_report.payloads(course.traces, "memory_bytes"), default=None),
        arch_list=tuple(rank_report.started(course.traces).get("arch_list") or ()),
        computed=computed,
    )
    return rank_report.concluded(request, scene, course.outcome, data, found, passed=lambda hosts: _passed(data, hosts))


def _paused(request: Request, course: RunRecord) -> list[Finding]:
    """Report ranks that waited for a core while computing; in a test of seconds this is a remark."""
    found = rank_report.paused(request, course.traces)
    return [replace(each, level=Level.INFO) if each.level is Level.WARN else each for each in found]


def _passed(data: GpuTest, hosts: str) -> str:
    on = rank_report.ran_on(data.backend, "GPU" if data.device is Device.CUDA else data.device)
    who, tested = ("1 rank", "startup, memory")
    if data.world_size > 1:
        who, tested = (f"{data.world_size} ranks", "communication, all_reduce, memory")
    return f"{who} on {hosts} passed: {tested}{', computing' if data.computed else ''} ({on})"
