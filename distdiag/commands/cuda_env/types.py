"""The types of cuda-env: what is asked, what is wrong in which section, and the answer as --json prints it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations
from distdiag.facts.cuda.versions import Versions  # noqa: TC001
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
class Mend:
    """What mends a problem: words, variables to set and to take away, and commands."""

    text: str = ""
    exports: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


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
        return next((level for level in order if any(problem.level is level for problem in self.problems)), None)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Whether CUDA programs can be run and built; None where that was not asked or is not known."""

    run: bool | None
    build: bool | None


@dataclass(frozen=True, kw_only=True)
class NodeEnv:
    """One node. `users` tells which toolkit each kind of build takes: name -> directory, empty for none."""

    host: str
    python: dict[str, Any]
    torch: dict[str, Any] | None
    driver: dict[str, Any]
    gpus: list[dict[str, Any]]
    toolkits: list[dict[str, Any]]
    users: dict[str, str]
    compilers: dict[str, Any]
    extensions: list[dict[str, Any]]
    variables: dict[str, str]
    packages: dict[str, str]
    versions: Versions
    ready: Ready


@dataclass(frozen=True, kw_only=True)
class SectionRow:
    """One line of the report, for all hosts of which it is true. `level`: ok, skipped, or that of the worst finding.

    `findings` are positions in the report's list of findings.
    """

    name: str
    hosts: tuple[str, ...]
    level: str
    line: str
    skipped: str
    findings: tuple[int, ...]
    details: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Silenced:
    """A finding that --ignore took out."""

    id: str
    title: str
    reason: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DifferenceRow:
    """A fact that is not the same on all nodes: value -> hosts."""

    fact: str
    values: dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is wrong still when all variables of `exports` are set, and what mends it."""

    id: str
    title: str
    fix: str
    commands: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LogRow:
    """The log that was given to --explain: how many causes were recognised in it, and how many other lines."""

    lines: int
    causes: int
    others: int


@dataclass(frozen=True, kw_only=True)
class CudaEnv:
    """The facts of the answer. Those of the first node stand at the top, those of all in `nodes`."""

    goal: str
    ready: Ready
    host: str
    python: dict[str, Any]
    toolkits: list[dict[str, Any]]
    users: dict[str, str]
    torch: dict[str, Any] | None
    driver: dict[str, Any]
    gpus: list[dict[str, Any]]
    compilers: dict[str, Any]
    packages: dict[str, str]
    versions: Versions
    arch_list: str
    """The architectures of all GPUs of all nodes, as TORCH_CUDA_ARCH_LIST; empty without a GPU."""
    nodes: tuple[NodeEnv, ...]
    differences: tuple[DifferenceRow, ...]
    sections: tuple[SectionRow, ...]
    silenced: tuple[Silenced, ...]
    exports: dict[str, str]
    steps: tuple[Step, ...]
    log: LogRow | None = None
