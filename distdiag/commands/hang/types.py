"""Request and report data of hang. Pure data."""

from __future__ import annotations

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.diagnosis.stuck.types import SourceRow, StuckKind  # noqa: TC001
from distdiag.jobs.types import JobSummary  # noqa: TC001
from distdiag.record import record

COMMAND = "hang"


@record(kw_only=True)
class Wanted:
    """The selected job; empty: any."""

    job: str = ""
    pids: tuple[int, ...] = ()
    user: str = ""


@record(kw_only=True)
class Request:
    """The options. `logs` and `recorder` are paths on the hosts; `quick`: sample just twice.

    `ranks_only`: skip Python processes with torch but no rank.
    """

    program: str
    cluster: Cluster
    wanted: Wanted = Wanted()
    logs: tuple[str, ...] = ()
    recorder: tuple[str, ...] = ()
    timeout_s: float = 60.0
    interval_s: float = 1.0
    quick: bool = False
    ranks_only: bool = False
    verbose: bool = False


@record(kw_only=True)
class HangRank:
    """One rank. `doing`: class of its stack; `frames`: innermost first; `waits_for`: the rank it waits for, if known.

    `motion`: change between its samples; `gpu`: its call into a GPU library, or that library. `since_s`: how long its
    main thread has not run. `recorder`: its wait according to its flight recorder.
    """

    host: str
    rank: int | None
    local_rank: int | None
    pid: int | None
    job: str
    doing: str
    stuck: str
    moving: bool | None
    motion: str
    gpu: str
    since_s: float | None
    waits: str
    waits_for: int | None
    counters: dict[str, int]
    frames: tuple[str, ...]
    recorder: str = ""
    recent: tuple[str, ...] = ()


@record(kw_only=True)
class Hang:
    """The data of the report. `class_name`: kind of fault; `candidates`: possible explanations if unknown."""

    class_name: StuckKind
    ranks: tuple[int, ...]
    candidates: tuple[str, ...]
    next_experiment: str
    sources: tuple[SourceRow, ...]
    jobs: tuple[JobSummary, ...]
    processes: tuple[HangRank, ...]
