"""The request of pyspy-all, and its result as --json prints it. Pure data. Frames are innermost first.

The result has structs instead of dataclasses: one key is "class", and tens of thousands of rows are possible.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec  # noqa: TID253 - imported with the subcommand

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations
from distdiag.jobs.types import JobSummary  # noqa: TC001
from distdiag.record import record

COMMAND = "pyspy-all"
_RENAMED = {"class_": "class"}


class Threads(StrEnum):
    """Which threads to show."""

    MAIN = "main"
    ALL = "all"


@record(kw_only=True)
class Request:
    """The options of one run."""

    program: str
    cluster: Cluster
    pids: tuple[int, ...] = ()
    job: str = ""
    user: str = ""
    native: bool = False
    samples: int = 2
    interval_s: float = 1.0
    is_quick: bool = False
    """Whether to sample faster if the job steps faster."""
    threads: Threads = Threads.MAIN
    verbose: bool = False
    timeout_s: float = 5.0
    ranks_only: bool = False
    """Skip Python processes with torch but no rank."""


class FrameRow(msgspec.Struct, frozen=True):
    """One frame; `line` is 0 if unknown; `user`: in user code."""

    function: str
    file: str
    line: int
    user: bool


class ThreadRow(msgspec.Struct, frozen=True, rename=_RENAMED):
    """One thread."""

    name: str
    os_thread_id: int
    class_: str
    frames: tuple[FrameRow, ...]


class ProcessRow(msgspec.Struct, frozen=True, rename=_RENAMED):
    """One process. `cpu_s`: CPU seconds between the first and last sample; None after one."""

    host: str
    pid: int | None
    rank: int | None
    local_rank: int | None
    job: str
    role: str
    state: str
    status: str
    reason: str
    class_: str
    moving: bool | None
    cpu_s: float | None
    counters: dict[str, int]
    helpers: tuple[int, ...]
    threads: tuple[ThreadRow, ...]


class Group(msgspec.Struct, frozen=True, rename=_RENAMED):
    """Ranks at one place; `counters`: loop counters with equal values in all of these ranks.

    `outlier`: "stuck", "straggler" or "gone" for outliers, else empty.
    """

    job: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    class_: str
    moving: bool | None
    count: int
    outlier: str
    counters: dict[str, int]
    frames: tuple[FrameRow, ...]


class OutlierFrame(msgspec.Struct, frozen=True):
    """The frame of a rank."""

    function: str
    file: str
    line: int


class Outlier(msgspec.Struct, frozen=True, rename=_RENAMED):
    """Ranks that differ from the others, and the reason. `kind`: "stuck", "straggler" or "gone"."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    kind: str
    class_: str
    frame: OutlierFrame | None
    reason: str


class PySpyAll(msgspec.Struct, frozen=True):
    """The data of the report."""

    samples: int
    interval_s: float
    jobs: tuple[JobSummary, ...]
    processes: tuple[ProcessRow, ...]
    groups: tuple[Group, ...]
    outliers: tuple[Outlier, ...]
