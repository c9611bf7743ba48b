"""Which two forwards are compared, if there are two. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distdiag.commands.overflow.show import words
from distdiag.commands.overflow.show.choose import wants
from distdiag.commands.overflow.show.diverge import Beside, beside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.show.choose import Chosen
    from distdiag.commands.overflow.show.kept import Side
    from distdiag.commands.overflow.show.model import Request


@dataclass(frozen=True)
class Compared:
    """Two forwards, and their names in a sentence; `beside` is None, with the reason, where they cannot be compared."""

    sides: tuple[Side, Side] | None
    names: tuple[str, str]
    factor: float
    beside: Beside | None
    why: str = ""
    batches: int = 1
    """In how many they were compared."""


def compare(request: Request, chosen: Chosen) -> Compared | None:
    """Compare the only two forwards of one file, or two files in the first batch of both where they part.

    None if there is nothing to compare: one forward, or more than two files or forwards.
    """
    if len(chosen.recordings) == 1:
        return _pair(request, chosen.sides) if len(chosen.sides) == 2 else None
    if len(chosen.recordings) != 2:
        return None
    a, b = ([side for side in chosen.sides if side.recording is one] for one in chosen.recordings)
    first, second = (words.source(one, chosen.recordings) for one in chosen.recordings)
    if not a or not b:
        lacks = first if not a else second
        why = f"there are no frames of {lacks}" + (" in these batches" if request.batches else "")
        return Compared(None, (first, second), request.factor, None, why) if a or b else None
    if len(a) == len(b) == 1:
        return _pair(request, chosen.sides)
    others = {(side.forward.batch, side.forward.turn): side for side in b}
    both = [(one, others[key]) for one in a if (key := (one.forward.batch, one.forward.turn)) in others]
    if not both:
        return Compared(None, (first, second), request.factor, None, "they have no batch in common")
    alike: Compared | None = None
    for pair in both:
        compared = _pair(request, pair)
        if compared.beside is not None and compared.beside.first is not None:
            return compared
        alike = compared if alike is None or alike.beside is None else alike
    return None if alike is None else replace(alike, names=(first, second), batches=len(both))


def _pair(request: Request, pair: Sequence[Side]) -> Compared:
    a, b = pair
    names = (words.side(a, pair), words.side(b, pair))
    found = beside(a.forward, b.forward, request.factor, wants(request))
    if not found.pairs:
        return Compared((a, b), names, request.factor, None, "no call of a module is in both")
    return Compared((a, b), names, request.factor, found)
