"""Where the numbers of a forward grew: from its greatest number back to where that came from. Pure."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.commands.overflow.show.recording import INPUT, At, ForwardId, Given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.show.recording import Call, Forward, Row

_REACHED = 0.9
"""A module that comes this near to the maximum is where that was reached; later modules pass it on."""
_FELL = 2.0
"""Where numbers were greater by this before, they did not grow from there: something (a norm) had made them small."""
_LEVEL = 1.25
"""Numbers within this of the smallest are not growing yet."""
_NEARBY = 8
"""Up to this many frames away two tensors count as the same by their maximum alone, where the minimum is unknown."""


class Growth(msgspec.Struct, frozen=True):
    """How the greatest number of a forward came about: through modules, from the smallest to the last of `through`.

    `factor`: how many times greater it is than the first; `share_of_limit`: of what its `dtype` can hold.
    """

    of: ForwardId
    factor: float
    share_of_limit: float
    dtype: str
    through: tuple[At, ...]

    @property
    def start(self) -> At:
        """Where the numbers begin to grow."""
        return self.through[0]

    @property
    def end(self) -> At:
        """Where they are greatest."""
        return self.through[-1]


def growth_of(forward: Forward) -> Growth | None:
    """Follow the number that is nearest to its dtype's limit back to where it was small; None if there are no floats.

    What made an input is known by its numbers: an output before it that has the same greatest and smallest magnitude
    and as many numbers. Where there is none the code of the module around it made it, of what that was given.
    """
    calls = forward.calls
    # Of equals the first: it made what the others were given.
    index = max(range(len(calls)), key=lambda at: calls[at].share, default=0)
    if not calls or not calls[index].share:
        return None
    flow = _Dataflow(calls)
    reached = _REACHED * calls[index].share
    # The same number may have been handed through a few modules, and out of the ones around them: name the first.
    index, point = flow.first_to_reach(index, reached)
    for at, earlier in flow.back(index, point)[1:]:
        if earlier.share < reached:
            break
        index, point = (at, earlier) if earlier.tensor == INPUT else flow.first_to_reach(at, reached)
    points = [earlier for _, earlier in flow.back(index, point)]
    least = min(point.most for point in points)
    start = next(at for at, point in enumerate(points) if point.most <= _LEVEL * least)
    end = points[0]
    factor = min(end.most / points[start].most, sys.float_info.max)
    return Growth(forward.id, factor, end.share, end.dtype, tuple(points[start::-1]))


class _Dataflow:
    """The frames of a forward, and what is needed to go back through them."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._called: dict[str, list[int]] = {}
        self._made: dict[Given, list[tuple[int, Row]]] = {}
        for index, call in enumerate(calls):
            self._called.setdefault(call.module, []).append(index)
            for row in call.rows:
                if row.most is not None:
                    self._made.setdefault(_as_given(row), []).append((index, row))

    def back(self, index: int, point: At) -> list[tuple[int, At]]:
        """List where a tensor came from, itself first, up to where numbers were greater, or came from outside."""
        points = [(index, point)]
        least = point.most
        at = self._around(index) if point.tensor == INPUT else index
        while at is not None:
            given = self._calls[at].given
            if given is None or not 0 < given.most <= _FELL * least:
                break
            least = min(least, given.most)
            made = self._maker(given, self._begin(at))
            if made is None:
                points.append((at, self._calls[at].input(given)))
                at = self._around(at)
            else:
                at, row = made
                points.append((at, self._calls[at].output(row)))
        return points

    def first_to_reach(self, index: int, share: float) -> tuple[int, At]:
        """Find the first tensor in a module, the ones below it first, that comes to a share; it has to."""
        for at in range(self._begin(index), index + 1):
            call = self._calls[at]
            given, top = call.given, max(call.rows, key=lambda row: row.share_of_limit)
            if given is not None and given.share >= share and self._maker(given, self._begin(at)) is None:
                return at, call.input(given)
            if top.share_of_limit >= share:
                return at, call.output(top)
        raise ValueError("no value reaches this share of the limit")

    def _maker(self, given: Given, before: int) -> tuple[int, Row] | None:
        """Find the last output before a frame that is what was given."""
        made = self._made.get(given, [])
        last = bisect_left(made, before, key=lambda maker: maker[0]) - 1
        if last < 0 or (given.least is None and before - made[last][0] > _NEARBY):
            return None
        return made[last]

    def _begin(self, index: int) -> int:
        """Find the first of the frames that were called from a frame; they stand before it."""
        name = self._calls[index].module
        begin = index
        while begin > 0 and _is_below(self._calls[begin - 1].module, name):
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


def _is_below(name: str, parent: str) -> bool:
    return name.startswith(f"{parent}.") if parent else bool(name)


def _as_given(row: Row) -> Given:
    return Given(row.abs_min, row.most or 0.0, -1 if row.shape is None else math.prod(row.shape), row.dtype)
