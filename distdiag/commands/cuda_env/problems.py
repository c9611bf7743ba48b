"""Problems, with their texts in knowledge/cuda_problems.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from distdiag.commands.cuda_env.types import Goal, Mend, Problem
from distdiag.knowledge.known_lines import fill
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NO_MEND = Mend()


@dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    title: str
    id: str = "{name}"
    goals: Goal = Goal.ALL
    level: Level = Level.FAIL
    cause: str = "[{cause}]"
    breaks: str = "[{breaks}]"
    fix: str = "[{fix}]"
    commands: tuple[str, ...] = ()


def problem(
    row: str,
    words: Mapping[str, object] | None = None,
    *,
    level: Level | None = None,
    evidence: Iterable[str] = (),
    mend: Mend = _NO_MEND,
    **given: object,
) -> Problem:
    """Make the problem of a row; fill non-empty `words` and `given` into its texts.

    Args:
        mend: the check's own fix; empty parts default to the row's.
    """
    text = _rows()[row]
    every = {"name": row, **(words or {}), **given}
    said = {name: str(value) for name, value in every.items() if value not in ("", None)}
    return Problem(
        id=fill(text.id, said),
        goals=text.goals.parts,
        level=level or text.level,
        title=fill(text.title, said),
        cause=fill(text.cause, said),
        breaks=fill(text.breaks, said),
        evidence=tuple(filter(None, evidence)),
        fix=mend.text or fill(text.fix, said),
        exports=mend.exports,
        unset=mend.unset,
        commands=mend.commands or tuple(fill(command, said) for command in text.commands),
    )


@cache
def checks() -> dict[str, str]:
    """Return the ids for --only and --ignore, without the command's name, with their descriptions."""
    return {str(id_): str(about) for id_, about in _table()["checks"].items()}


def with_gpus(container: str) -> str:
    """Return how to start this kind of container with GPUs, matched by the sign that revealed it."""
    return next(str(row["start"]) for row in _table()["container"] if re.search(row["sign"], container))


@cache
def _rows() -> dict[str, _Row]:
    import msgspec

    return {row.name: row for row in msgspec.convert(_table()["problem"], list[_Row])}


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("distdiag.knowledge").joinpath("cuda_problems.toml").read_text("utf-8"))
