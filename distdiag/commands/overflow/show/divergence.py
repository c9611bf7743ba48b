"""Two forwards beside each other: which two, and the first module whose outputs differ. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.commands.overflow.show.selection import FEW, MOST_ROWS, Names, matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.commands.overflow.show.recording import At, Call, Forward, ForwardId, Row
    from distdiag.commands.overflow.show.selection import Request, Selection

_BEFORE, _AFTER = 3, 8
"""Outputs to show around the place where two forwards diverge."""
_SAME = 1.001
"""Numbers within this are the same, but for another order of adding up."""
_Key = TypeVar("_Key")


class Mismatch(StrEnum):
    """How two outputs differ."""

    KIND = "kind"
    """A tensor on one side, none on the other."""
    NOT_FINITE = "not-finite"
    DTYPE = "dtype"
    SHAPE = "shape"
    NUMBERS = "numbers"


class Pair(NamedTuple):
    """The same call on both sides."""

    a: Call
    b: Call

    def rows(self) -> list[tuple[Row, Row]]:
        """Return the outputs that both have."""
        others = {row.tensor: row for row in self.b.rows}
        return [(row, others[row.tensor]) for row in self.a.rows if row.tensor in others]


class Difference(msgspec.Struct, frozen=True):
    """Where two outputs of the same name differ, by how much (`ratio`, of numbers), and what went in, abs max.

    `of_least`: by their smallest magnitudes. `ratio` is None where one of the numbers is 0.
    """

    what: Mismatch
    a: Row
    b: Row
    given_a: float | None
    given_b: float | None
    ratio: float | None = None
    of_least: bool = False


class Divergence(msgspec.Struct, frozen=True):
    """Two forwards beside each other. `first` is None if they do not differ; `in_numbers` is the first but for shapes.

    `only_a` and `only_b`: calls that one side alone has. `around`: outputs of both around where they differ, with
    --all every one.
    """

    a: ForwardId
    b: ForwardId
    factor: float
    compared: int
    first: Difference | None
    in_numbers: Difference | None
    only_a: tuple[At, ...]
    only_b: tuple[At, ...]
    around: tuple[tuple[Row, Row], ...]


@dataclass(frozen=True)
class Comparison:
    """Two forwards, and their names in a sentence; `found` is None, with the reason, where they cannot be compared.

    `batches`: in how many they were compared.
    """

    names: tuple[str, str]
    found: Divergence | None
    why: str = ""
    batches: int = 1


def compare(request: Request, selection: Selection) -> Comparison | None:
    """Compare the only two forwards of one file, or two files in the first batch of both where they diverge.

    None if there is nothing to compare: one forward, or more than two files or forwards.
    """
    recordings = selection.recordings
    if len(recordings) == 1:
        return _compare(request, *selection.forwards) if len(selection.forwards) == 2 else None
    if len(recordings) != 2:
        return None
    a, b = (selection.of(recording) for recording in recordings)
    first, second = (selection.name_of(recording) for recording in recordings)
    if not a or not b:
        why = f"no frames of {second if a else first}" + (" in these batches" if request.batches else "")
        return Comparison((first, second), None, why) if a or b else None
    if len(a) == len(b) == 1:
        return _compare(request, *a, *b)
    others = {(forward.id.batch, forward.id.forward): forward for forward in b}
    both = [(each, others[key]) for each in a if (key := (each.id.batch, each.id.forward)) in others]
    if not both:
        return Comparison((first, second), None, "no batch in common")
    alike: Comparison | None = None
    for pair in both:
        comparison = _compare(request, *pair)
        if comparison.found is not None and comparison.found.first is not None:
            return comparison
        alike = comparison if alike is None or alike.found is None else alike
    return None if alike is None else replace(alike, names=(first, second), batches=len(both))


def _compare(request: Request, a: Forward, b: Forward) -> Comparison:
    labels = Names([a.id, b.id])
    found = compare_forwards(request, a, b)
    if not found.compared:
        return Comparison((labels.of(a.id), labels.of(b.id)), None, "no module call in common")
    return Comparison((labels.of(a.id), labels.of(b.id)), found)


def compare_forwards(request: Request, a: Forward, b: Forward) -> Divergence:
    """Put two forwards beside each other; numbers that differ by more than --factor diverge.

    Calls are matched by their number where both forwards called the same modules in the same order, else by module and
    how often it was called before. A frame that one side alone has counts only if the other kept frames around it.
    """
    fits = matches(request.module)
    keyed_a, keyed_b = _keyed(a.calls, b.calls)
    pairs = [Pair(call, keyed_b[key]) for key, call in keyed_a.items() if key in keyed_b and fits(call.module)]
    found = list(_differences(pairs, request.factor))
    of_numbers = (difference for difference in found if difference.what in (Mismatch.NUMBERS, Mismatch.NOT_FINITE))
    first, in_numbers = found[0] if found else None, next(of_numbers, None)
    return Divergence(
        a=a.id,
        b=b.id,
        factor=request.factor,
        compared=len(pairs),
        first=first,
        in_numbers=in_numbers,
        only_a=tuple(call.output(call.rows[0]) for call in _only(keyed_a, keyed_b, b.calls) if fits(call.module)),
        only_b=tuple(call.output(call.rows[0]) for call in _only(keyed_b, keyed_a, a.calls) if fits(call.module)),
        around=tuple(_around(request, pairs, [each for each in (first, in_numbers) if each is not None])),
    )


def _around(request: Request, pairs: Sequence[Pair], found: Sequence[Difference]) -> list[tuple[Row, Row]]:
    """Choose the outputs of both around where they differ; all of them if they are few, or asked for."""
    both = [rows for pair in pairs for rows in pair.rows()]
    if request.everything or len(both) <= FEW:
        return both[:MOST_ROWS]
    centers = [at for at, (row, _) in enumerate(both) if any(row is difference.a for difference in found)]
    return [rows for at, rows in enumerate(both) if any(-_BEFORE <= at - center <= _AFTER for center in centers)]


def ratio(a: float, b: float) -> float:
    """Return how many times one magnitude is the other, 1 or more; infinity where only one of them is 0."""
    low, high = min(a, b), max(a, b)
    return high / low if low else float("inf") if high else 1.0


def _occurrences(calls: Iterable[Call]) -> dict[tuple[str, int], Call]:
    """Name each call by its module and how often that was called before."""
    seen: dict[str, int] = {}
    named = {}
    for call in calls:
        count = seen[call.module] = seen.get(call.module, -1) + 1
        named[call.module, count] = call
    return named


def _keyed(a: Sequence[Call], b: Sequence[Call]) -> tuple[dict[tuple[str, int], Call], dict[tuple[str, int], Call]]:
    by_number = {call.number: call for call in a}
    shared = [(by_number[call.number].module, call.module) for call in b if call.number in by_number]
    if shared and all(name == other for name, other in shared):
        return ({(call.module, call.number): call for call in a}, {(call.module, call.number): call for call in b})
    return _occurrences(a), _occurrences(b)


def _only(own: dict[_Key, Call], other: dict[_Key, Call], others: Sequence[Call]) -> list[Call]:
    if not others:
        return []
    first, last = others[0].number, others[-1].number
    whole = first == 0 and not others[-1].module
    return [call for key, call in own.items() if key not in other and (whole or first <= call.number <= last)]


def _differences(pairs: Sequence[Pair], factor: float) -> Iterator[Difference]:
    """Yield all differences, in order.

    The smallest magnitude of a tensor counts only as long as the sides were the same: of other data it is chance.
    """
    same = False
    for pair in pairs:
        both = pair.rows()
        given_a, given_b = (None if call.given is None else call.given.most for call in pair)
        for a, b in both:
            what = _unlike(a, b)
            if what is not None:
                yield Difference(what, a, b, given_a, given_b)
            times, of_least = _times(a, b, factor, same=same)
            if times is not None:
                known = times if math.isfinite(times) else None
                yield Difference(Mismatch.NUMBERS, a, b, given_a, given_b, known, of_least)
        same = (same or pair is pairs[0]) and all(_is_same(a, b) for a, b in both)


def _unlike(a: Row, b: Row) -> Mismatch | None:
    if bool(a.text) != bool(b.text) or (a.abs_max is None) != (b.abs_max is None):
        return Mismatch.KIND
    if a.is_bad != b.is_bad:
        return Mismatch.NOT_FINITE
    if a.dtype != b.dtype:
        return Mismatch.DTYPE
    return Mismatch.SHAPE if a.shape != b.shape else None


def _times(a: Row, b: Row, factor: float, *, same: bool) -> tuple[float | None, bool]:
    """Return how many times their numbers differ, if by more than a factor, and whether it is the smallest that do."""
    if a.most is None or b.most is None:
        return None, False
    greatest = ratio(a.most, b.most)
    if greatest > factor:
        return greatest, False
    least = ratio(a.abs_min, b.abs_min) if isinstance(a.abs_min, float) and isinstance(b.abs_min, float) else 1.0
    return (least, True) if same and least > factor else (None, False)


def _is_same(a: Row, b: Row) -> bool:
    if a.abs_max is None or b.abs_max is None:
        return a.abs_max is b.abs_max
    if a.most is None or b.most is None or (a.dtype, a.shape, a.text) != (b.dtype, b.shape, b.text):
        return False
    least = ratio(a.abs_min, b.abs_min) if isinstance(a.abs_min, float) and isinstance(b.abs_min, float) else 1.0
    return ratio(a.most, b.most) <= _SAME and least <= _SAME
