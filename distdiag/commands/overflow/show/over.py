"""One number of each module for several forwards: the table over batches or ranks. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from distdiag.commands.overflow.show.choose import wants
from distdiag.commands.overflow.show.diverge import occurrences, ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.show.compare import Compared
    from distdiag.commands.overflow.show.kept import Row, Side
    from distdiag.commands.overflow.show.model import Request

_FEW = 24
_MOST_APART = 12
_AROUND = 3
_Key = tuple[str, int, str]


class Across(NamedTuple):
    """One output in all forwards, None where a forward lacks it; `apart` is how many times the numbers differ."""

    row: Row
    each: tuple[Row | None, ...]

    @property
    def apart(self) -> float:
        """How many times the greatest of them is the smallest; infinity where one is nan or inf, or 0."""
        known = [one.most for one in self.each if one is not None and one.most is not None]
        if len(known) < 2 or all(not math.isfinite(one) for one in known):
            return 1.0
        return ratio(min(known), max(known)) if all(map(math.isfinite, known)) else math.inf


def across(request: Request, sides: Sequence[Side], compared: Compared | None) -> tuple[list[Across], int]:
    """Choose the outputs to show, and count the others: those furthest apart, and those around where they diverge."""
    rows = _all(request, sides)
    if request.everything or len(rows) <= _FEW:
        return rows, 0
    apart = sorted(range(len(rows)), key=lambda at: -rows[at].apart)[:_MOST_APART]
    kept = {0, len(rows) - 1, *apart}
    parts = [] if compared is None or compared.beside is None else [compared.beside.first, compared.beside.in_numbers]
    for part in parts:
        at = next((at for at, one in enumerate(rows) if part is not None and one.row == part.a), None)
        if at is not None:
            kept |= set(range(max(0, at - _AROUND), min(len(rows), at + _AROUND + 1)))
    return [rows[at] for at in sorted(kept)], len(rows) - len(kept)


def _all(request: Request, sides: Sequence[Side]) -> list[Across]:
    fits = wants(request)
    columns: list[dict[_Key, Row]] = []
    for side in sides:
        named = occurrences(side.forward.calls())
        columns.append({(*name, row.place.tensor): row for name, call in named.items() for row in call.rows})
    # In the order of the forward that has most; what only others have comes behind.
    order: dict[_Key, Row] = {}
    for column in sorted(columns, key=len, reverse=True):
        order = {**order, **{key: row for key, row in column.items() if key not in order}}
    return [Across(row, tuple(column.get(key) for column in columns)) for key, row in order.items() if fits(key[0])]
