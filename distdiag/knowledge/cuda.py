"""Compatible versions published by NVIDIA and PyTorch, as data (cuda.toml)."""

from __future__ import annotations

import re

from distdiag.knowledge.tables import load
from distdiag.record import record


@record(kw_only=True)
class DeepSpeedTable:
    """A release's build requirements and ops, for --prebuild."""

    version: str
    needs: list[str]
    ops: list[str]


@record
class GpuName:
    """Names of GPUs of one architecture, "8.6"."""

    arch: str
    name: re.Pattern[str]


@record(kw_only=True)
class Tables:
    """The content of cuda.toml; versions are strings, architectures in nvcc's notation ("90a")."""

    least_driver: dict[str, str]
    branch: dict[str, str]
    builds: dict[str, tuple[str, ...]]
    wheels: dict[str, dict[str, tuple[int, ...]]]
    nvcc: dict[str, tuple[str, str]]
    deepspeed: DeepSpeedTable
    known_archs: tuple[str, ...]
    named_archs: dict[str, str]
    forward_compatible: re.Pattern[str]
    status: dict[str, str]
    gpus: tuple[GpuName, ...]


def tables() -> Tables:
    """Read the file, once."""
    return load("cuda", "", Tables)


def arch_of(gpu: str) -> str:
    """Return the architecture of a GPU by its name, "RTX 3090" -> "8.6"; empty if unknown."""
    return next((row.arch for row in tables().gpus if row.name.search(gpu)), "")


def version(text: str) -> tuple[int, ...]:
    """Parse a version: "12.8.93" -> (12, 8, 93)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:4])


def minor(text: str) -> str:
    """Truncate a version to major.minor: "12.8.93" -> "12.8"."""
    return ".".join(text.split(".")[:2])


def major(text: str) -> int:
    """Return the first number of a version; 0 if it has none."""
    return (version(text) or (0,))[0]


def newest_cuda(driver: str) -> str:
    """Return the newest CUDA supported by a driver's branch; empty if older than our table.

    A branch newer than our table counts as the newest in it: a lower bound.
    """
    known = [branch for branch in tables().branch if int(branch) <= major(driver)]
    return tables().branch[max(known, key=int)] if known else ""


def compiles(arch: str, toolkit: str) -> bool | None:
    """Return whether a toolkit's nvcc compiles for an architecture ("90a"); None if unknown.

    12.9 introduced the family variants ("100f").
    """
    family = arch.endswith("f")
    first, last = tables().nvcc.get(arch[:-1] if family else arch, (None, None))
    if first is None or last is None:
        return None
    have = version(toolkit)
    if family and have < (12, 9):
        return False
    return (not first or have >= version(first)) and (not last or have <= version(last))
