"""Calls in source lines that may wait, as data (calls.toml)."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources

_NOISE = re.compile(r"""#.*|"[^"]*"|'[^']*'""")


@cache
def call_in(source: str) -> tuple[str, str]:
    """Return class and name of a call that may wait, e.g. ("communication wait", "all_reduce"); else ("", "")."""
    text = _NOISE.sub("", source)
    for kind, pattern in _rules():
        found = pattern.search(text)
        if found is not None:
            return kind, next((group for group in found.groups() if group), "")
    return "", ""


@cache
def _rules() -> tuple[tuple[str, re.Pattern[str]], ...]:
    text = resources.files(__package__).joinpath("calls.toml").read_text("utf-8")
    return tuple((entry["class"], re.compile(entry["call"])) for entry in tomllib.loads(text)["call"])
