"""What --for and --only take. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

COMMAND = "trace sys"
KINDS = ("network", "file", "process", "desc", "memory", "signal")
"""Classes of calls, as strace names them."""
_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}
LONGEST_S = 600.0
_WHO = "execve,?execveat,clone,?clone3,fork,vfork"
"""Always traced: they tell which thread is of which process. They are rare."""


def parse_duration(text: str) -> float:
    """Read a time: 5, 5s, 500ms, 2m. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|)\s*", text)
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if match is None:
        raise UsageError(f"--for: {text!r} is not a time", hint="write seconds, or a unit: 5, 5s, 500ms, 2m")
    if not 0.0 < seconds <= LONGEST_S:
        raise UsageError(
            f"--for: {text} is {'no time' if not seconds else 'too long'}",
            hint=f"at most {LONGEST_S / 60:.0f}m: traced processes are slow",
        )
    return seconds


def parse_only(texts: Iterable[str]) -> tuple[str, ...]:
    """Read what --only takes: network,file. Raises UsageError."""
    found = dict.fromkeys(name.strip().lstrip("%") for text in texts for name in text.split(","))
    for name in found:
        if name not in KINDS:
            raise UsageError(f"--only: {name!r} is no kind of system call", hint=f"one of {', '.join(KINDS)}")
    return tuple(found)


def expression(only: Iterable[str]) -> str:
    """Write what strace's -e trace= takes; empty for all calls."""
    kinds = [f"%{name}" for name in only]
    return ",".join([*kinds, _WHO]) if kinds else ""
