"""The answer of cuda-env, as --json prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    arch_list: str
    """The architectures of all GPUs of all nodes, as TORCH_CUDA_ARCH_LIST; empty without a GPU."""
    nodes: tuple[NodeEnv, ...]
    differences: tuple[DifferenceRow, ...]
    sections: tuple[SectionRow, ...]
    silenced: tuple[Silenced, ...]
    exports: dict[str, str]
    steps: tuple[Step, ...]
    log: LogRow | None = None
