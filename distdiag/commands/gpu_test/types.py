"""The request of gpu-test, and its result."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from distdiag.facts.gpu.computed import Computed  # noqa: TC001 - the schema reads the annotations
from distdiag.launch import types
from distdiag.record import record

if TYPE_CHECKING:
    from distdiag.launch.record import Allocation, Plan

STAGES = ("start", "connect", "init", "agree", "reduce", "memory", "compute", "done")
SIZE_BYTES = 64 * 2**20
COMPUTE_S = {"cuda": 1.5, "cpu": 0.5}
"""Default time of each round of the stage compute."""


def compute_config(seconds: float | None, plan: Plan, share: Allocation) -> dict[str, object]:
    """Return the part of a rank's config read by `compute.Compute`; `seconds`: as typed."""
    return {
        "sharing": share.sharing,
        "local_world_size": share.local_world_size,
        "compute_s": COMPUTE_S[plan.device] if seconds is None else seconds,
    }


class FaultKind(StrEnum):
    """Real faults that `--inject` causes."""

    KILL = "kill"
    STOP = "stop"
    LATE = "late"
    CORRUPT = "corrupt"
    DTYPE = "dtype"
    NO_IMPORT = "no-import"
    SLOW_COMPUTE = "slow-compute"
    WRONG_COMPUTE = "wrong-compute"


@record(kw_only=True)
class Request(types.Request):
    """The options of one run."""

    command = "gpu-test"
    stages: ClassVar[tuple[str, ...]] = STAGES
    size_bytes: int | None = None
    memory_fraction: float | None = None
    compute_s: float | None = None
    """Time of each round of the stage compute; None for COMPUTE_S, 0 skips it."""

    def own_options(self) -> dict[str, object]:
        """Options of gpu-test alone that differ from their defaults."""
        return {
            "size": self.size_bytes,
            "memory": self.memory_fraction,
            "compute": f"{self.compute_s:g}s" if self.compute_s else None,
            "no-compute": "" if self.compute_s == 0 else None,
        }

    def less(self) -> dict[str, str]:
        """Options that send less data."""
        return {"size": "1MiB"}


@record(kw_only=True)
class GpuTest(types.RunFacts):
    """The facts of one run; `arch_list`: the GPU architectures torch was compiled for, empty on the CPU."""

    size_bytes: int = 0
    memory_bytes: int | None = None
    """Smallest amount of memory written and read back by a rank; None if no rank completed it."""
    arch_list: tuple[str, ...] = ()
    computed: dict[int, Computed] = field(default_factory=dict)
    """By rank, for ranks that completed the stage compute."""
