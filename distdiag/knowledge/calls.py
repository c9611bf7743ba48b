"""Calls in source lines that may wait, as data (calls.toml)."""

from __future__ import annotations

import re
from functools import cache

from distdiag.knowledge.tables import load
from distdiag.record import record

_NOISE = re.compile(r"""#.*|"[^"]*"|'[^']*'""")


@record
class _Rule:
    kind: str
    call: re.Pattern[str]


@cache
def call_in(source: str) -> tuple[str, str]:
    """Return class and name of a call that may wait, e.g. ("communication wait", "all_reduce"); else ("", "")."""
    text = _NOISE.sub("", source)
    for rule in load("calls", "call", tuple[_Rule, ...]):
        if found := rule.call.search(text):
            return rule.kind, next((group for group in found.groups() if group), "")
    return "", ""
