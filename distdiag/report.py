"""The result of a diagnosis: findings, a verdict, an exit status. Pure data; output.deliver prints it."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

from distdiag.record import record

if TYPE_CHECKING:
    from distdiag.ids import FindingId
else:
    FindingId = str  # as which msgspec decodes the findings in saved runs

Data = TypeVar("Data")
INTERRUPTED = 130


class Level(StrEnum):
    """Severity of a finding. UNKNOWN: too little evidence."""

    FAIL = "fail"
    WARN = "warn"
    INFO = "info"
    UNKNOWN = "unknown"


class Verdict(StrEnum):
    """The overall verdict of all findings."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


@record(kw_only=True)
class Where:
    """The culprits of a finding, for scripts to drain; empty if it concerns all or none."""

    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()


@record(kw_only=True)
class Witnesses:
    """Hosts and ranks that observed or suffer from the problem without being at fault."""

    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@record(kw_only=True)
class Fix:
    """The remedy in words, and commands to paste."""

    text: str
    commands: tuple[str, ...] = ()

    @property
    def labelled(self) -> str:
        """The text with its label: "fix: ...", or "next: ..." for commands that only show more."""
        return self.text if self.text.startswith("next: ") else f"fix: {self.text}"


def quoted(word: str) -> str:
    """Quote a word of a printed command, for zsh too, which expands words and values that begin with = or ^."""
    return f"'{word}'" if word[:1] in ("=", "^") and shlex.quote(word) == word else shlex.quote(word)


@record(kw_only=True)
class Finding:
    """One problem or remark. The meaning of an id never changes."""

    id: FindingId
    level: Level
    title: str
    detail: str = ""
    where: Where = Where()
    witnesses: Witnesses = Witnesses()
    evidence: tuple[str, ...] = ()
    fix: Fix | None = None


@record(kw_only=True)
class Report(Generic[Data]):
    """The answer of one command: facts and findings."""

    command: str
    data: Data
    findings: tuple[Finding, ...]
    summary: str
    interrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst level counts; unknown never passes as OK."""
        levels = {finding.level for finding in self.findings}
        if Level.FAIL in levels:
            return Verdict.FAIL
        if Level.UNKNOWN in levels or self.interrupted:
            return Verdict.UNKNOWN
        return Verdict.WARN if Level.WARN in levels else Verdict.OK

    def exit_code(self, *, strict: bool = False) -> int:
        """0 healthy, 1 a fault, 3 could not diagnose, 130 interrupted; `strict` makes warnings faults."""
        if self.interrupted:
            return INTERRUPTED
        codes = {Verdict.OK: 0, Verdict.WARN: int(strict), Verdict.FAIL: 1, Verdict.UNKNOWN: 3}
        return codes[self.verdict]
