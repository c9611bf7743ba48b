"""Patterns of secrets and of commands with a secret, as data (secrets.toml)."""

from __future__ import annotations

import re
from functools import cache

from distdiag.knowledge.tables import load
from distdiag.record import record


@record(kw_only=True)
class Rule:
    """One pattern. `words`: every match contains one of them, in lower case; `source`: where the form is published.

    Groups of the pattern: `secret`: the secret, if only part of the match; `random`: must look random.
    """

    id: str
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    source: str


@record
class _Prefix:
    id: str
    starts: tuple[str, ...]
    rest: int
    source: str

    def rule(self) -> Rule:
        starts = "|".join(map(re.escape, self.starts))
        pattern = rf"(?<![A-Za-z0-9])(?:{starts})(?P<random>[A-Za-z0-9_.~-]{{{self.rest},800}}(?<!\.))"
        words = tuple(start.lower() for start in self.starts)
        return Rule(id=self.id, words=words, pattern=re.compile(pattern), source=self.source)


@cache
def rules() -> tuple[Rule, ...]:
    """List the rules in order of application."""
    prefixes = load("secrets", "prefix", tuple[_Prefix, ...])
    return (*load("secrets", "rule", tuple[Rule, ...]), *(prefix.rule() for prefix in prefixes))
