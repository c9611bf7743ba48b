"""Problems from the table of their texts, knowledge/cuda_problems.toml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.types import Goal, Mend, Problem
from distdiag.diagnosis.verdicts import Verdict, filled, read_table, rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distdiag.report import Level

_TABLE = "cuda_problems"
_NO_MEND = Mend()


@dataclass(frozen=True, kw_only=True)
class _Row(Verdict):
    goals: Goal = Goal.ALL
    cause: str = "[{cause}]"
    breaks: str = "[{breaks}]"


def problem(
    row: str,
    words: Mapping[str, object] | None = None,
    *,
    level: Level | None = None,
    evidence: Iterable[str] = (),
    mend: Mend = _NO_MEND,
    **given: object,
) -> Problem:
    """Make the problem of a row; `words` and `given` are filled into its texts, where they are not empty.

    Args:
        mend: the check's own fix; what it leaves empty is the row's.
    """
    text = filled(_rows()[row], {**(words or {}), **given})
    return Problem(
        id=text.id,
        goals=text.goals.parts,
        level=level or text.level,
        title=text.title,
        cause=text.cause,
        breaks=text.breaks,
        evidence=tuple(filter(None, evidence)),
        fix=mend.text or text.fix,
        exports=mend.exports,
        unset=mend.unset,
        commands=mend.commands or text.commands,
    )


def checks() -> dict[str, str]:
    """Return what --only and --ignore can name: the ids without the command's name, and what each is about."""
    return {str(id_): str(about) for id_, about in read_table(_TABLE)["checks"].items()}


def with_gpus(container: str) -> str:
    """Return how this kind of container is started with GPUs, by the sign that it is one."""
    return next(str(row["start"]) for row in read_table(_TABLE)["container"] if re.search(row["sign"], container))


@cache
def _rows() -> dict[str, _Row]:
    return rows(_TABLE, "problem", _Row)
