"""What distdiag run is asked, what it records on one node, and its answer. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.cluster.targets import Cluster  # noqa: TC001 - saved requests are decoded by it
from distdiag.facts.job_logs.collect import NodeLogs  # noqa: TC001

COMMAND = "run"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. `folder`: where the output is kept; empty if it is not."""

    program: str
    cluster: Cluster
    argv: tuple[str, ...] = ()
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """One rank of one generation, times in seconds since the job began.

    `world`: as its launcher says. `status`: exit status, negative for a signal;
    None if it is not known. `ended_s`: None if nobody saw it end. `oom`:
    the kernel counted a kill for lack of memory in its cgroup between its start and its end.
    """

    rank: int
    local: int | None
    generation: int
    host: str
    pid: int
    started_s: float
    world: int = 0
    ended_s: float | None = None
    status: int | None = None
    oom: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What `hang` reported of the job at one moment. `reason`: stall, death or SIGTERM; `error`: why it has nothing."""

    reason: str
    at_s: float
    took_s: float
    verdict: str = ""
    summary: str = ""
    ranks: tuple[int, ...] = ()
    class_name: str = ""
    folder: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class SanitizerLog:
    """What compute-sanitizer wrote of one process of a rank. `errors`: None if it did not come to its summary."""

    rank: int
    errors: int | None
    first: str
    path: str


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """What was recorded on one node. `began_at`: Unix time. `status`: the launcher's; None while it runs.

    `signals`: those that were sent to distdiag and passed on, as (name, second). `killed`: by --on-stall kill.
    """

    host: str
    argv: tuple[str, ...]
    began_at: float
    took_s: float
    status: int | None
    ranks: tuple[RankRun, ...]
    logs: NodeLogs
    pictures: tuple[Picture, ...] = ()
    signals: tuple[tuple[str, float], ...] = ()
    killed: bool = False
    sanitizer: tuple[SanitizerLog, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """The facts of the answer. `folders`: where each node's output is kept."""

    argv: tuple[str, ...]
    status: int | None
    took_s: float
    generations: int
    world: int
    ranks: tuple[RankRun, ...]
    pictures: tuple[Picture, ...]
    launcher_says: str = ""
    folder: str = ""
