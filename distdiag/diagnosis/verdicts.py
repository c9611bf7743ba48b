"""Findings, problems and symptoms from tables such as knowledge/verdicts.toml."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from distdiag.ids import RowId
from distdiag.knowledge.known_lines import fill
from distdiag.record import record
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TABLES = ("verdicts", "number_verdicts", "job_verdicts")
WORST_FIRST = (Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO)


@record(kw_only=True)
class Verdict:
    """One row: the texts of a finding, or of a rank's exit. The caller supplies absent ones."""

    name: str
    title: str
    id: str = "{name}"
    level: Level = Level.FAIL
    detail: str = "[{detail}]"
    fix: str = "[{fix}]"
    commands: tuple[str, ...] = ()

    def repair(self) -> Fix | None:
        """Return the fix, if the row has one."""
        return Fix(text=self.fix, commands=self.commands) if self.fix else None


AnyRow = TypeVar("AnyRow", bound=Verdict)


def rows(table: str, kind: str, of: type[AnyRow]) -> dict[str, AnyRow]:
    """Read the rows of a kind from a table, knowledge/{table}.toml, by name."""
    import msgspec

    return {row.name: row for row in (msgspec.convert(words, of) for words in read_table(table)[kind])}


@cache
def read_table(table: str) -> dict[str, Any]:
    """Read knowledge/{table}.toml; tables differ in their keys, and each reader decodes its own rows."""
    return tomllib.loads(resources.files("distdiag.knowledge").joinpath(f"{table}.toml").read_text("utf-8"))


def filled(row: AnyRow, words: Mapping[str, object]) -> AnyRow:
    """Fill the non-empty `words` into all texts of a row; drop commands that are only a missing one."""
    said = {name: str(value) for name, value in {"name": row.name, **words}.items() if value not in ("", None)}
    every = {field.name: getattr(row, field.name) for field in fields(row)}
    # Any, as `replace` accepts for fields of every type.
    texts: dict[str, Any] = {name: fill(text, said) for name, text in every.items() if type(text) is str}
    commands = (fill(command, said) for command in row.commands)
    return replace(row, **texts, commands=tuple(command for command in commands if command != "?"))


def finding(
    verdict: str,
    words: Mapping[str, object] | None = None,
    *,
    level: Level | None = None,
    where: Where | None = None,
    witnesses: Witnesses | None = None,
    evidence: tuple[str, ...] = (),
    repair: Fix | None = None,
    **given: object,
) -> Finding:
    """Return the finding of a row; non-empty `words` and `given` fill its placeholders; `repair` replaces its fix."""
    row = filled(_row("verdict", verdict), {**(words or {}), **given})
    return Finding(
        id=RowId(row.id if "." in row.id else f"logs.{row.id}"),
        level=level or row.level,
        title=row.title,
        detail=row.detail.strip(),
        where=where or Where(),
        witnesses=witnesses or Witnesses(),
        evidence=evidence,
        fix=repair or row.repair(),
    )


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level."""
    return sorted(findings, key=lambda finding: WORST_FIRST.index(finding.level))


def exists(verdict: str) -> bool:
    """Return whether the table has this verdict."""
    return verdict in _rows("verdict")


def ending(name: str) -> Verdict | None:
    """Return the row of a rank's exit; `name`: a signal or "status"."""
    return filled(_row("end", name), {}) if name in _rows("end") else None


@cache
def _rows(kind: str) -> dict[str, dict[str, object]]:
    tables = TABLES if kind == "verdict" else TABLES[:1]
    return {row["name"]: row for table in tables for row in read_table(table)[kind]}


@cache
def _row(kind: str, name: str) -> Verdict:
    """Return one row: to convert all of them takes as long as a whole diagnosis."""
    import msgspec

    return msgspec.convert(_rows(kind)[name], Verdict)
