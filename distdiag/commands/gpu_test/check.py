"""What gpu-test does with ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.commands.gpu_test import diagnose
from distdiag.errors import UsageError
from distdiag.workload import carry_out
from distdiag.workload.carry_out import Job

if TYPE_CHECKING:
    from distdiag.cluster.recipes import Recipe
    from distdiag.commands.gpu_test.model import GpuTest, Request
    from distdiag.deliver import Progress
    from distdiag.report import Report
    from distdiag.workload.model import Plan, Share

_MEMORY_ON_CPU_BYTES = 64 * 2**20
_MEMORY_FRACTION = 0.5
_FLOAT_BYTES = 4


def check(request: Request, progress: Progress) -> Report[GpuTest]:
    """Test the ranks of this node, or of all nodes that are asked for.

    Raises:
        UsageError: the request contradicts itself or the machine.
        DistdiagError: the node side failed, or the logs asked for cannot be kept.
    """
    return carry_out.carry_out(_job(request), progress)


def explain(request: Request, recipe: Recipe | None) -> list[str]:
    """Write how the hosts would be reached, or the lines that start the test under a launcher."""
    return carry_out.explain(_job(request), recipe)


def _job(request: Request) -> Job[Request, GpuTest]:
    if request.size_bytes < _FLOAT_BYTES:
        raise UsageError("--size is less than one float32 element", hint="give at least 4 bytes")
    return Job(
        request=request,
        rank="distdiag.commands.gpu_test.rank",
        config=_config,
        diagnose=diagnose.diagnose,
        not_run=diagnose.not_run,
    )


def _config(request: Request, plan: Plan, share: Share, rank: int) -> dict[str, Any]:
    memory = _MEMORY_ON_CPU_BYTES
    if request.memory_fraction is not None and share.memory_available_bytes is not None:
        memory = int(share.memory_available_bytes * request.memory_fraction / share.local_world_size)
    return {
        "size_bytes": request.size_bytes,
        "memory_bytes": memory,
        "memory_fraction": request.memory_fraction or _MEMORY_FRACTION,
        "sharing": share.sharing,
        "fault": _fault_for(request, rank),
    }


def _fault_for(request: Request, rank: int) -> dict[str, object] | None:
    fault = request.fault
    if fault is None or fault.rank != rank:
        return None
    return {"kind": fault.kind, "stage": fault.stage, "seconds": 2 * request.timeout_s + 5}
