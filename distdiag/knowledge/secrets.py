"""Patterns of secrets and of commands with a secret, as data (secrets.toml)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One pattern. `words`: every match contains one of them, in lower case; `source`: where the form is published.

    Groups of the pattern: `secret`: the secret, if only part of the match; `random`: must look random.
    """

    id: str
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    source: str


@cache
def rules() -> tuple[Rule, ...]:
    """List the rules in order of application."""
    rows = tomllib.loads(resources.files(__package__).joinpath("secrets.toml").read_text("utf-8"))
    found = [
        Rule(id=row["id"], words=tuple(row["words"]), pattern=re.compile(row["pattern"]), source=row["source"])
        for row in rows["rule"]
    ]
    for row in rows["prefix"]:
        starts = "|".join(map(re.escape, row["starts"]))
        pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{starts})(?P<random>[A-Za-z0-9_.~-]{{{row['rest']},800}}(?<!\.))")
        words = tuple(start.lower() for start in row["starts"])
        found.append(Rule(id=row["id"], words=words, pattern=pattern, source=row["source"]))
    return tuple(found)
