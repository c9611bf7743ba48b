"""Request, record of one node, and report data of run. Pure data."""

from __future__ import annotations

from distdiag.cluster.targets import Cluster  # noqa: TC001 - saved requests are decoded by it
from distdiag.facts.logs.collect import NodeLogs  # noqa: TC001
from distdiag.facts.programs import signal_name
from distdiag.facts.stacks.stack_types import Frame  # noqa: TC001
from distdiag.record import record

COMMAND = "run"


@record(kw_only=True)
class Request:
    """The options. `folder`: the folder of the output; empty if not kept."""

    program: str
    cluster: Cluster
    argv: tuple[str, ...] = ()
    folder: str = ""


@record(kw_only=True)
class RankRun:
    """One rank of one generation, times in seconds since the job began.

    `world`: according to its launcher. `status`: exit status, negative for a signal; None if unknown. `ended_s`: None
    if its end was not observed. `oom`: the kernel counted an OOM kill in its cgroup during its life. `last_line`: of
    its stdout; if shared with stderr, the last before a traceback.
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


def status_text(status: int | None) -> str:
    """Format an exit status: "exit status 1", "SIGKILL"."""
    if status is None:
        return "exit status unknown"
    return signal_name(-status) if status < 0 else f"exit status {status}"


TIME_LIMIT = "time limit"
"""The reason of a snapshot shortly before SLURM ends the job."""


@record(kw_only=True)
class Picture:
    """The result of `hang` at one moment. `reason`: stall, SIGTERM or TIME_LIMIT.

    `ranks`: the accused; `ranks_seen`: number found; `error`: why it is empty.
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


@record(kw_only=True)
class RankStack:
    """The stack of a rank after the first exit. `error`: why it has no frames; `frames`: innermost first."""

    rank: int
    pid: int
    thread: str = ""
    frames: tuple[Frame, ...] = ()
    error: str = ""


@record(kw_only=True)
class Stacks:
    """The stacks of the ranks still alive after the first exit; no ranks: the others had exited too.

    `held_s`: duration of the reading; the launcher was held for it, or until another rank exited. `folder`: of the
    dumps.
    """

    at_s: float
    held_s: float = 0.0
    ranks: tuple[RankStack, ...] = ()
    folder: str = ""


@record(kw_only=True)
class SanitizerLog:
    """The log of compute-sanitizer for one process of a rank.

    `errors`: None without its summary. `details`: the lines below the first error, without its host backtrace.
    `launched`: the innermost Python frame of that backtrace, "step at train.py:28"; empty before CUDA 13.
    """

    rank: int
    errors: int | None
    first: str
    path: str
    details: tuple[str, ...] = ()
    launched: str = ""


@record(kw_only=True)
class NodeRun:
    """The record of one node. `began_at`: Unix time. `status`: the launcher's; None while it runs.

    `signals`: sent to distdiag and forwarded, as (name, second). `killed`: by --on-stall kill. `stacks`: None if no
    rank failed before the job was terminated, or with --no-pictures. `slurm_job`: its id, if any.
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


@record(kw_only=True)
class Run:
    """The data of the report. Times on all nodes count from the same moment.

    `first`: the ranks that failed first. `folder`: of the output; `hosts`: of the nodes.
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
    folder: str = ""
    hosts: tuple[str, ...] = ()
