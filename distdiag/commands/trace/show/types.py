"""The request of trace show, and its result as JSON. Pure data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations
from distdiag.record import record

if TYPE_CHECKING:
    from distdiag.commands.trace.show.collect import Line, Thread

COMMAND = "trace show"


@record(kw_only=True)
class Request:
    """The options of one run. No `paths`: the default directory of trace py on each node."""

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    last: int = 5
    count: str = ""
    all_runs: bool = False
    verbose: bool = False


@record(kw_only=True)
class Ring:
    """One thread's ring. `age_s` since the process's last line. `full`: earlier lines were overwritten."""

    host: str
    rank: int | None
    pid: int
    state: str
    age_s: float | None
    full: bool
    thread: Thread


@record(kw_only=True)
class Group:
    """Ranks at one place."""

    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    hosts: tuple[str, ...]
    kind: str
    operation: str
    user: Line | None
    library: Line | None
    state: str
    oldest_age_s: float | None


@record(kw_only=True)
class TraceShow:
    """The result. `outliers`: ranks, or negated pids of processes without a rank.

    `unread`: (host, path, why).
    """

    run: str
    rings: tuple[Ring, ...]
    groups: tuple[Group, ...]
    outliers: tuple[int, ...]
    older_runs: int
    unread: tuple[tuple[str, str, str], ...]
