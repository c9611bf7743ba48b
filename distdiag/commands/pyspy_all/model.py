"""The types of pyspy-all: what is asked, who is who in a job, and the answer. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from distdiag.jobs.model import Member
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
    DEBUGGER = "debugger"
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
class Site:
    """Where a thread stands: what it is doing, in which operation, and the user's own line that led there."""

    kind: FrameClass
    operation: str
    frame: Frame | None
    is_p2p: bool = False


@dataclass(frozen=True, kw_only=True)
class Stance:
    """What the looks at one process say. Shared by all members whose looks are the same object.

    `moving`: it changed between the looks, None after one look; `busy`: the share of a core that its thread used.
    `woke`: how often it went to wait between the looks; `runs`: it was on a processor, or wanted one, in all of them.
    `thread`: the name of the thread that is judged, empty for the main one. `peer`: the rank that the `send` or `recv`
    it is in names. `groups`: its process groups, 0 where that is not known.
    """

    site: Site
    frames: tuple[Frame, ...] = ()
    moving: bool | None = None
    busy: float | None = None
    counters: tuple[tuple[str, int], ...] = ()
    status: str = "ok"
    reason: str = ""
    woke: int = 0
    runs: bool = False
    thread: str = ""
    peer: int | None = None
    groups: int = 0


@dataclass(frozen=True)
class Standing:
    """One member, judged."""

    member: Member
    stance: Stance

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
        return self.stance.site.kind

    @property
    def site(self) -> Site:
        """Where it stands."""
        return self.stance.site

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Its main thread's frames, innermost first."""
        return self.stance.frames

    @property
    def moving(self) -> bool | None:
        """Whether it changed between the looks."""
        return self.stance.moving

    @property
    def busy(self) -> float | None:
        """Share of a core that its main thread used."""
        return self.stance.busy

    @property
    def counters(self) -> tuple[tuple[str, int], ...]:
        """Its loop counters, the outermost loop's first."""
        return self.stance.counters

    @property
    def status(self) -> str:
        """How it could be read."""
        return self.stance.status

    @property
    def reason(self) -> str:
        """Why it could not be read, or stands still for another reason than its code."""
        return self.stance.reason
