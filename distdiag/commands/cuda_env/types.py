"""The types of cuda-env: the request, problems and sections, and the data of --json."""

from __future__ import annotations

from enum import StrEnum

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations
from distdiag.commands.cuda_env.collect import CudaFacts  # noqa: TC001
from distdiag.record import record
from distdiag.report import Level

COMMAND = "cuda-env"


class Goal(StrEnum):
    """The purpose of the check."""

    RUN = "run"
    BUILD = "build"
    ALL = "all"

    @property
    def parts(self) -> frozenset[Goal]:
        """The single goals requested."""
        return frozenset({Goal.RUN, Goal.BUILD}) if self is Goal.ALL else frozenset({self})


@record(kw_only=True)
class Request:
    """The options."""

    cluster: Cluster
    goal: Goal = Goal.ALL
    python: str = ""
    only: tuple[str, ...] = ()
    ignore: tuple[tuple[str, str], ...] = ()
    """(id or prefix, reason)."""
    timeout_s: float = 20.0
    verbose: bool = False
    program: str = "distdiag"
    gpus: tuple[str, ...] = ()
    """Capabilities ("8.6") of the GPUs to build for; empty: the local GPUs."""


@record(kw_only=True)
class Remedy:
    """A fix: text, variables to set, as (name, value) in shell syntax, and to unset, and commands."""

    text: str = ""
    exports: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def to_paste(self) -> tuple[str, ...]:
        """All commands of the fix, variables first."""
        export = (f"export {' '.join(f'{name}={value}' for name, value in self.exports)}",) if self.exports else ()
        unset = (f"unset {' '.join(self.unset)}",) if self.unset else ()
        return (*unset, *export, *self.commands)


@record(kw_only=True)
class Problem(Remedy):
    """One problem on one host, with its fix."""

    id: str
    goals: frozenset[Goal]
    level: Level
    title: str
    cause: str = ""
    breaks: str = ""
    evidence: tuple[str, ...] = ()


@record(kw_only=True)
class Section:
    """One part of the report on one host: a line and its problems. `skipped`: the reason if it was not judged."""

    name: str
    line: str
    problems: tuple[Problem, ...] = ()
    skipped: str = ""
    details: tuple[str, ...] = ()
    """Lines shown by -v."""

    @property
    def level(self) -> Level | None:
        """The worst level of its problems; None without any."""
        order = [Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO]
        return next((level for level in order if any(problem.level is level for problem in self.problems)), None)


@record(kw_only=True)
class Ready:
    """Whether CUDA programs can be run and built; None if not requested or unknown."""

    run: bool | None
    build: bool | None


@record(kw_only=True)
class NodeEnv:
    """One node. `users`: the toolkit of each kind of build, name -> directory, empty for none.

    `driver`: its version; `driver_cuda`: the newest CUDA that it supports; both empty without one.
    """

    facts: CudaFacts
    driver: str
    driver_cuda: str
    users: dict[str, str]
    ready: Ready


@record(kw_only=True)
class SectionRow:
    """One line of the report, for all hosts with the same result. `level`: ok, skipped, or the worst finding's.

    `findings`: positions in the report's list of findings.
    """

    name: str
    hosts: tuple[str, ...]
    level: str
    line: str
    skipped: str
    findings: tuple[int, ...]
    details: tuple[str, ...]


@record(kw_only=True)
class Silenced:
    """A finding hidden by --ignore."""

    id: str
    title: str
    reason: str
    hosts: tuple[str, ...]


@record(kw_only=True)
class Step:
    """A problem that remains with all variables of `exports` set, and its fix."""

    id: str
    title: str
    fix: str
    commands: tuple[str, ...]


@record(kw_only=True)
class LogRow:
    """Counts of the log given to --explain: its lines, recognised causes, and other recognised lines."""

    lines: int
    causes: int
    others: int


@record(kw_only=True)
class CudaEnv:
    """The data of --json. `exports` and `steps` are for the first node."""

    goal: str
    ready: Ready
    arch_list: str
    """The architectures of all GPUs of all nodes, as TORCH_CUDA_ARCH_LIST; empty without a GPU."""
    nodes: tuple[NodeEnv, ...]
    sections: tuple[SectionRow, ...]
    silenced: tuple[Silenced, ...]
    exports: dict[str, str]
    steps: tuple[Step, ...]
    log: LogRow | None = None
