"""What `gpu-test --isolate` does with ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.commands.gpu_test.isolate import diagnose
from distdiag.commands.gpu_test.isolate.types import Fault, Isolated, Request
from distdiag.commands.gpu_test.isolate.view import isolate_view
from distdiag.errors import UsageError
from distdiag.launch import runner
from distdiag.launch.record import Job
from distdiag.launch.types import Device

if TYPE_CHECKING:
    from distdiag.cluster.launch_commands import Recipe
    from distdiag.launch.record import Allocation, Plan, SavedRun
    from distdiag.runner import Subcommand

_ITERATIONS = 4
_PAIR_TIMEOUT_S = {Device.CPU: 3.0, Device.CUDA: 15.0}
"""For all of a pair's work. NCCL makes its connections in it, which takes seconds."""
_LEAST_TIMEOUT_S = {Device.CPU: 1.5, Device.CUDA: 5.0}
"""Once pairs have worked, the others may take five times as long as the slowest of them, and so long at least."""
_PAUSE_S = 0.25
"""Before each time that slow pairs are measured again: other programs make noise in spells, which must not last
through all samples of a pair. A second or two in all, and only if something is slow."""
_LAG_S = 0.05
_LEAST_BYTES = 4096


def job_of(request: Request) -> Job[Request, Isolated]:
    """Return what the ranks run and how it is diagnosed. Raises UsageError where the request contradicts itself."""
    if request.size_bytes is not None and request.size_bytes < _LEAST_BYTES:
        raise UsageError("--size is too small to measure bandwidth", hint="leave it out, or use 1MiB or more")
    return Job(
        request=request,
        rank="distdiag.commands.gpu_test.isolate.rank",
        config=_config,
        diagnose=diagnose.diagnose,
        no_data=diagnose.no_data,
    )


def _config(request: Request, plan: Plan, share: Allocation, rank: int) -> dict[str, Any]:
    return {
        "size_bytes": diagnose.size_for(request, plan),
        "nodes": plan.machines,
        "iterations": _ITERATIONS,
        "at_once": max(1, (share.cpus or 2) // 2) if plan.device is Device.CPU else None,
        "least_timeout_s": _LEAST_TIMEOUT_S[plan.device],
        "pause_s": _PAUSE_S,
        "pair_timeout_s": min(_PAIR_TIMEOUT_S[plan.device], request.timeout_s),
        "fault": None if request.fault is None else _fault(request.fault, plan.nproc),
    }


def _fault(fault: Fault, nproc: int) -> dict[str, Any]:
    hit = [[a, b] for a in range(nproc) for b in range(a + 1, nproc) if fault.meets(a, b)]
    if not hit and nproc > 1:
        raise UsageError(
            f"--inject {fault.option} affects no pair of {nproc} ranks", hint="name some of the ranks, not all"
        )
    slow = fault.kind == "slow"
    return {
        "dropped": [] if slow else hit,
        "slow": hit if slow else [],
        "slow_ranks": list(fault.first) or list(range(nproc)),
        "lag_s": _LAG_S,
    }


def subcommand(recipe: Recipe | None) -> Subcommand[Request, SavedRun, Isolated]:
    """Return the command. `recipe`: the launcher whose launch commands are printed instead of a test."""
    return runner.subcommand(
        "gpu-test", Request, job_of, lambda _, report: isolate_view(report), recipe, saved_as="gpu-test --isolate"
    )
