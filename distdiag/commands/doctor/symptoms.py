"""Symptoms of nodes, with texts from knowledge/doctor_symptoms.toml."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from distdiag.commands.doctor.types import COMMAND, Symptom
from distdiag.diagnosis.verdicts import Verdict, filled, rows
from distdiag.ids import RowId
from distdiag.report import Finding, Where

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
    """Make the symptom of a row; non-empty `words` and `given` fill its texts, and `repair` replaces its fix."""
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


def finding_about(one: Symptom, hosts: Iterable[str]) -> Finding:
    """Return the finding of a symptom of these hosts."""
    return Finding(
        id=RowId(f"{COMMAND}.{one.id}"),
        level=one.level,
        title=one.title,
        detail=one.detail,
        where=Where(hosts=tuple(dict.fromkeys(hosts))),
        evidence=one.evidence,
        fix=one.fix,
    )


@cache
def _rows() -> dict[str, Verdict]:
    return rows(_TABLE, "symptom", Verdict)
