"""The request of trace blocked, and its result. Pure data."""

from __future__ import annotations

from enum import StrEnum

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.trace.ranks import Wanted  # noqa: TC001
from distdiag.jobs.types import JobSummary  # noqa: TC001
from distdiag.record import record

COMMAND = "trace blocked"


class Threads(StrEnum):
    """Which threads to show."""

    MAIN = "main"
    ALL = "all"


@record(kw_only=True)
class Request:
    """The options of one run."""

    program: str
    cluster: Cluster
    wanted: Wanted
    threads: Threads = Threads.MAIN


@record(kw_only=True)
class Last:
    """A thread's current system call. `args`: raw kernel values; `fd_target`: target of the descriptor.

    `peer_rank`: set if a single rank has the other end; `blocked_s`: time since the thread last ran.
    """

    call: str
    args: tuple[int, ...]
    fd_target: str
    peer_rank: int | None
    blocked_s: float | None


@record(kw_only=True)
class ThreadRow:
    """One thread. `role`: "rank", "helper" or "process"; `kind` of Kind; `on`: the wait in words.

    `moved`: it ran between the two samples.
    """

    host: str
    rank: int | None
    job: str
    role: str
    pid: int
    tid: int
    comm: str
    state: str
    moved: bool
    kind: str
    on: str
    last: Last


@record(kw_only=True)
class TraceBlocked:
    """The result. `helpers`: number of hidden helpers, with no process waiting for them."""

    interval_s: float
    jobs: tuple[JobSummary, ...]
    threads: tuple[ThreadRow, ...]
    helpers: int
