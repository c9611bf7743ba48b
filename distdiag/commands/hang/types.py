"""What hang is asked, what one node reports, and its answer as --json prints it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.hang.collect import SourceEnd  # noqa: TC001
from distdiag.facts.blocked_threads import Blocked  # noqa: TC001
from distdiag.facts.flight_recorder.collect import NodeDumps  # noqa: TC001
from distdiag.facts.job_logs.collect import NodeLogs  # noqa: TC001
from distdiag.facts.job_output import Bar  # noqa: TC001
from distdiag.facts.kernel_signs import KernelSigns  # noqa: TC001
from distdiag.facts.mapped_versions import MappedVersions  # noqa: TC001
from distdiag.facts.nccl_ras import RasFacts  # noqa: TC001
from distdiag.facts.socket_owners import Network, Person  # noqa: TC001
from distdiag.jobs.collect import Processes, Watched  # noqa: TC001
from distdiag.jobs.types import JobSummary  # noqa: TC001

COMMAND = "hang"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which job was asked for; empty: whatever is there."""

    job: str = ""
    pids: tuple[int, ...] = ()
    user: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. `logs` and `recorder` are paths on the hosts; `light`: read only /proc.

    `ranks_only`: leave out Python processes that have loaded torch and are no rank.
    """

    program: str
    cluster: Cluster
    wanted: Wanted = Wanted()
    logs: tuple[str, ...] = ()
    recorder: tuple[str, ...] = ()
    timeout_s: float = 30.0
    interval_s: float = 1.0
    light: bool = False
    ranks_only: bool = False
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeHang:
    """The facts of one node, of all sources; `missing`: why they are not complete."""

    host: str
    processes: Processes
    watched: tuple[Watched, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    networks: tuple[Network, ...] = ()
    people: tuple[Person, ...] = ()
    logs: tuple[NodeLogs, ...] = ()
    bars: tuple[Bar, ...] = ()
    dumps: tuple[NodeDumps, ...] = ()
    ras: tuple[RasFacts, ...] = ()
    kernel: tuple[KernelSigns, ...] = ()
    versions: tuple[MappedVersions, ...] = ()
    ended: tuple[SourceEnd, ...] = ()
    missing: str = ""


class Source(StrEnum):
    """Who is asked."""

    STACKS = "stacks"
    WAITS = "waits"
    RAS = "ras"
    RECORDER = "recorder"
    LOG = "log"
    KERNEL = "kernel"
    VERSIONS = "versions"


class HangClass(StrEnum):
    """What is wrong. The id of the finding is "hang." and this."""

    NOT_IN_COLLECTIVE = "not-in-collective"
    RENDEZVOUS = "rendezvous"
    EXITED = "exited"
    STOPPED = "stopped"
    DIFFERENT_COLLECTIVES = "different-collectives"
    SIZE_MISMATCH = "size-mismatch"
    BEHIND = "behind"
    DEADLOCK = "deadlock"
    DEVICE = "device-stuck"
    NETWORK = "network"
    STORAGE = "storage"
    DATA = "data-loading"
    COMPILE = "compile"
    BUSY = "busy-rank"
    LOCK = "lock"
    DEBUGGER = "debugger"
    RESTART = "elastic-restart"
    SLOW = "slow"
    OUTSIDE = "outside-the-job"
    KNOWN_BUG = "known-bug"
    NOT_HUNG = "not-hung"
    UNKNOWN = "unknown"


class Stand(StrEnum):
    """What a source says to the verdict."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    CANNOT_TELL = "cannot tell"
    NOT_AVAILABLE = "not available"


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """One source: how it stands to the verdict, what it says, whom it accuses, and what would make it say more."""

    source: Source
    stand: Stand
    says: str
    ranks: tuple[int, ...] = ()
    hint: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HangRank:
    """One rank. `doing`: class of its stack; `frames`: innermost first; `waits_for`: the rank it waits for, if known.

    `since_s`: how long its main thread has not run. `recorder`: what its flight recorder says it waits in.
    """

    host: str
    rank: int | None
    local_rank: int | None
    pid: int | None
    job: str
    doing: str
    stuck: str
    moving: bool | None
    since_s: float | None
    waits: str
    waits_for: int | None
    counters: dict[str, int]
    frames: tuple[str, ...]
    recorder: str = ""
    recent: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The facts of the answer. `class_name`: of HangClass; `candidates`: if that is unknown, what it may be."""

    class_name: HangClass
    ranks: tuple[int, ...]
    candidates: tuple[str, ...]
    next_experiment: str
    sources: tuple[SourceRow, ...]
    jobs: tuple[JobSummary, ...]
    processes: tuple[HangRank, ...]
