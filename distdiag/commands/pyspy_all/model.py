"""The types of pyspy-all: what is asked, who is who in a job, and the answer. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.cluster.targets import Cluster

if TYPE_CHECKING:
    from distdiag.commands.pyspy_all.collect import Process, Watched
    from distdiag.node.capture import Frame

COMMAND = "pyspy-all"


class FrameClass(StrEnum):
    """What a thread is doing, as far as its frames and the kernel tell."""

    COMM = "communication wait"
    DATA = "data loading"
    STORAGE = "storage"
    NETWORK = "network"
    COMPUTE = "compute"
    CUDA_SYNC = "cuda sync"
    COMPILE = "compile"
    CHECKPOINT = "checkpoint"
    LOCK = "lock"
    GIL = "gil"
    TEARDOWN = "teardown"
    IMPORT = "import"
    PYTHON = "python"
    STOPPED = "stopped"
    EXITED = "exited"
    UNREADABLE = "unreadable"


class Threads(StrEnum):
    """Which threads to show."""

    MAIN = "main"
    ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    program: str
    cluster: Cluster
    pids: tuple[int, ...] = ()
    job: str = ""
    user: str = ""
    native: bool = False
    samples: int = 2
    interval_s: float = 1.0
    threads: Threads = Threads.MAIN
    helpers: bool = False
    tree: bool = False
    verbose: bool = False
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Parallel groups that the user named: ("tp", (0, 1)), ("tp", (2, 3)), ..."""
    timeout_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Helper:
    """A process that works for a rank: a DataLoader worker, a tracker, a compile worker."""

    process: Process
    watched: Watched | None


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank of a job. `rank` is None where nothing says which one it is; `process` is None for a rank that is gone."""

    host: str
    rank: int | None
    local_rank: int | None
    process: Process | None
    watched: Watched | None
    helpers: tuple[Helper, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that was found of one job. `unseen`: ranks of it that were on none of the hosts looked at."""

    name: str
    launcher: str
    world_size: int | None
    members: tuple[Member, ...]
    unseen: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a thread stands: what it is doing, in which operation, and the user's own line that led there."""

    kind: FrameClass
    operation: str
    frame: Frame | None
    is_p2p: bool = False


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One member, judged: where it stands, whether it moves or burns processor time between the looks (None: one look)."""

    member: Member
    site: Site
    frames: tuple[Frame, ...]
    moving: bool | None
    busy: float | None
    counters: tuple[tuple[str, int], ...]
    status: str
    reason: str

    @property
    def rank(self) -> int | None:
        """Its rank, if it has one."""
        return self.member.rank

    @property
    def pid(self) -> int | None:
        """Its process, if there is one."""
        return self.member.process.pid if self.member.process is not None else None

    @property
    def kind(self) -> FrameClass:
        """What it is doing."""
        return self.site.kind
