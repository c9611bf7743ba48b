"""What gpu-test does with ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.commands.gpu_test import diagnose
from distdiag.commands.gpu_test.types import GpuTest, Request, compute_config
from distdiag.commands.gpu_test.view import gpu_test_view
from distdiag.errors import UsageError
from distdiag.launch import runner
from distdiag.launch.record import Job

if TYPE_CHECKING:
    from distdiag.cluster.launch_commands import Recipe
    from distdiag.launch.record import Allocation, Plan, SavedRun
    from distdiag.runner import Subcommand

_MEMORY_ON_CPU_BYTES = 64 * 2**20
_MEMORY_FRACTION = 0.5
_FLOAT_BYTES = 4


def job_of(request: Request) -> Job[Request, GpuTest]:
    """Return what the ranks run and how it is diagnosed. Raises UsageError where the request contradicts itself."""
    if request.size_bytes < _FLOAT_BYTES:
        raise UsageError("--size is smaller than one float32 element", hint="use at least 4 bytes")
    return Job(
        request=request,
        rank="distdiag.commands.gpu_test.rank",
        config=_config,
        diagnose=diagnose.diagnose,
        no_data=diagnose.no_data,
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
