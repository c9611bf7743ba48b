"""Where the numbers of a forward grew: from its greatest number back to where that came from. Pure."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.commands.overflow.show.recording import INPUT, ForwardId, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.show.recording import Call, Forward

_REACHED = 0.9
"""A module that comes this near to the maximum is where that was reached; later modules pass it on."""
_FELL = 2.0
"""Where numbers were greater by this before, they did not grow from there: something (a norm) had made them small."""
_LEVEL = 1.25
"""Numbers within this of the smallest are not growing yet."""
_NEARBY = 8
"""Up to this many frames away two tensors count as the same by their maximum alone, where the minimum is unknown."""


class Growth(msgspec.Struct, frozen=True):
    """The path of a forward's greatest number, from the smallest to the greatest of `through`.

    `factor`: the last divided by the first; `share_of_limit`: of the maximum of its `dtype`.
    """

    of: ForwardId
    factor: float
    share_of_limit: float
    dtype: str
    through: tuple[Row, ...]


def growth_of(forward: Forward) -> Growth | None:
    """Follow the number that is nearest to its dtype's limit back to where it was small; None if there are no floats.

    An output is an input's source if it has the same greatest and smallest magnitude and as many numbers, and precedes
    it. Where there is none, code of the module around it made the input, from its own.
    """
    calls = forward.calls
    # Of equals the first: it made the input of the others.
    index = max(range(len(calls)), key=lambda at: calls[at].share, default=0)
    if not calls or not calls[index].share:
        return None
    flow = _Dataflow(calls)
    reached = _REACHED * calls[index].share
    # The same number may have been passed through a few modules, and out of the ones around them: find the first.
    index, row = flow.first_to_reach(index, reached)
    for at, earlier in flow.back(index, row)[1:]:
        if earlier.share_of_limit < reached:
            break
        index, row = (at, earlier) if earlier.tensor == INPUT else flow.first_to_reach(at, reached)
    path = [earlier for _, earlier in flow.back(index, row)]
    least = min(row.size for row in path)
    start = next(at for at, row in enumerate(path) if row.size <= _LEVEL * least)
    factor = min(row.size / path[start].size, sys.float_info.max)
    return Growth(forward.id, factor, row.share_of_limit, row.dtype, tuple(path[start::-1]))


class _Dataflow:
    """The frames of a forward, indexed to follow tensors back."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._called: dict[str, list[int]] = {}
        self._made: dict[tuple[object, ...], list[tuple[int, Row]]] = {}
        for index, call in enumerate(calls):
            self._called.setdefault(call.module, []).append(index)
            for row in call.rows:
                if row.most is not None:
                    self._made.setdefault(row.numbers, []).append((index, row))

    def back(self, index: int, row: Row) -> list[tuple[int, Row]]:
        """List where a tensor came from, itself first, up to where numbers were greater, or came from outside."""
        path = [(index, row)]
        least = row.size
        at = self._around(index) if row.tensor == INPUT else index
        while at is not None:
            given = self._calls[at].given
            if given is None or not 0 < given.size <= _FELL * least:
                break
            least = min(least, given.size)
            made = self._maker(given, self._begin(at))
            path.append(made or (at, given))
            at = made[0] if made else self._around(at)
        return path

    def first_to_reach(self, index: int, share: float) -> tuple[int, Row]:
        """Find the first tensor of a module, the ones below it first, that reaches a share of the limit; it has to."""
        for at in range(self._begin(index), index + 1):
            given, top = self._calls[at].given, max(self._calls[at].rows, key=lambda row: row.share_of_limit)
            if given is not None and given.share_of_limit >= share and self._maker(given, self._begin(at)) is None:
                return at, given
            if top.share_of_limit >= share:
                return at, top
        raise ValueError("no value reaches this share of the limit")

    def _maker(self, given: Row, before: int) -> tuple[int, Row] | None:
        """Find the last output before a frame that is this input."""
        made = self._made.get(given.numbers, [])
        last = bisect_left(made, before, key=lambda maker: maker[0]) - 1
        if last < 0 or (given.abs_min is None and before - made[last][0] > _NEARBY):
            return None
        return made[last]

    def _begin(self, index: int) -> int:
        """Find the first of the frames that were called from a frame; they precede it."""
        name = self._calls[index].module
        below = f"{name}." if name else ""
        begin = index
        while begin > 0 and self._calls[begin - 1].module.startswith(below) and self._calls[begin - 1].module:
            begin -= 1
        return begin

    def _around(self, index: int) -> int | None:
        """Find the frame that called a frame; None where it was not kept."""
        name = self._calls[index].module
        while name:
            name = name.rpartition(".")[0]
            called = self._called.get(name, [])
            after = bisect_right(called, index)
            if after < len(called):
                return called[after]
        return None
