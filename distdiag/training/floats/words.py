"""A comparison in words, for str() of it and for the command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.training.floats.judge import limits, share, sum_of
from distdiag.training.floats.model import FAR, Likeness

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.training.floatcmp import Comparison
    from distdiag.training.floats.model import Bucket, Counts, Nearness, Pair, Place

_TENSORS, _NAMES = 10, 8


def describe(found: Comparison) -> Iterator[str]:
    """Write it as lines: the verdict, then the worst tensors, then what has no pair."""
    if len(found.pairs) == 1 and found.likeness == found.pairs[0].likeness:
        yield f"{found.names[0]} and {found.names[1]}: {verdict(found.pairs[0])}"
        yield from details(found.pairs[0], found.names)
        return
    yield f"{found.names[0]} and {found.names[1]}: {overall(found)}"
    shown = [pair for pair in found.worst_first if pair.likeness != Likeness.IDENTICAL or pair.nearness][:_TENSORS]
    for pair in shown:
        yield f"  {pair.key}: {verdict(pair)}"
    hidden = sum(pair.likeness != Likeness.IDENTICAL for pair in found.pairs) - len(shown)
    if hidden > 0:
        yield f"  ... and {hidden} more that differ"
    for title, names in unpaired(found):
        yield f"  {title}: {folded(names)}"
    if shown:
        yield f"the worst, {shown[0].key}:"
        yield from details(shown[0], found.names)


def overall(found: Comparison) -> str:
    """Count the tensors of each kind in one line."""
    kinds = [pair.likeness for pair in found.pairs]
    words = {
        Likeness.DIFFERS: "differ beyond rounding",
        Likeness.LONG_SUM: "differ as long sums do",
        Likeness.ROUNDING: "are equal within rounding",
        Likeness.IDENTICAL: "are identical",
    }
    counted = [f"{kinds.count(kind)} {text}" for kind, text in words.items() if kind in kinds]
    return f"of {len(kinds)} tensors, {', '.join(counted)}" if kinds else "there is nothing that both have"


def unpaired(found: Comparison) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield what could not be compared as tensors: a title, and names."""
    titles = (f"only in {found.names[0]}", f"only in {found.names[1]}", "other values that differ", "not compared")
    for title, names in zip(titles, (found.only_a, found.only_b, found.values_differ, found.not_compared), strict=True):
        if names:
            yield title, names


def folded(names: Sequence[str]) -> str:
    """Write the first names, and how many more there are."""
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(name or "(the whole)" for name in names[:_NAMES]) + more


def verdict(pair: Pair) -> str:
    """Say in a few words what a tensor's comparison comes to."""
    if pair.shape_a != pair.shape_b:
        return f"other shapes, {_shape(pair.shape_a)} and {_shape(pair.shape_b)}"
    if pair.counts.one_sided:
        return f"differs: nan or inf on one side only, in {_times(pair.counts.one_sided)}"
    if pair.likeness == Likeness.IDENTICAL:
        return "identical"
    if not pair.unit:
        return f"differs: {_times(pair.counts.differing)} of {pair.counts.size:,} are not equal"
    if pair.likeness == Likeness.ROUNDING and not pair.counts.differing:
        how = f", {_times(pair.counts.converted)} only by that rounding" if pair.counts.converted else ""
        return f"equal once both are {pair.unit or 'integers'}{how}"
    near = f"{_ulp(pair.max_scaled_ulp)} of {pair.unit}"
    if pair.max_scaled_ulp < pair.counts.max_ulp:
        near += f" at their usual size ({_ulp(pair.counts.max_ulp)} of their own)"
    if pair.likeness == Likeness.ROUNDING:
        return f"equal within {near} (rounding)"
    if pair.likeness == Likeness.LONG_SUM:
        return f"equal within {near}: rounding only if a sum of some {sum_of(pair.max_scaled_ulp)} numbers lies behind"
    return f"differs beyond rounding: by up to {near}, where {limits(pair.unit)[1]} can be rounding"


