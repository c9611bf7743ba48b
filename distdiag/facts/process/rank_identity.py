"""A process's place in a distributed job: rank and sizes from the launchers' environment variables.

Sources of the variable names: the documentation of torchrun, SLURM's srun, Open MPI, MPICH/Hydra, Intel MPI, MVAPICH2,
Flux and LSF's jsrun. Precedence: torchrun runs inside any other launcher, so it is first; a SLURM step with PMI
variables is still SLURM (`srun --mpi=pmi2` sets both).
"""

from __future__ import annotations

import os
import sys

from distdiag.facts import machine
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


@record
class Identity:
    """One process's place in its job; None if unknown to the launcher."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None


@record
class _Names:
    launcher: str
    present_if: tuple[str, ...]
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_MPIRUNS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "orterun", "prterun")
_LAUNCHERS = (
    _Names("torchrun", ("TORCHELASTIC_RUN_ID",), "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Names(
        "Open MPI",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names(
        "MVAPICH2",
        ("MV2_COMM_WORLD_SIZE",),
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names(
        "jsrun",
        ("JSM_NAMESPACE_SIZE",),
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    _Names("Flux", ("FLUX_TASK_RANK",), "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    # Both are needed: the batch script of sbatch has SLURM_PROCID=0 too, but is not a rank.
    _Names("srun", ("SLURM_STEP_ID", "SLURM_PROCID"), "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
    _Names("MPICH", ("PMI_RANK",), "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("environment", ("RANK", "WORLD_SIZE"), "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)


def identify(environ: Mapping[str, str]) -> Identity | None:
    """Read this process's place in a job from its environment; None without a launcher's variables."""
    return next(iter(identify_all(environ)), None)


def identify_all(environ: Mapping[str, str]) -> list[Identity]:
    """Read the place according to every launcher with variables set, the most reliable first."""
    found = []
    for names in _LAUNCHERS:
        if not all(name in environ for name in names.present_if):
            continue
        rank = _number(environ.get(names.rank))
        world_size = _number(environ.get(_world_size_name(names, environ)))
        if rank is None or world_size is None:
            continue
        local_world_size = _number(environ.get(names.local_world_size))
        if names.launcher == "srun":
            local_world_size = slurm_tasks_here(environ)
        local_rank = _number(environ.get(names.local_rank))
        found.append(Identity(names.launcher, rank, world_size, local_rank, local_world_size))
    return found


def torch_distributed() -> Any:  # noqa: ANN401 - a module that is not ours to import
    """Return torch.distributed if this process has initialised its default process group, else None."""
    dist = sys.modules.get("torch.distributed")
    # During its import, or in a build without it, the functions are missing.
    ready = getattr(dist, "is_initialized", None)
    return dist if ready is not None and ready() else None


def own_rank() -> int | None:
    """Return this process's rank: torch.distributed's, else the launcher's; None without either."""
    dist = torch_distributed()
    if dist is not None:
        return int(dist.get_rank())
    identity = identify(os.environ)
    return None if identity is None else identity.rank


def own_label() -> str:
    """Format this process for a line of output: `[node07:3]`, with its pid before it has a rank."""
    rank = own_rank()
    return f"[{machine.host_name()}:{f'pid {os.getpid()}' if rank is None else rank}]"


def contradiction(environ: Mapping[str, str]) -> tuple[Identity, Identity] | None:
    """Find RANK and WORLD_SIZE that contradict the launcher: (the launcher's, theirs).

    A training script mostly reads those two, so each process would assume a wrong rank.
    """
    found = identify_all(environ)
    plain = [identity for identity in found if identity.launcher == "environment"]
    if not plain or found[0].launcher in ("environment", "torchrun"):
        return None
    differs = (plain[0].rank, plain[0].world_size) != (found[0].rank, found[0].world_size)
    return (found[0], plain[0]) if differs else None


def nested_tasks(environ: Mapping[str, str], ancestors: Sequence[str]) -> int:
    """Count the srun tasks that each run an mpirun of their own; 0 if not nested this way.

    `ancestors`: names of this process's ancestors, the nearest first. The reverse, an mpirun in a batch script that
    starts its daemons by srun, is fine: slurmstepd is then right above the daemon.
    """
    names = [name for name in ancestors if name in _MPIRUNS or name.startswith("slurmstepd")]
    if len(names) < 2 or names[0] not in _MPIRUNS or not names[1].startswith("slurmstepd"):
        return 0
    tasks = _number(environ.get("SLURM_STEP_NUM_TASKS")) or _number(environ.get("SLURM_NTASKS")) or 1
    return tasks if tasks > 1 and "SLURM_STEP_ID" in environ else 0


def slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Parse this node's number of tasks from SLURM's "2(x2),1" form; None if missing."""
    node = _number(environ.get("SLURM_NODEID"))
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if node is None or not text:
        return None
    for part in text.split(","):
        tasks, _, times = part.partition("(x")
        count = _number(times.rstrip(")")) if times else 1
        if count is None:
            return None
        if node < count:
            return _number(tasks)
        node -= count
    return None


def _world_size_name(names: _Names, environ: Mapping[str, str]) -> str:
    # In a step with fewer tasks SLURM_NTASKS is still the allocation's; the step's own number is right.
    if names.launcher == "srun" and "SLURM_STEP_NUM_TASKS" in environ:
        return "SLURM_STEP_NUM_TASKS"
    return names.world_size


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None
