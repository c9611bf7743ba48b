"""What distdiag run is asked, what it records on one node, and its answer. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.cluster.targets import Cluster  # noqa: TC001 - saved requests are decoded by it
from distdiag.facts.job_logs.collect import NodeLogs  # noqa: TC001
from distdiag.facts.stack_types import Frame  # noqa: TC001

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
    `last_line`: of its stdout; of one stream with stderr, the last before a traceback.
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
    last_line: str = ""


TIME_LIMIT = "time limit"
"""The reason of a picture shortly before SLURM ends the job."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What `hang` reported of the job at one moment. `reason`: stall, SIGTERM or TIME_LIMIT.

    `ranks`: whom it names; `ranks_seen`: how many it found; `error`: why it has nothing.
    """

    reason: str
    at_s: float
    took_s: float
    verdict: str = ""
    summary: str = ""
    ranks: tuple[int, ...] = ()
    ranks_seen: int = 0
    class_name: str = ""
    folder: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """Where a rank was when the first one had ended. `error`: why there are no frames, which are innermost first."""

    rank: int
    pid: int
    thread: str = ""
    frames: tuple[Frame, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """The stacks of the ranks that lived when the first one had ended. No ranks: the others had ended too.

    `held_s`: the reading took so long; the launcher was held meanwhile, or until another rank ended. `folder`: where
    they are, for pyspy-all.
    """

    at_s: float
    held_s: float = 0.0
    ranks: tuple[RankStack, ...] = ()
    folder: str = ""


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
    `stacks`: None if no rank failed before the job was ended, or --no-pictures was given. `slurm_job`: its id, if any.
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
    stacks: Stacks | None = None
    slurm_job: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The facts of the answer. Times of ranks of all nodes count from the same moment.

    `first`: the ranks that failed first. `folder`: where everything is kept; `hosts`: of the nodes.
    """

    argv: tuple[str, ...]
    status: int | None
    took_s: float
    generations: int
    world: int
    ranks: tuple[RankRun, ...]
    pictures: tuple[Picture, ...]
    stacks: tuple[Stacks, ...] = ()
    first: tuple[int, ...] = ()
    launcher_says: str = ""
    folder: str = ""
    hosts: tuple[str, ...] = ()
