"""Which numbers of a forward grew, and where two forwards diverge. Pure."""

from __future__ import annotations

import math
import shlex
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.commands.overflow.show.recording import INPUT, ForwardId, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.overflow.show.recording import Call, Forward

COMMAND = "overflow show"
FEW = 24
"""Rows shown at once; of more rows only the important ones."""
MOST_ROWS = 100_000
"""Limit with --all; --batch and --module select from larger files."""
_REACHED = 0.9
"""A module within this share of the maximum reached it; later modules pass it on."""
_FELL = 2.0
"""Inputs larger than their output by this factor end the path: a norm, for instance, shrank the values."""
_LEVEL = 1.25
"""Values within this factor of the smallest do not grow yet."""
_NEARBY = 8
"""Distance in frames up to which an equal maximum alone, without minimum, identifies a tensor."""
_BEFORE, _AFTER = 3, 8
"""Outputs to show around a divergence."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Command-line options. `module`: name pattern, empty for all; `batches`: empty for all.

    `factor`: values of two sides differing by more diverge. `everything`: every row of every batch.
    """

    program: str = "distdiag"
    paths: tuple[str, ...]
    module: str = ""
    batches: tuple[int, ...] = ()
    factor: float = 2.0
    everything: bool = False

    def again(self, *words: str) -> str:
        """Write the command on the same files with other options."""
        return f"{self.program} {COMMAND} {shlex.join([*self.paths, *words])}"

    def fits(self, module: str) -> bool:
        """Return whether --module selects a module."""
        return not self.module or fnmatchcase(module, self.module)


class Names:
    """Names of forwards among each other: "rank 1", "batch 3", "rank 1, batch 3"; without distinct ranks the files'."""

    def __init__(self, among: Sequence[ForwardId]) -> None:
        sources = {(each.path, each.rank) for each in among}
        self._are_several = len(sources) > 1
        self._have_ranks = len({rank for _, rank in sources if rank is not None}) == len(sources)
        self._has_many_batches = len({each.batch for each in among}) > 1

    def of(self, forward: ForwardId) -> str:
        """Return the name of a forward."""
        source = f"rank {forward.rank}" if self._have_ranks else forward.path
        parts = [source] if self._are_several else []
        return ", ".join([*parts, f"batch {forward.batch}"] if self._has_many_batches or not parts else parts)

    def within(self, forward: ForwardId) -> str:
        """Return where: "in batch 3", "on rank 1 in batch 3"."""
        name = self.of(forward)
        return "on " + name.replace(", ", " in ", 1) if name.startswith("rank ") else f"in {name}"


class Growth(msgspec.Struct, frozen=True):
    """The path of a forward's largest value, growing along `through`.

    `factor`: the last divided by the first; `share_of_limit`: of the maximum of its `dtype`.
    """

    of: ForwardId
    factor: float
    share_of_limit: float
    dtype: str
    through: tuple[Row, ...]


def growth_of(forward: Forward) -> Growth | None:
    """Trace the value nearest to its dtype's limit back to its small origin; None without floats.

    An earlier output with the same largest and smallest magnitude and element count is an input's source. Without one,
    the parent module's code computed the input from the parent's own input.
    """
    reached = _REACHED * forward.peak()
    if not reached:
        return None
    flow = _Dataflow(forward.calls)
    path = flow.back(*flow.first_to_reach(reached))
    row, least = path[0], min(row.size for row in path)
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

    def first_to_reach(self, share: float) -> tuple[int, Row]:
        """Return the first tensor that reaches a share of the limit, which one must: an output or a new input."""
        for at, call in enumerate(self._calls):
            is_new = call.given is not None and self._maker(call.given, self._begin(at)) is None
            for row in (*([call.given] if call.given and is_new else []), *call.rows):
                if row.share_of_limit >= share:
                    return at, row
        raise ValueError("no value reaches this share of the limit")

    def back(self, index: int, row: Row) -> list[Row]:
        """Return the path of a tensor to its source, itself first; it ends at larger values or at outside input."""
        path, least = [row], row.size
        at = self._around(index) if row.tensor == INPUT else index
        while at is not None:
            given = self._calls[at].given
            if given is None or not 0 < given.size <= _FELL * least:
                break
            least = min(least, given.size)
            made = self._maker(given, self._begin(at))
            path.append(made[1] if made else given)
            at = made[0] if made else self._around(at)
        return path

    def _maker(self, given: Row, before: int) -> tuple[int, Row] | None:
        """Find the last output before a frame that equals this input."""
        made = self._made.get(given.numbers, [])
        last = bisect_left(made, before, key=lambda maker: maker[0]) - 1
        if last < 0 or (given.abs_min is None and before - made[last][0] > _NEARBY):
            return None
        return made[last]

    def _begin(self, index: int) -> int:
        """Return the first of the frames called from this frame, which precede it."""
        name = self._calls[index].module
        below = f"{name}." if name else ""
        begin = index
        while begin > 0 and self._calls[begin - 1].module.startswith(below) and self._calls[begin - 1].module:
            begin -= 1
        return begin

    def _around(self, index: int) -> int | None:
        """Return the caller of a frame; None if it was not kept."""
        name = self._calls[index].module
        while name:
            name = name.rpartition(".")[0]
            called = self._called.get(name, [])
            after = bisect_right(called, index)
            if after < len(called):
                return called[after]
        return None


