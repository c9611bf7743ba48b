"""Findings from the table of verdicts, knowledge/verdicts.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from distdiag.knowledge.known_lines import fill
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One row: the texts of a finding, or of the end of a rank."""

    name: str
    title: str
    id: str = "logs.{name}"
    level: Level = Level.FAIL
    detail: str = ""
    fix: str = ""
    commands: tuple[str, ...] = ()

    def repair(self, words: dict[str, str] | None = None) -> Fix | None:
        """Return the fix, if the row has one."""
        commands = tuple(fill(command, words or {}) for command in self.commands)
        return Fix(text=fill(self.fix, words or {}), commands=commands) if self.fix else None


def finding(
    verdict: str,
    words: Mapping[str, object] | None = None,
    *,
    level: Level | None = None,
    where: Where | None = None,
    witnesses: Witnesses | None = None,
    evidence: tuple[str, ...] = (),
    **given: object,
) -> Finding:
    """Make the finding of a verdict; `words` and `given` are filled into its texts, where they are not empty."""
    row = _table("verdict")[verdict]
    every = {"name": verdict, **(words or {}), **given}
    said = {name: str(value) for name, value in every.items() if value not in ("", None)}
    return Finding(
        id=fill(row.id, said),
        level=level or row.level,
        title=fill(row.title, said),
        detail=fill(row.detail, said).strip(),
        where=where or Where(),
        witnesses=witnesses or Witnesses(),
        evidence=evidence,
        fix=row.repair(said),
    )


def exists(verdict: str) -> bool:
    """Return whether the table has this verdict."""
    return verdict in _table("verdict")


def ending(name: str) -> Verdict | None:
    """Return the row of a rank's end: a signal's name, or "status"."""
    return _table("end").get(name)


@cache
def _table(kind: str) -> dict[str, Verdict]:
    import msgspec

    text = resources.files("distdiag.knowledge").joinpath("verdicts.toml").read_text("utf-8")
    return {row.name: row for row in msgspec.convert(tomllib.loads(text)[kind], list[Verdict])}
