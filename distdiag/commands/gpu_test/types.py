"""What gpu-test is asked for, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from distdiag.launch import types

STAGES = ("start", "connect", "init", "agree", "reduce", "memory", "done")
STAGELESS = ("corrupt", "dtype", "no-import")
"""Faults that have their own place."""
SIZE_BYTES = 64 * 2**20


class FaultKind(StrEnum):
    """Real faults that `--inject` causes."""

    KILL = "kill"
    STOP = "stop"
    LATE = "late"
    CORRUPT = "corrupt"
    DTYPE = "dtype"
    NO_IMPORT = "no-import"


@dataclass(frozen=True, kw_only=True)
class Fault(types.RankFault):
    """A fault to inject into one rank; in `stage` where the kind allows any."""

    stage: str

    @property
    def at(self) -> tuple[str, str]:
        """The stage, where there is a choice."""
        return ("", "") if self.kind in STAGELESS else (self.stage, f"stage {self.stage}")


@dataclass(frozen=True, kw_only=True)
class Request(types.Request):
    """What was typed."""

    command = "gpu-test"
    stages = STAGES
    size_bytes: int = SIZE_BYTES
    memory_fraction: float | None = None
    fault: Fault | None = None

    @property
    def injected(self) -> Fault | None:
        """The fault to inject."""
        return self.fault

    def own_options(self) -> dict[str, object]:
        """Options of gpu-test alone that differ from their defaults."""
        return {"size": self.size_bytes if self.size_bytes != SIZE_BYTES else None, "memory": self.memory_fraction}

    def less(self) -> dict[str, str]:
        """Options that send less data."""
        return {"size": "1MiB"}


@dataclass(frozen=True, kw_only=True)
class GpuTest(types.RunFacts):
    """The facts of one run; `arch_list` is what torch was compiled for, empty on the CPU."""

    size_bytes: int
    memory_bytes: int | None
    """Written and read back by each rank, the smallest; None if no rank got that far."""
    arch_list: tuple[str, ...]
