"""Request and report data of logs."""

from __future__ import annotations

from dataclasses import field

from distdiag.cluster.targets import Cluster  # noqa: TC001 - saved requests are decoded by it
from distdiag.record import record

COMMAND = "logs"


@record(kw_only=True)
class Request:
    """The options. `timeline`: also show all events in order."""

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    timeline: bool = False


@record(kw_only=True)
class Failure:
    """A failure reported by a rank, or by a line without one.

    `role`: cause, consequence, confirmation, job. `known`: id of the known line, "exception" or "exit". `what`:
    one-line summary; `place`: innermost line of user code, or the collective; `at`: seconds since the start of the
    year, None without a timestamp; `lines_after`: in its file; `job_went_on`: progress lines follow in its file.
    """

    role: str
    known: str
    rank: int | None
    host: str
    generation: int
    what: str
    means: str = ""
    fix: str = ""
    commands: tuple[str, ...] = ()
    place: str = ""
    collective: str = ""
    file: str = ""
    line: int = 0
    at: float | None = None
    text: str = ""
    groups: dict[str, str] = field(default_factory=dict)
    count: int = 1
    lines_after: int = 0
    job_went_on: bool = False


@record(kw_only=True)
class RankEnd:
    """One rank's end in the judged generation. `exit`: as its launcher reports it."""

    rank: int
    host: str
    role: str
    what: str
    exit: str
    lines: int


@record(kw_only=True)
class LogSource:
    """One log file."""

    host: str
    path: str
    bytes: int
    lines: int
    forms: tuple[str, ...]
    joined: int
    cut: int
    error: str


@record(kw_only=True)
class Logs:
    """The data of the report. `world`: number of ranks as far as known; `generations`: of an elastic job."""

    sources: tuple[LogSource, ...]
    world: int
    generations: int
    generation: int
    ranks: tuple[RankEnd, ...]
    failures: tuple[Failure, ...]
    dropped: int


def number_in(text: str | None) -> int | None:
    """Parse at most 18 digits; None for anything else, as logs and nodes are untrusted."""
    digits = (text or "").removeprefix("-")
    return int(text or "") if digits.isascii() and digits.isdigit() and len(digits) < 19 else None
