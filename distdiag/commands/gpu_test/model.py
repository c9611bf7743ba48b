"""What gpu-test is asked, what it decides to do, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.cluster.targets import Cluster

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.cluster.launch import Outcome, Trace
    from distdiag.cluster.meeting import Meeting
    from distdiag.cluster.rows import Refusal, Row
    from distdiag.commands.gpu_test.collect import NodeFacts

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
    """How a rank fared. LOST: its node went away. WAITING: another rank kept it from going on."""

    OK = "ok"
    FAILED = "failed"
    DIED = "died"
    MISSING = "missing"
    LOST = "lost"
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
    master_addr: str = ""
    ifname: str = ""
    nccl_debug: bool = False
    fault: Fault | None = None
    strict: bool = False
    cluster: Cluster = field(default_factory=Cluster)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A node that ranks can run on: its name in the fleet, what to call it, and its facts."""

    node: str
    host: str
    slots: int | None
    facts: NodeFacts
    local: tuple[int, int] | None = None
    """Local rank and local world size of a process that a launcher started; None where we start the ranks."""
    door: str = ""
    """The node of the same machine that tries the ways to other machines, if it is another one."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The ranks of one node."""

    node: str
    host: str
    first_rank: int
    nproc: int
    memory_bytes: int
    """For each rank, on the CPU."""
    sharing: int
    """Ranks on one GPU."""
    first_local_rank: int
    local_world_size: int
    door: str
    """See Place."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be run, on which nodes; ranks are numbered node by node."""

    shares: tuple[Share, ...]
    backend: Backend
    device: Device
    memory_fraction: float
    """Of each GPU's free memory."""

    @property
    def nproc(self) -> int:
        """Ranks in all."""
        return sum(share.nproc for share in self.shares)


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
    log_dirs: dict[str, str]
    """Host -> directory there, with --nccl-debug."""
    hosts: tuple[Row, ...]
    rendezvous: Rendezvous | None
    """None on one node: its ranks meet at 127.0.0.1."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks met, and through which interface each node went."""

    host: str
    address: str
    port: int
    interfaces: dict[str, str]
    ways_tried: int
    ways_open: int


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is known before ranks start: a row for each host, who cannot be used and why, and the nodes' facts."""

    places: tuple[Place, ...]
    rows: tuple[Row, ...] = ()
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()
    twins: tuple[tuple[str, str], ...] = ()
    """(left out, kept): two names of one machine."""
    many: bool = False
    """Whether hosts were asked for; else it is this machine alone."""


@dataclass(frozen=True)
class Course:
    """How the run went: its end, every rank's trace in order of rank, and how long nobody took a step at the end."""

    outcome: Outcome
    traces: list[Trace]
    log_dirs: Mapping[str, str]
    """By host."""
    stalled_s: float
    meeting: Meeting | None = None
    lost: Mapping[str, Refusal] = field(default_factory=dict)
