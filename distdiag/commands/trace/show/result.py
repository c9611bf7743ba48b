"""The types of trace show: runs and their ranks, and the answer. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distdiag.commands.trace.show.collect import Line, Process


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank of a run; `rank` is None where nothing tells it. `helpers` are processes it started: data workers."""

    host: str
    process: Process
    helpers: tuple[Process, ...] = ()

    @property
    def rank(self) -> int | None:
        """Its rank, if it has one."""
        return self.process.rank


@dataclass(frozen=True, kw_only=True)
class Run:
    """The processes that ran at the same time as one job."""

    name: str
    world_size: int | None
    members: tuple[Member, ...]
    began_s: float


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where a member's main thread is, or was when it ended: what the line does, in which call, the user's own line."""

    member: Member
    kind: str
    operation: str
    user: Line | None
    library: Line | None
    source: str


@dataclass(frozen=True, kw_only=True)
class LastLine:
    """One line as JSON has it; `time` in seconds since 1970. `returned`: a call made from it had just returned."""

    time: float
    file: str
    line: int
    function: str
    source: str
    returned: bool


@dataclass(frozen=True, kw_only=True)
class Ring:
    """One thread's ring. `matches` and `count`, of `kept` lines, as asked for.

    `age_s` since the process's last line. `full`: earlier lines are gone.
    """

    host: str
    rank: int | None
    pid: int
    thread: str
    state: str
    age_s: float | None
    last: tuple[LastLine, ...]
    matches: tuple[LastLine, ...] = ()
    count: int | None = None
    kept: int = 0
    full: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks at one place."""

    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    hosts: tuple[str, ...]
    kind: str
    operation: str
    file: str
    line: int
    function: str
    source: str
    library: str
    state: str
    oldest_age_s: float | None


@dataclass(frozen=True, kw_only=True)
class TraceShow:
    """The answer: `odd` are ranks, or pids (negative) of processes that have no rank."""

    run: str
    rings: tuple[Ring, ...] = ()
    groups: tuple[Group, ...] = ()
    odd: tuple[int, ...] = ()
    older_runs: int = 0
    unread: tuple[tuple[str, str, str], ...] = field(default=())