class Mismatch(StrEnum):
    """Difference of two outputs; `kind`: a tensor on one side only. Other shapes are none: other data explains them."""

    KIND = "kind"
    NOT_FINITE = "not-finite"
    DTYPE = "dtype"
    NUMBERS = "numbers"


class Difference(msgspec.Struct, frozen=True):
    """Two different outputs of the same name, and the largest inputs of their modules."""

    what: Mismatch
    a: Row
    b: Row
    given_a: float | None
    given_b: float | None


class Divergence(msgspec.Struct, frozen=True):
    """Two forwards, `compared` calls of both. `first`: the first difference, or None.

    `around`: outputs of both near the divergence, all with --verbose.
    """

    names: tuple[str, str]
    a: ForwardId
    b: ForwardId
    factor: float
    compared: int
    first: Difference | None
    around: tuple[tuple[Row, Row], ...]


def compare(request: Request, sides: Sequence[Sequence[Forward]], names: Sequence[str]) -> Divergence | str | None:
    """Compare the only two forwards of one file, or the first diverging batch of two files.

    Returns the reason if they are not comparable; None without exactly two.
    """
    forwards = [forward for side in sides for forward in side]
    if len(sides) > 2 or not forwards or (len(sides) == 1 and len(forwards) != 2):
        return None
    pairs = [(forwards[0], forwards[1])] if len(forwards) == 2 else []
    if len(sides) == 2 and [len(side) for side in sides] != [1, 1]:
        others = {forward.id.batch: forward for forward in sides[1]}
        pairs = [(forward, others[forward.id.batch]) for forward in sides[0] if forward.id.batch in others]
    if not pairs:
        empty = [name for name, side in zip(names, sides, strict=True) if not side]
        why = f"no frames of {empty[0]}" if empty else "no batch in common"
        return f"{names[0]} and {names[1]} cannot be compared: {why}"
    found = [compare_forwards(request, *pair) for pair in pairs]
    first = next((each for each in found if each.first), max(found, key=lambda each: each.compared > 0))
    if not first.compared:
        return f"{first.names[0]} and {first.names[1]} cannot be compared: no module call in common"
    return first if first.first else msgspec.structs.replace(first, compared=sum(each.compared for each in found))


def compare_forwards(request: Request, a: Forward, b: Forward) -> Divergence:
    """Compare the calls of two forwards; values differing by more than --factor diverge.

    Calls are matched by number if both forwards called the same modules in the same order, else by module and its call
    count.
    """
    numbers = [{call.number: call.module for call in side.calls} for side in (a, b)]
    shared = numbers[0].keys() & numbers[1].keys()
    in_order = bool(shared) and all(numbers[0][number] == numbers[1][number] for number in shared)
    keyed_a, keyed_b = (_keyed(side.calls, by_number=in_order) for side in (a, b))
    pairs = [(call, keyed_b[key]) for key, call in keyed_a.items() if key in keyed_b and request.fits(call.module)]
    first = next(_differences(pairs, request.factor), None)
    names = Names([a.id, b.id])
    both = [rows for pair in pairs for rows in _rows(pair)]
    if not request.everything and len(both) > FEW:
        at = next((at for at, (row, _) in enumerate(both) if first is not None and row is first.a), -_AFTER - 1)
        both = both[max(0, at - _BEFORE) : at + _AFTER + 1]
    around = tuple(both[:MOST_ROWS])
    return Divergence((names.of(a.id), names.of(b.id)), a.id, b.id, request.factor, len(pairs), first, around)


def _keyed(calls: Sequence[Call], *, by_number: bool) -> dict[tuple[str, int], Call]:
    seen: Counter[str] = Counter()
    found = {}
    for call in calls:
        found[call.module, call.number if by_number else seen[call.module]] = call
        seen[call.module] += 1
    return found


def _rows(pair: tuple[Call, Call]) -> list[tuple[Row, Row]]:
    others = {row.tensor: row for row in pair[1].rows}
    return [(row, others[row.tensor]) for row in pair[0].rows if row.tensor in others]


def ratio(a: float, b: float) -> float:
    """Return the ratio of two magnitudes, 1 or more; infinity if only one is 0."""
    low, high = min(a, b), max(a, b)
    return high / low if low else math.inf if high else 1.0


def _differences(pairs: Sequence[tuple[Call, Call]], factor: float) -> Iterator[Difference]:
    for pair in pairs:
        given_a, given_b = (None if call.given is None else call.given.most for call in pair)
        for a, b in _rows(pair):
            differ = a.most is not None and b.most is not None and ratio(a.most, b.most) > factor
            if what := _unlike(a, b) or (Mismatch.NUMBERS if differ else None):
                yield Difference(what, a, b, given_a, given_b)


def _unlike(a: Row, b: Row) -> Mismatch | None:
    if bool(a.text) != bool(b.text) or (a.abs_max is None) != (b.abs_max is None):
        return Mismatch.KIND
    if a.is_bad != b.is_bad:
        return Mismatch.NOT_FINITE
    return Mismatch.DTYPE if a.dtype != b.dtype else None
