"""Known failures as data: a pattern in somebody's words -> what it means, whether it is a cause, and the fix.

Each TOML file is a list of `[[failure]]` with `pattern` (a Python regular expression, searched), `role` ("cause", or
"consequence": what a rank says because another one failed), `means`, `fix`, optional `commands` and `source`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Known:
    """One known failure."""

    pattern: str
    role: str
    means: str
    fix: str
    source: str
    commands: tuple[str, ...] = ()


def recognise(text: str) -> Known | None:
    """Find the first known failure in a text; the order in the file is the order of trust."""
    return next((known for known in _all() if re.search(known.pattern, text)), None)


@cache
def _all() -> tuple[Known, ...]:
    import msgspec

    text = resources.files(__name__).joinpath("torch.toml").read_text("utf-8")
    return tuple(msgspec.convert(tomllib.loads(text)["failure"], list[Known]))