def details(pair: Pair, names: tuple[str, str]) -> Iterator[str]:
    """Write all that is known of a tensor, as lines with a margin of 2."""
    counts = pair.counts
    if counts.size:
        yield f"  {_times(counts.size)}, {share(counts.equal + counts.both_nan, counts.size)} equal" + _begin(pair)
    if pair.max_abs:
        own = f"{_ulp(counts.max_ulp)}, " if pair.unit else ""
        yield f"  max {own}absolute {pair.max_abs:.3g}, relative {pair.max_rel:.3g}"
    yield from (f"  {line}" for line in odd_numbers(counts, names))
    if counts.differing - counts.one_sided:
        yield f"  {'ulp' if pair.unit else 'difference'}: {histogram(counts.histogram)}"
    if pair.one_sided:
        yield "  nan or inf on one side only, the first:"
        yield from places(pair.one_sided, names)
    if pair.worst:
        yield "  the largest distances:"
        yield from places(pair.worst, names, pair.unit)
    if pair.nearness is not None:
        yield f"  {nearness(pair.nearness, names)}"
    yield from (f"  {note}" for note in pair.notes)


def _begin(pair: Pair) -> str:
    return f"; they begin to differ at {_index(pair.first.index)}" if pair.first is not None else ""


def odd_numbers(counts: Counts, names: tuple[str, str]) -> Iterator[str]:
    """Yield what is counted apart, if there is any."""
    a, b = names
    for text, count in (
        ("nan on both sides", counts.both_nan),
        (f"nan in {a} only", counts.nan_only_a),
        (f"nan in {b} only", counts.nan_only_b),
        (f"inf in {a} only", counts.inf_only_a),
        (f"inf in {b} only", counts.inf_only_b),
        ("inf of opposite signs", counts.inf_opposite),
        ("zeros of opposite signs, which are equal", counts.zero_signs),
    ):
        if count:
            yield f"{text}: {count:,}"


def histogram(buckets: Sequence[Bucket]) -> str:
    """Write a histogram in one line: "0: 8, 1: 1, 3-10: 5"."""
    return ", ".join(f"{_range(one)}: {one.count:,}" for one in buckets)


def _range(bucket: Bucket) -> str:
    if bucket.most is None:
        return f"above {bucket.least - 1:,}"
    return f"{bucket.least:,}" + (f"-{bucket.most:,}" if bucket.most > bucket.least else "")


def places(found: Sequence[Place], names: tuple[str, str], unit: str = "") -> Iterator[str]:
    """Write places below each other: index, distance, both values and their bits."""
    rows = [
        (
            _index(one.index),
            "" if one.ulp is None else _ulp(one.ulp) if unit else _far(one.ulp),
            f"{names[0]} {one.a} ({one.a_bits})",
            f"{names[1]} {one.b} ({one.b_bits})",
        )
        for one in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "    " + "  ".join(text for text in (*map(str.ljust, row[:3], widths), row[3]) if text)


def nearness(found: Nearness, names: tuple[str, str]) -> str:
    """Say in one sentence who is nearer to the reference."""
    a, b = names
    right = [share(one.size - one.differing, one.size) for one in (found.a, found.b)]
    sides = ", ".join(
        f"{name} is correctly rounded in {part} (worst {_worst(one)})"
        for name, part, one in zip(names, right, (found.a, found.b), strict=True)
    )
    alike = "they are equally near" if found.a == found.b else "neither is nearer in all"
    nearer = {"a": f"{a} is nearer", "b": f"{b} is nearer", "": alike}[found.nearer]
    return f"against the reference: {sides}: {nearer}"


def _worst(counts: Counts) -> str:
    return f"{counts.one_sided:,} nan or inf" if counts.one_sided else _ulp(counts.max_ulp)


def _ulp(distance: int) -> str:
    return f"{_far(distance)} ulp"


def _far(distance: int) -> str:
    return "2**63 or more" if distance >= FAR else f"{distance:,}"


def _times(count: int) -> str:
    return f"{count:,} number{'' if count == 1 else 's'}"


def _index(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
