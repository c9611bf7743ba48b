"""Forms of secrets and of commands that take one, as data (secrets.toml)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One form. `words`: one of them, in lower case, is in every text that matches; `source`: where it is published.

    Groups of the pattern: `secret` is the secret where the match has more than that; `random` must look random.
    """

    id: str
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    source: str


@cache
def rules() -> tuple[Rule, ...]:
    """List the rules in the order in which they apply."""
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
