"""Where the numbers of a forward grew: from its greatest number back to where that came from. Pure."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.commands.overflow.show.kept import INPUT, LIMITS, Given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.show.kept import Call, Row
_REACHED = 0.9
"""A module that comes so near to the greatest number is where that was reached; later ones hand it on."""
_FELL = 2.0
"""Where numbers were greater by this before, they did not grow from there: something (a norm) had made them small."""
_LEVEL = 1.25
"""Numbers within this of the smallest are not growing yet."""
_NEARBY = 8
"""So many frames away a tensor is taken for the same by its greatest number alone, where the smallest is not known."""


@dataclass(frozen=True)
class Point:
    """A tensor on the way: an output of a module or, where what made it is no module, an input (INPUT)."""

    call: Call
    tensor: str
    most: float
    dtype: str

    @property
    def share(self) -> float:
        """How much of what its dtype can hold that is."""
        return self.most / LIMITS.get(self.dtype, math.inf)


@dataclass(frozen=True)
class Chain:
    """A way that numbers took through modules, from `points[0]`, where they were smallest, to the last."""

    points: tuple[Point, ...]

    @property
    def start(self) -> Point:
        """Where they begin to grow."""
        return self.points[0]

    @property
    def end(self) -> Point:
        """Where they are greatest."""
        return self.points[-1]

    @property
    def factor(self) -> float:
        """How many times greater they are at the end."""
        return min(self.end.most / self.start.most, sys.float_info.max)


def chain_of(calls: Sequence[Call]) -> Chain | None:
    """Follow the number that is nearest to its dtype's limit back to where it was small; None if there are no floats.

    What made an input is known by its numbers: an output before it that has the same greatest and smallest magnitude
    and as many numbers. Where there is none the code of the module around it made it, of what that was given.
    """
    way = _Way(calls)
    index = max(range(len(calls)), key=way.share, default=0)  # of equals the first: it made what the others were given
    if not calls or not way.share(index):
        return None
    reached = _REACHED * way.share(index)
    # The same number may have been handed through a few modules, and out of the ones around them: name the first.
    index, point = way.first_to_reach(index, reached)
    for at, earlier in way.back(index, point)[1:]:
        if earlier.share < reached:
            break
        index, point = (at, earlier) if earlier.tensor == INPUT else way.first_to_reach(at, reached)
    points = [one for _, one in way.back(index, point)]
    least = min(one.most for one in points)
    start = next(at for at, one in enumerate(points) if one.most <= _LEVEL * least)
    return Chain(tuple(points[start::-1]))


class _Way:
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

    def share(self, index: int) -> float:
        """Give the greatest share of a limit of what a module gave back, or was given."""
        top, given = self._calls[index].top, self._calls[index].given
        return max(top.share if top else 0.0, given.share if given else 0.0)

    def back(self, index: int, point: Point) -> list[tuple[int, Point]]:
        """List where a tensor came from, itself first, up to where numbers were greater, or came from outside."""
        points = [(index, point)]
        least = point.most
        at = self._around(index) if point.tensor == INPUT else index
        while at is not None:
            call = self._calls[at]
            given = call.given
            if given is None or not 0 < given.most <= _FELL * least:
                break
            least = min(least, given.most)
            made = self._maker(given, self._begin(at))
            if made is None:
                points.append((at, Point(call, INPUT, given.most, given.dtype)))
                at = self._around(at)
            else:
                at, found = made
                points.append((at, Point(self._calls[at], found.place.tensor, given.most, given.dtype)))
        return points

    def first_to_reach(self, index: int, share: float) -> tuple[int, Point]:
        """Find the first tensor in a module, the ones below it first, that comes to a share; it has to."""
        for at in range(self._begin(index), index + 1):
            call = self._calls[at]
            given, top = call.given, call.top
            if given is not None and given.share >= share and self._maker(given, self._begin(at)) is None:
                return at, Point(call, INPUT, given.most, given.dtype)
            if top is not None and top.share >= share:
                return at, Point(call, top.place.tensor, top.most or 0.0, top.spec.dtype)
        raise ValueError("nothing comes to this share")

    def _maker(self, given: Given, before: int) -> tuple[int, Row] | None:
        """Find the last output before a frame that is what was given."""
        made = self._made.get(given, [])
        last = bisect_left(made, before, key=lambda one: one[0]) - 1
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
    shape = row.spec.shape
    return Given(row.least, row.most or 0.0, -1 if shape is None else math.prod(shape), row.spec.dtype)
