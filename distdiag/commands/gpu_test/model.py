"""What gpu-test is asked, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from distdiag.workload import model

STAGES = ("start", "connect", "init", "agree", "reduce", "memory", "done")
STAGELESS = ("corrupt", "dtype", "no-import")
"""Faults that have their own place."""
SIZE_BYTES = 64 * 2**20


class FaultKind(StrEnum):
    """Faults that `--inject` makes for real."""

    KILL = "kill"
    STOP = "stop"
    LATE = "late"
    CORRUPT = "corrupt"
    DTYPE = "dtype"
    NO_IMPORT = "no-import"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to make in one rank; at `stage` where the kind allows any."""

    kind: FaultKind
    rank: int
    stage: str


@dataclass(frozen=True, kw_only=True)
class Request(model.Request):
    """What was typed."""

    size_bytes: int = SIZE_BYTES
    memory_fraction: float | None = None
    fault: Fault | None = None

    @property
    def command(self) -> str:
        """The subcommand."""
        return "gpu-test"

    @property
    def stages(self) -> tuple[str, ...]:
        """What every rank goes through."""
        return STAGES

    @property
    def faulty_rank(self) -> int | None:
        """The rank in which a fault is to be made."""
        return None if self.fault is None else self.fault.rank

    @property
    def fault_option(self) -> str | None:
        """The fault as it is typed."""
        if self.fault is None:
            return None
        at = "" if self.fault.kind in STAGELESS else f"@{self.fault.stage}"
        return f"{self.fault.kind}:{self.fault.rank}{at}"

    @property
    def injected(self) -> str:
        """The fault that is made, in words."""
        if self.fault is None:
            return ""
        at = "" if self.fault.kind in STAGELESS else f" in stage {self.fault.stage}"
        return f"the fault {self.fault.kind} was made in rank {self.fault.rank}{at}, as asked"

    def own_options(self) -> dict[str, object]:
        """Options of gpu-test alone that differ from their defaults."""
        return {"size": self.size_bytes if self.size_bytes != SIZE_BYTES else None, "memory": self.memory_fraction}

    def less(self) -> dict[str, str]:
        """Options that send less data."""
        return {"size": "1MiB"}


@dataclass(frozen=True, kw_only=True)
class GpuTest(model.RunFacts):
    """The facts of one run; `arch_list` is what torch was compiled for, empty on the CPU."""

    size_bytes: int
    memory_bytes: int | None
    """Written and read back by each rank, the smallest; None if none came so far."""
    arch_list: tuple[str, ...]
