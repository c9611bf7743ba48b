"""What a diagnosis comes to: findings, a verdict, an exit status. Pure data; printing is deliver's."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Data = TypeVar("Data")
INTERRUPTED = 130


class Level(StrEnum):
    """How bad a finding is. UNKNOWN: too little evidence to say."""

    FAIL = "fail"
    WARN = "warn"
    INFO = "info"
    UNKNOWN = "unknown"


class Verdict(StrEnum):
    """What all findings come to."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Where:
    """What a finding accuses, so that a script can drain it; empty where it is about all or none."""

    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Witnesses:
    """Who saw it, or suffers from it, without being at fault."""

    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fix:
    """What to do, in words, and the commands to paste."""

    text: str
    commands: tuple[str, ...] = ()


def quoted(word: str) -> str:
    """Quote a word of a command that is printed: for zsh too, where a word or value that begins with = or ^ is more."""
    return f"'{word}'" if word[:1] in ("=", "^") and shlex.quote(word) == word else shlex.quote(word)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or worth saying. The id never changes its meaning."""

    id: str
    level: Level
    title: str
    detail: str = ""
    where: Where = Where()
    witnesses: Witnesses = Witnesses()
    evidence: tuple[str, ...] = ()
    fix: Fix | None = None


@dataclass(frozen=True, kw_only=True)
class Report(Generic[Data]):
    """The answer of one command: the facts it rests on, and what they mean."""

    command: str
    data: Data
    findings: tuple[Finding, ...]
    summary: str
    interrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst level counts; what is unknown is never shown as fine."""
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
