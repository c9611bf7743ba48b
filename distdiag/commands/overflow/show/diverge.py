"""Two forwards beside each other: the first module whose outputs differ. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distdiag.commands.overflow.show.kept import Call, Forward, Row

_SAME = 1.001
"""Numbers within this are the same, but for another order of adding up."""
_Key = TypeVar("_Key")


class What(StrEnum):
    """How two outputs differ."""

    KIND = "kind"
    """A tensor on one side, none on the other."""
    NOT_FINITE = "not-finite"
    DTYPE = "dtype"
    SHAPE = "shape"
    NUMBERS = "numbers"


@dataclass(frozen=True)
class Pair:
    """The same call on both sides."""

    a: Call
    b: Call


@dataclass(frozen=True)
class Difference:
    """Where two outputs of the same name differ, and by how much (`ratio`, of numbers)."""

    what: What
    pair: Pair
    a: Row
    b: Row
    ratio: float | None = None
    of_least: bool = False


@dataclass(frozen=True)
class Beside:
    """Two forwards: all that both have, the first difference, the first of numbers, what one side alone has."""

    pairs: tuple[Pair, ...]
    first: Difference | None
    in_numbers: Difference | None
    only_a: tuple[Call, ...]
    only_b: tuple[Call, ...]


def beside(a: Forward, b: Forward, factor: float, wanted: Callable[[str], bool]) -> Beside:
    """Put two forwards beside each other; numbers that differ by more than `factor` diverge.

    Calls are matched by their number where both forwards called the same modules in the same order, else by module and
    how often it was called before. A frame that one side alone has counts only if the other kept frames around it.
    """
    calls_a, calls_b = a.calls(), b.calls()
    keyed_a, keyed_b = _keyed(calls_a, calls_b)
    pairs = tuple(Pair(call, keyed_b[key]) for key, call in keyed_a.items() if key in keyed_b and wanted(call.module))
    found = list(_differences(pairs, factor))
    return Beside(
        pairs=pairs,
        first=found[0] if found else None,
        in_numbers=next((one for one in found if one.what in (What.NUMBERS, What.NOT_FINITE)), None),
        only_a=tuple(one for one in _only(keyed_a, keyed_b, calls_b) if wanted(one.module)),
        only_b=tuple(one for one in _only(keyed_b, keyed_a, calls_a) if wanted(one.module)),
    )


def ratio(a: float, b: float) -> float:
    """How many times one magnitude is the other, 1 or more; infinity where only one of them is 0."""
    low, high = min(a, b), max(a, b)
    return high / low if low else float("inf") if high else 1.0


def occurrences(calls: Iterable[Call]) -> dict[tuple[str, int], Call]:
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
    if shared and all(one == other for one, other in shared):
        return ({(call.module, call.number): call for call in a}, {(call.module, call.number): call for call in b})
    return occurrences(a), occurrences(b)


def _only(own: dict[_Key, Call], other: dict[_Key, Call], others: Sequence[Call]) -> list[Call]:
    if not others:
        return []
    first, last = others[0].number, others[-1].number
    whole = first == 0 and not others[-1].module
    return [call for key, call in own.items() if key not in other and (whole or first <= call.number <= last)]


def _differences(pairs: Sequence[Pair], factor: float) -> Iterable[Difference]:
    """Yield all differences, in order.

    The smallest magnitude of a tensor counts only as long as the sides were the same: of other data it is chance.
    """
    same = False
    for pair in pairs:
        others = {row.place.tensor: row for row in pair.b.rows}
        both = [(row, others[row.place.tensor]) for row in pair.a.rows if row.place.tensor in others]
        for a, b in both:
            what = _unlike(a, b)
            if what is not None:
                yield Difference(what, pair, a, b)
            numbers = None if what in (What.KIND, What.NOT_FINITE) else _numbers(pair, a, b, factor, same=same)
            if numbers is not None:
                yield numbers
        same = (same or pair is pairs[0]) and all(_is_same(a, b) for a, b in both)


def _unlike(a: Row, b: Row) -> What | None:
    if bool(a.spec.text) != bool(b.spec.text) or (a.most is None) != (b.most is None):
        return What.KIND
    if a.is_bad != b.is_bad:
        return What.NOT_FINITE
    if a.spec.dtype != b.spec.dtype:
        return What.DTYPE
    return What.SHAPE if a.spec.shape != b.spec.shape else None


def _numbers(pair: Pair, a: Row, b: Row, factor: float, *, same: bool) -> Difference | None:
    if a.most is None or b.most is None or a.is_bad or b.is_bad:
        return None
    times = ratio(a.most, b.most)
    if times > factor:
        return Difference(What.NUMBERS, pair, a, b, times)
    if same and a.least is not None and b.least is not None and ratio(a.least, b.least) > factor:
        return Difference(What.NUMBERS, pair, a, b, ratio(a.least, b.least), of_least=True)
    return None


def _is_same(a: Row, b: Row) -> bool:
    if a.most is None or b.most is None:
        return a.most is b.most
    if a.is_bad or b.is_bad:
        return False
    alike = a.spec == b.spec and ratio(a.most, b.most) <= _SAME
    return alike and (a.least is None or b.least is None or ratio(a.least, b.least) <= _SAME)
