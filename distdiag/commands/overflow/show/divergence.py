"""Two forwards side by side: which two, and the first module whose outputs differ. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.commands.overflow.show.recording import ForwardId, Row  # noqa: TC001 - msgspec reads the annotations
from distdiag.commands.overflow.show.selection import FEW, MOST_ROWS, Names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distdiag.commands.overflow.show.recording import Call, Forward
    from distdiag.commands.overflow.show.selection import Request, Selection

    Keyed = Mapping[tuple[str, int], Call]

_BEFORE, _AFTER = 3, 8
"""Outputs to show around the place where two forwards diverge."""


class Mismatch(StrEnum):
    """How two outputs differ; `kind`: a tensor on one side, none on the other."""

    KIND = "kind"
    NOT_FINITE = "not-finite"
    DTYPE = "dtype"
    SHAPE = "shape"
    NUMBERS = "numbers"


class Difference(msgspec.Struct, frozen=True):
    """Two outputs of the same name that differ, the `ratio` of their abs max, None with 0, and the largest inputs."""

    what: Mismatch
    a: Row
    b: Row
    given_a: float | None
    given_b: float | None
    ratio: float | None = None


class Divergence(msgspec.Struct, frozen=True):
    """Two forwards. `first` is None if they do not differ; `in_numbers` is the first that is no other shape or dtype.

    `only_a` and `only_b`: calls of one side alone. `around`: outputs of both around where they differ, with --all every
    one.
    """

    a: ForwardId
    b: ForwardId
    factor: float
    compared: int
    first: Difference | None
    in_numbers: Difference | None
    only_a: tuple[Row, ...]
    only_b: tuple[Row, ...]
    around: tuple[tuple[Row, Row], ...]


@dataclass(frozen=True)
class Comparison:
    """Two forwards by name; `found` is None, with the reason, where they cannot be compared.

    `batches`: the number of batches compared.
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
    labels, found = Names([a.id, b.id]), compare_forwards(request, a, b)
    names = labels.of(a.id), labels.of(b.id)
    return Comparison(names, found) if found.compared else Comparison(names, None, "no module call in common")


def compare_forwards(request: Request, a: Forward, b: Forward) -> Divergence:
    """Compare two forwards; numbers that differ by more than --factor diverge.

    Calls are matched by their number where both forwards called the same modules in the same order, else by module and
    how often it was called before. A frame that one side alone has counts only if the other kept frames around it.
    """
    keyed_a, keyed_b = _keyed(a.calls, b.calls)
    pairs = [(call, keyed_b[key]) for key, call in keyed_a.items() if key in keyed_b and request.fits(call.module)]
    found = list(_differences(pairs, request.factor))
    first = next(iter(found), None)
    in_numbers = next((each for each in found if each.what in (Mismatch.NUMBERS, Mismatch.NOT_FINITE)), None)
    return Divergence(
        a=a.id,
        b=b.id,
        factor=request.factor,
        compared=len(pairs),
        first=first,
        in_numbers=in_numbers,
        only_a=tuple(row for row in _only(keyed_a, keyed_b, b.calls) if request.fits(row.module)),
        only_b=tuple(row for row in _only(keyed_b, keyed_a, a.calls) if request.fits(row.module)),
        around=tuple(_around(request, pairs, [each.a for each in (first, in_numbers) if each is not None])),
    )


def _rows(pair: tuple[Call, Call]) -> list[tuple[Row, Row]]:
    """Return the outputs that both sides of a call have."""
    others = {row.tensor: row for row in pair[1].rows}
    return [(row, others[row.tensor]) for row in pair[0].rows if row.tensor in others]


def _around(request: Request, pairs: Sequence[tuple[Call, Call]], found: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Choose the outputs of both around where they differ; all of them if they are few, or asked for."""
    both = [rows for pair in pairs for rows in _rows(pair)]
    if request.everything or len(both) <= FEW:
        return both[:MOST_ROWS]
    centers = [at for at, (row, _) in enumerate(both) if any(row is each for each in found)]
    return [rows for at, rows in enumerate(both) if any(-_BEFORE <= at - center <= _AFTER for center in centers)]


def ratio(a: float, b: float) -> float:
    """Return how many times one magnitude is the other, 1 or more; infinity where only one of them is 0."""
    low, high = min(a, b), max(a, b)
    return high / low if low else math.inf if high else 1.0


def _keyed(a: Sequence[Call], b: Sequence[Call]) -> tuple[Keyed, Keyed]:
    by_number = {call.number: call for call in a}
    shared = [(by_number[call.number].module, call.module) for call in b if call.number in by_number]
    if shared and all(name == other for name, other in shared):
        return {(call.module, call.number): call for call in a}, {(call.module, call.number): call for call in b}
    return _occurrences(a), _occurrences(b)


def _occurrences(calls: Iterable[Call]) -> Keyed:
    """Map each module and how often it was called before to the call."""
    seen: dict[str, int] = {}
    named = {}
    for call in calls:
        count = seen[call.module] = seen.get(call.module, -1) + 1
        named[call.module, count] = call
    return named


def _only(own: Keyed, other: Keyed, others: Sequence[Call]) -> list[Row]:
    if not others:
        return []
    first, last = others[0].number, others[-1].number
    whole = first == 0 and not others[-1].module
    missing = [call for key, call in own.items() if key not in other]
    return [call.rows[0] for call in missing if whole or first <= call.number <= last]


def _differences(pairs: Sequence[tuple[Call, Call]], factor: float) -> Iterator[Difference]:
    for pair in pairs:
        given_a, given_b = (None if call.given is None else call.given.most for call in pair)
        for a, b in _rows(pair):
            what = _unlike(a, b)
            if what is not None:
                yield Difference(what, a, b, given_a, given_b)
            times = 1.0 if a.most is None or b.most is None else ratio(a.most, b.most)
            if times > factor:
                known = times if math.isfinite(times) else None
                yield Difference(Mismatch.NUMBERS, a, b, given_a, given_b, known)


def _unlike(a: Row, b: Row) -> Mismatch | None:
    if bool(a.text) != bool(b.text) or (a.abs_max is None) != (b.abs_max is None):
        return Mismatch.KIND
    if a.is_bad != b.is_bad:
        return Mismatch.NOT_FINITE
    if a.dtype != b.dtype:
        return Mismatch.DTYPE
    return Mismatch.SHAPE if a.shape != b.shape else None
