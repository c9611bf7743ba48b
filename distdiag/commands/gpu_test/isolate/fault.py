"""The faults that `--isolate --inject` makes, as typed. Pure."""

from __future__ import annotations

import re

from distdiag.commands.gpu_test.isolate.model import Fault
from distdiag.errors import UsageError

_HINT = "slow:RANK, slow:A-B (a link), slow:all, block:RANK, block:A-B, or split:RANKS such as split:0-3"


def parse_fault(text: str) -> Fault:
    """Read what is to be made slow, blocked or split. Raises UsageError."""
    kind, _, whom = text.partition(":")
    if kind not in ("slow", "block", "split"):
        raise UsageError(f"--inject {text!r} is no fault for --isolate", hint=_HINT)
    if whom == "all" and kind == "slow":
        return Fault(option=text, kind=kind, first=())
    ranks = _ranks(text, whom) if kind == "split" else tuple(int(one) for one in whom.split("-") if one.isdecimal())
    if (
        not ranks
        or (kind != "split" and len(set(ranks)) != len(ranks))
        or (kind != "split" and (len(ranks) > 2 or len(whom.split("-")) != len(ranks)))
    ):
        raise UsageError(f"--inject {text!r} does not name ranks", hint=_HINT)
    return Fault(option=text, kind=kind, first=tuple(sorted(set(ranks))))


def _ranks(text: str, words: str) -> tuple[int, ...]:
    found: list[int] = []
    for word in words.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", word)
        if match is None:
            raise UsageError(f"--inject {text!r} does not name ranks", hint=_HINT)
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)
