"""Findings of logs from the table of their verdicts, knowledge/log_verdicts.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from distdiag.knowledge.known_lines import fill
from distdiag.report import Finding, Fix, Level, Where, Witnesses


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
        return Fix(text=self.fix, commands=commands) if self.fix else None


def finding(
    verdict: str,
    *,
    level: Level | None = None,
    where: Where | None = None,
    witnesses: Witnesses | None = None,
    evidence: tuple[str, ...] = (),
    **given: object,
) -> Finding:
    """Make the finding of a verdict; `given`: what is filled into its texts, where it is not empty."""
    row = _table("verdict")[verdict]
    words = {"name": verdict} | {name: str(value) for name, value in given.items() if value not in ("", None)}
    return Finding(
        id=fill(row.id, words),
        level=level or row.level,
        title=fill(row.title, words),
        detail=fill(row.detail, words).strip(),
        where=where or Where(),
        witnesses=witnesses or Witnesses(),
        evidence=evidence,
        fix=row.repair(words),
    )


def ending(name: str) -> Verdict | None:
    """Return the row of a rank's end: a signal's name, or "status"."""
    return _table("end").get(name)


@cache
def _table(kind: str) -> dict[str, Verdict]:
    import msgspec

    text = resources.files("distdiag.knowledge").joinpath("log_verdicts.toml").read_text("utf-8")
    return {row.name: row for row in msgspec.convert(tomllib.loads(text)[kind], list[Verdict])}
