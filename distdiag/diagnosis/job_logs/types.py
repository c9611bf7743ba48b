"""What distdiag logs is asked, and what its report holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdiag.cluster.targets import Cluster  # noqa: TC001 - saved requests are decoded by it

COMMAND = "logs"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. `timeline`: also show everything that was found, in order."""

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    timeline: bool = False
    follow: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that a rank, or nobody in particular, reported.

    `role`: cause, consequence, confirmation, job. `known`: id of the knowledge, "exception" or "exit". `what`: in a
    line; `place`: the innermost line of the user's own code, or the collective it was in; `at`: seconds since the year
    began, None without a time; `lines_after`: of its file; `job_went_on`: its file has lines of progress behind it.
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


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended in the generation that is judged. `exit`: as its launcher reports it."""

    rank: int
    host: str
    role: str
    what: str
    exit: str
    lines: int


@dataclass(frozen=True, kw_only=True)
class LogSource:
    """One file, as it is shown."""

    host: str
    path: str
    bytes: int
    lines: int
    forms: tuple[str, ...]
    joined: int
    cut: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Logs:
    """The facts of the answer. `world`: as many ranks as there are evidently; `generations` of an elastic job."""

    sources: tuple[LogSource, ...]
    world: int
    generations: int
    generation: int
    ranks: tuple[RankEnd, ...]
    failures: tuple[Failure, ...]
    dropped: int


def number_in(text: str | None) -> int | None:
    """Read a number of at most 18 digits; None for what is none: it comes from a log, or from a node."""
    digits = (text or "").removeprefix("-")
    return int(text or "") if digits.isascii() and digits.isdigit() and len(digits) < 19 else None
