"""Parallel groups as people write them: tp=0-1/2-3;pp=0,2/1,3. Pure."""

from __future__ import annotations

import re

from distdiag.errors import UsageError

_ENTRY = re.compile(r"\s*([A-Za-z][\w-]*)\s*=\s*([0-9,\-/ ]+)\s*")
_MAX_RANK = 10_000_000


def parse_groups(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Read "NAME=RANKS/RANKS;NAME=..." into (name, ranks), one for each group. Raises UsageError."""
    found = []
    for entry in filter(str.strip, text.split(";")):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise UsageError(
                f"--groups: {entry.strip()!r} is not NAME=RANKS/RANKS", hint="--groups 'tp=0-1/2-3;pp=0,2/1,3'"
            )
        found += [(match[1], parse_ranks(part)) for part in match[2].split("/")]
    return tuple(found)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read "0-3,8". Raises UsageError."""
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if match is None or int(match[2] or match[1]) > _MAX_RANK or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"{text!r} are not ranks", hint="write them as 0-3,8")
        ranks += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(ranks)
