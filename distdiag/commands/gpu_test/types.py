"""The request of gpu-test, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.facts.computed import Computed  # noqa: TC001 - the schema reads the annotations
from distdiag.launch import types

if TYPE_CHECKING:
    from distdiag.launch.record import Allocation, Plan

STAGES = ("start", "connect", "init", "agree", "reduce", "memory", "compute", "done")
STAGELESS = ("corrupt", "dtype", "no-import", "slow-compute", "wrong-compute")
"""Faults with a fixed stage."""
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


def compute_options(seconds: float | None) -> dict[str, object]:
    """Return the options that set these seconds."""
    return {"compute": f"{seconds:g}s" if seconds else None, "no-compute": "" if seconds == 0 else None}


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


@dataclass(frozen=True, kw_only=True)
class Fault(types.RankFault):
    """A fault to inject into one rank; in `stage` if the kind allows any."""

    stage: str

    @property
    def at(self) -> tuple[str, str]:
        """The stage, for kinds that take one."""
        return ("", "") if self.kind in STAGELESS else (self.stage, f"stage {self.stage}")


@dataclass(frozen=True, kw_only=True)
class Request(types.Request):
    """The options of one run."""

    command = "gpu-test"
    stages = STAGES
    size_bytes: int = SIZE_BYTES
    memory_fraction: float | None = None
    compute_s: float | None = None
    """Time of each round of the stage compute; None for COMPUTE_S, 0 skips it."""
    fault: Fault | None = None

    @property
    def injected(self) -> Fault | None:
        """The fault to inject."""
        return self.fault

    def own_options(self) -> dict[str, object]:
        """Options of gpu-test alone that differ from their defaults."""
        return {
            "size": self.size_bytes if self.size_bytes != SIZE_BYTES else None,
            "memory": self.memory_fraction,
            **compute_options(self.compute_s),
        }

    def less(self) -> dict[str, str]:
        """Options that send less data."""
        return {"size": "1MiB"}


@dataclass(frozen=True, kw_only=True)
class GpuTest(types.RunFacts):
    """The facts of one run; `arch_list`: the GPU architectures torch was compiled for, empty on the CPU."""

    size_bytes: int = 0
    memory_bytes: int | None = None
    """Smallest amount of memory written and read back by a rank; None if no rank completed it."""
    arch_list: tuple[str, ...] = ()
    computed: dict[int, Computed] = field(default_factory=dict)
    """By rank, for ranks that completed the stage compute."""
