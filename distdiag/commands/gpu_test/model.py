"""What gpu-test is asked, what it decides to do, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distdiag.cluster.launch import Outcome, Trace

STAGES = ("start", "connect", "init", "agree", "reduce", "memory", "done")


class Backend(StrEnum):
    """Which library moves the data."""

    AUTO = "auto"
    NCCL = "nccl"
    GLOO = "gloo"


class Device(StrEnum):
    """Where the data lies."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class FaultKind(StrEnum):
    """Faults that `--inject` makes for real."""

    KILL = "kill"
    STOP = "stop"
    LATE = "late"
    CORRUPT = "corrupt"
    DTYPE = "dtype"
    NO_IMPORT = "no-import"


class Status(StrEnum):
    """How a rank fared. WAITING: nothing wrong with it, another rank kept it from going on."""

    OK = "ok"
    FAILED = "failed"
    DIED = "died"
    MISSING = "missing"
    WAITING = "waiting"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to make in one rank; at `stage` where the kind allows any."""

    kind: FaultKind
    rank: int
    stage: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was typed; `program` is how distdiag was called, for commands that paste."""

    program: str = "distdiag"
    nproc: int | None = None
    backend: Backend = Backend.AUTO
    device: Device = Device.AUTO
    timeout_s: float = 30.0
    size_bytes: int = 64 * 2**20
    memory_fraction: float | None = None
    master_port: int = 0
    nccl_debug: bool = False
    fault: Fault | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be run: `nproc` ranks of this backend on this device."""

    nproc: int
    backend: Backend
    device: Device
    memory_bytes: int
    """For each rank, on the CPU."""
    memory_fraction: float
    """Of each GPU's free memory."""
    sharing: int
    """Ranks on one GPU."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions as the ranks report them; None where there is none, or no rank came so far."""

    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    hip: str | None = None
    nccl: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One row of the table."""

    rank: int
    local_rank: int
    host: str
    pid: int | None
    device: str | None
    device_name: str | None
    capability: str | None
    free_bytes: int | None
    total_bytes: int | None
    stage: str
    doing: str
    status: Status
    error: str | None
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class GpuTest:
    """The facts of one run; `arch_list` is what torch was compiled for, empty on the CPU."""

    world_size: int
    backend: str
    device: str
    size_bytes: int
    memory_bytes: int | None
    """Written and read back by each rank, the smallest; None if none came so far."""
    timeout_s: float
    versions: Versions
    arch_list: tuple[str, ...]
    ranks: tuple[RankResult, ...]
    outcome: str
    log_dir: str | None


@dataclass(frozen=True)
class Course:
    """How the run went: its end, every rank's trace in order of rank, and how long nobody took a step at the end."""

    outcome: Outcome
    traces: list[Trace]
    log_dir: str | None
    stalled_s: float
