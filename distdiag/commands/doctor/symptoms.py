"""Symptoms of nodes, with texts from knowledge/doctor_symptoms.toml."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from distdiag.commands.doctor.types import Symptom
from distdiag.diagnosis.connectivity import PATH_IDS
from distdiag.diagnosis.verdicts import Verdict, filled, read_table, rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distdiag.report import Fix, Level

_TABLE = "doctor_symptoms"


def symptom(
    row: str,
    words: Mapping[str, object] | None = None,
    *,
    subject: str = "",
    level: Level | None = None,
    evidence: Iterable[str] = (),
    repair: Fix | None = None,
    **given: object,
) -> Symptom:
    """Make the symptom of a row; non-empty `words` and `given` fill its texts.

    Args:
        repair: the check's own fix, replacing the row's.
    """
    text = filled(_rows()[row], {**(words or {}), **given})
    return Symptom(
        id=text.id,
        level=level or text.level,
        title=text.title,
        subject=subject,
        detail=text.detail,
        evidence=tuple(filter(None, evidence)),
        fix=repair or text.repair(),
    )


@cache
def checks() -> dict[str, str]:
    """Map each id accepted by --only and --ignore, without the command's name, to its description."""
    paths = {id_: words for id_, words in PATH_IDS.items() if id_.startswith("rank-ports-")}
    return {**{str(id_): str(about) for id_, about in read_table(_TABLE)["checks"].items()}, **paths}


@cache
def _rows() -> dict[str, Verdict]:
    return rows(_TABLE, "symptom", Verdict)
