"""The sizes to measure, as typed: 64MiB, 1KiB:1GiB, 1KiB:1GiB:x4, or several of these with commas. Pure."""

from __future__ import annotations

import re

from distdiag.errors import UsageError
from distdiag.options import parse_size

USUAL = {"cpu": "1KiB:64MiB:x4", "cuda": "1KiB:4GiB:x4"}
_MOST = 200


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes in bytes, ascending in each range, each once. Raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        found += _range(part.strip())
        if len(found) > _MOST:
            raise UsageError(f"--sizes {text}: more than {_MOST} sizes", hint="give a larger step: 1KiB:1GiB:x4")
    return tuple(dict.fromkeys(found))


def _range(text: str) -> list[int]:
    words = text.split(":")
    factor = _factor(words.pop()) if len(words) == 3 else 2.0
    if len(words) > 2:
        raise UsageError(f"--sizes {text}: too many colons", hint="write FIRST:LAST:xFACTOR, such as 1KiB:1GiB:x4")
    # As nccl-tests reads them: 1K is 1024 bytes, while 1KB is 1000.
    ends = [parse_size(re.sub(r"(?i)(?<=\d)([kmgt])$", r"\1i", word.strip())) for word in words]
    if ends[0] < 1:
        raise UsageError(f"--sizes {text}: a size of nothing", hint="start at 4 bytes or more")
    if ends[-1] < ends[0]:
        raise UsageError(f"--sizes {text}: the last is smaller than the first", hint=f"{words[-1]}:{words[0]}")
    found: list[int] = []
    size = float(ends[0])
    while size <= ends[-1] and len(found) <= _MOST:
        found.append(int(size))
        size *= factor
    return found


def _factor(text: str) -> float:
    match = re.fullmatch(r"[x*]?(\d+(?:\.\d+)?)", text.strip())
    if match is None or float(match[1]) < 1.1:
        raise UsageError(f"--sizes: {text!r} is no step", hint="write a factor above 1: x2 or x4")
    return float(match[1])
