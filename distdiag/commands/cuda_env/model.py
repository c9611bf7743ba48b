"""The types of cuda-env: what is asked, and what is found wrong in which section. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations
from distdiag.report import Level

COMMAND = "cuda-env"


class Goal(StrEnum):
    """What it is all for."""

    RUN = "run"
    BUILD = "build"
    ALL = "all"

    @property
    def parts(self) -> frozenset[Goal]:
        """The goals that are asked for."""
        return frozenset({Goal.RUN, Goal.BUILD}) if self is Goal.ALL else frozenset({self})


RUN, BUILD, BOTH = frozenset({Goal.RUN}), frozenset({Goal.BUILD}), frozenset({Goal.RUN, Goal.BUILD})


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    cluster: Cluster
    goal: Goal = Goal.ALL
    python: str = ""
    only: tuple[str, ...] = ()
    ignore: tuple[tuple[str, str], ...] = ()
    """(id or its beginning, reason)."""
    timeout_s: float = 20.0
    verbose: bool = False
    program: str = "distdiag"
    gpus: tuple[str, ...] = ()
    """Capabilities ("8.6") of the GPUs to build for; empty: those that are here."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong on one host. `exports` are variables that mend it: name and value, both as typed."""

    id: str
    goals: frozenset[Goal]
    level: Level
    title: str
    cause: str = ""
    breaks: str = ""
    evidence: tuple[str, ...] = ()
    fix: str = ""
    exports: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def to_paste(self) -> tuple[str, ...]:
        """All commands of the fix, variables first."""
        export = (f"export {' '.join(f'{name}={value}' for name, value in self.exports)}",) if self.exports else ()
        unset = (f"unset {' '.join(self.unset)}",) if self.unset else ()
        return (*unset, *export, *self.commands)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the report on one host: a line, and what is wrong. `skipped` says why it was not judged."""

    name: str
    line: str
    problems: tuple[Problem, ...] = ()
    skipped: str = ""
    details: tuple[str, ...] = ()
    """Lines that -v shows."""

    @property
    def level(self) -> Level | None:
        """The worst of its problems; None if there are none."""
        order = [Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO]
        return next((level for level in order if any(one.level is level for one in self.problems)), None)
