"""Problems, with texts from knowledge/cuda_problems.toml."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.types import COMMAND, Goal, Problem, Remedy
from distdiag.diagnosis import finding_ids
from distdiag.diagnosis.verdicts import Verdict, filled, read_table, rows
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distdiag.report import Level

_TABLE = "cuda_problems"
_NO_REMEDY = Remedy()


@record(kw_only=True)
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
    remedy: Remedy = _NO_REMEDY,
    **given: object,
) -> Problem:
    """Make the problem of a row; fill non-empty `words` and `given` into its texts.

    Args:
        remedy: the check's own fix; empty parts default to the row's.
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
        text=remedy.text or text.fix,
        exports=remedy.exports,
        unset=remedy.unset,
        commands=remedy.commands or text.commands,
    )


def checks() -> dict[str, str]:
    """Return the ids for --only and --ignore, without the command's name, with descriptions."""
    own = {id_: about for id_, about in finding_ids.checks(COMMAND).items() if not id_.startswith("log.")}
    return {**own, "log": "errors explained from a log (--explain)"}


def with_gpus(container: str) -> str:
    """Return how to start this kind of container with GPUs, matched by the sign that revealed it."""
    return next(str(row["start"]) for row in read_table(_TABLE)["container"] if re.search(row["sign"], container))


@cache
def _rows() -> dict[str, _Row]:
    return rows(_TABLE, "problem", _Row)
