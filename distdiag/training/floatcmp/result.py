"""What floatcmp finds: plain data without tensors, what counts as rounding, and the text of both. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BUCKETS = (0, 1, 2, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
"""The highest distance of each bucket of a histogram; what is above the last is a bucket of its own."""

FAR = 2**63 - 1
"""Distances do not count further: all float64 and 64-bit integers that lie further apart have this one."""

NO_REFERENCE = "the reference is not used"
"""How the note begins that says why."""
_TENSORS, _NAMES = 10, 8


class Likeness(StrEnum):
    """What a comparison comes to, the best first."""

    IDENTICAL = "identical"
    ROUNDING = "rounding"
    LONG_SUM = "long-sum"
    NOT_COMPARED = "not-compared"
    DIFFERS = "differs"

    @property
    def rank(self) -> int:
        """0 for the best; the worst of all tensors is that of a comparison."""
        return list(Likeness).index(self)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """One pair of numbers. The value is what repr gives, which is exact; the bits are those of its own dtype."""

    index: tuple[int, ...]
    """Of complex numbers, the last is 0 for the real part and 1 for the imaginary part."""
    a: str
    a_bits: str
    b: str
    b_bits: str
    ulp: int | None
    """None where one of them is no finite number."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """How many pairs lie from `least` to `most` apart; `most` None: any distance above."""

    least: int
    most: int | None
    count: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Pairs of numbers, counted by what they are. All of them together are `size`."""

    size: int = 0
    equal: int = 0
    """The same number, also the same infinity, also 0.0 and -0.0."""
    both_nan: int = 0
    nan_only_a: int = 0
    nan_only_b: int = 0
    inf_only_a: int = 0
    """An infinity against a finite number, also one made by rounding to the coarser dtype."""
    inf_only_b: int = 0
    inf_opposite: int = 0
    converted: int = 0
    """Of those that are equal: only once one of them was rounded to the dtype that is compared in."""
    zero_signs: int = 0
    """Of those that are equal: 0.0 against -0.0."""
    histogram: tuple[Bucket, ...] = ()
    """Distances of all pairs of finite numbers; equal infinities are among those at 0. Empty buckets are left out."""
    max_ulp: int = 0
    """The largest distance of two finite numbers; of integers, their largest difference."""

    @property
    def one_sided(self) -> int:
        """Pairs in which a nan or an infinity stands against something else."""
        return self.nan_only_a + self.nan_only_b + self.inf_only_a + self.inf_only_b + self.inf_opposite

    @property
    def differing(self) -> int:
        """Pairs that are not equal; nan against nan is."""
        return self.size - self.equal - self.both_nan


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """How far each side lies from the reference, which was rounded correctly to the dtype that is compared in.

    In these counts, `a` is the side and `b` the reference.
    """

    a: Counts
    b: Counts

    @property
    def nearer(self) -> str:
        """Return who is nearer: "a" or "b"; "" if they are alike, or the one right more often is wrong by more."""
        worst_a, worst_b = ((side.one_sided, side.max_ulp) for side in (self.a, self.b))
        wrong_a, wrong_b = self.a.differing, self.b.differing
        if (wrong_a, worst_a) == (wrong_b, worst_b):
            return ""
        if wrong_a <= wrong_b and worst_a <= worst_b:
            return "a"
        return "b" if wrong_b <= wrong_a and worst_b <= worst_a else ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two tensors of the same name."""

    key: str
    """Its names from the outermost inwards, with dots; empty if tensors themselves were compared."""
    likeness: Likeness
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    dtype_a: str
    dtype_b: str
    unit: str
    """The dtype whose ulps are counted, the coarser of the two; empty for integers, which are exact."""
    counts: Counts
    max_scaled_ulp: int
    """As max_ulp, but small numbers in which terms may have cancelled have the ulp of the usual size: see floatcmp."""
    max_abs: float
    """Of finite pairs; a difference that float64 cannot hold counts as its largest number."""
    max_rel: float
    """Of finite pairs, relative to the larger of the two: from 0 to 2."""
    first: Mismatch | None
    """Where they begin to differ, in the order of memory of a contiguous tensor."""
    worst: tuple[Mismatch, ...]
    """Finite pairs, the largest distance in ulp first; of equal ones the first."""
    largest: Mismatch | None
    """The largest absolute difference."""
    one_sided: tuple[Mismatch, ...]
    """The first places with a nan or an infinity on one side only."""
    nearness: Nearness | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The answer of floatcmp. str() of it is for people; the parts are for programs, and have no tensors in them."""

    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    """The tensors that both sides have, in the order of the first."""
    only_a: tuple[str, ...]
    """Names that the other side lacks, or has as something of another kind, which is said then."""
    only_b: tuple[str, ...]
    values_differ: tuple[str, ...]
    """Names of text and other values, no tensors, that are not the same."""
    not_compared: tuple[str, ...]
    """Names of what floatcmp cannot look into, each with the reason."""

    @property
    def likeness(self) -> Likeness:
        """The worst of all; names that one side lacks count as differing, text that differs does not."""
        if self.only_a or self.only_b:
            return Likeness.DIFFERS
        found = [pair.likeness for pair in self.pairs] + [Likeness.NOT_COMPARED] * bool(self.not_compared)
        return max(found, key=lambda kind: kind.rank, default=Likeness.NOT_COMPARED)

    @property
    def worst_first(self) -> tuple[Pair, ...]:
        """The tensors, those that differ most first."""
        return tuple(
            sorted(self.pairs, key=lambda pair: (-pair.likeness.rank, -pair.counts.one_sided, -pair.max_scaled_ulp))
        )

    def __str__(self) -> str:
        return "\n".join(describe(self))


def limits(unit: str) -> tuple[int, int]:
    """Return the distances in ulp up to which numbers of a dtype differ by rounding: of one function, of a long sum.

    They are a convention, and not a proof: what was calculated is not known here.

    One function of float32 or float64: CUDA's own tables (CUDA C++ Programming Guide, mathematical functions) allow
    exp, log, sin and pow 1 to 4 ulp, vector libraries of CPUs 1 to 4: two sides are up to 8 apart. In 16 bits it is
    calculated in float32 and rounded once, so that each side is within 1 ulp.

    A sum over n numbers, taken in two orders, differs by about sqrt(n) ulp, as rounding errors are a random walk
    (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019; the worst case is n). 256 is
    n = 65536, about the longest dot product of today's models. In 16 bits sums are kept in float32; what is left are
    the partial sums of some tens of ranks or blocks, 8 = sqrt(64). 256 ulp of bfloat16 would be twice the number.
    """
    if unit in ("float64", "float32"):
        return 8, 256
    return (2, 8) if unit in ("float16", "bfloat16") else (1, 2)


def likeness(counts: Counts, unit: str, max_scaled_ulp: int) -> Likeness:
    """Classify the counts of one tensor; `unit` is empty for integers, where any difference counts."""
    if counts.one_sided:
        return Likeness.DIFFERS
    if not counts.differing:
        return Likeness.IDENTICAL
    function, sum_ = limits(unit)
    if not unit or max_scaled_ulp > sum_:
        return Likeness.DIFFERS
    return Likeness.ROUNDING if max_scaled_ulp <= function else Likeness.LONG_SUM


def share(part: int, whole: int) -> str:
    """Format a percentage that says 100 % of all alone, and 0 % of none alone."""
    if not whole or part in (0, whole):
        return "100 %" if part else "0 %"
    tenths = 1000 * part // whole
    if tenths in (0, 999):
        return "<0.1 %" if tenths == 0 else ">99.9 %"
    return f"{tenths // 10}.{tenths % 10} %"


def sum_length(max_ulp: int) -> str:
    """Format how long a sum would explain a distance: in n numbers, rounding walks sqrt(n) ulp."""
    length = max_ulp * max_ulp
    digits = 10 ** max(0, len(str(isqrt(length))) - 1)
    return f"{length // digits * digits:,}"


def describe(found: Comparison) -> Iterator[str]:
    """Format it as lines: the verdict, then the worst tensors, then what has no pair."""
    if len(found.pairs) == 1 and found.likeness == found.pairs[0].likeness:
        yield f"{found.names[0]} and {found.names[1]}: {verdict(found.pairs[0])}"
        yield from details(found.pairs[0], found.names)
        return
    yield f"{found.names[0]} and {found.names[1]}: {_overall(found)}"
    shown = [pair for pair in found.worst_first if pair.likeness != Likeness.IDENTICAL or pair.nearness][:_TENSORS]
    for pair in shown:
        yield f"  {pair.key}: {verdict(pair)}"
    hidden = sum(pair.likeness != Likeness.IDENTICAL for pair in found.pairs) - len(shown)
    if hidden > 0:
        yield f"  ... and {hidden} more that differ"
    for title, names in _unpaired(found):
        yield f"  {title}: {shorten(names)}"
    if shown:
        yield f"the worst, {shown[0].key}:"
        yield from details(shown[0], found.names)


def _overall(found: Comparison) -> str:
    """Format how many tensors there are of each kind, in one line."""
    kinds = [pair.likeness for pair in found.pairs]
    words = {
        Likeness.DIFFERS: "differ beyond rounding",
        Likeness.LONG_SUM: "differ as long sums do",
        Likeness.ROUNDING: "are equal within rounding",
        Likeness.IDENTICAL: "are identical",
    }
    counted = [f"{kinds.count(kind)} {text}" for kind, text in words.items() if kind in kinds]
    return f"of {len(kinds)} tensors, {', '.join(counted)}" if kinds else "no tensors in common"


def _unpaired(found: Comparison) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield what could not be compared as tensors: a title, and names."""
    titles = (f"only in {found.names[0]}", f"only in {found.names[1]}", "non-tensor values that differ", "not compared")
    for title, names in zip(titles, (found.only_a, found.only_b, found.values_differ, found.not_compared), strict=True):
        if names:
            yield title, names


def shorten(names: Sequence[str]) -> str:
    """Format the first names, and how many more there are."""
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(name or "(the whole)" for name in names[:_NAMES]) + more


def verdict(pair: Pair) -> str:
    """Format in a few words what a tensor's comparison comes to."""
    if pair.shape_a != pair.shape_b:
        return f"different shapes, {_shape(pair.shape_a)} and {_shape(pair.shape_b)}"
    if pair.counts.one_sided:
        return f"differs: NaN or Inf on one side only, in {_times(pair.counts.one_sided)}"
    if pair.likeness == Likeness.IDENTICAL:
        return "identical"
    if not pair.unit:
        return f"differs: {_times(pair.counts.differing)} of {pair.counts.size:,} are not equal"
    if pair.likeness == Likeness.ROUNDING and not pair.counts.differing:
        how = f" ({_times(pair.counts.converted)} rounded by the conversion)" if pair.counts.converted else ""
        return f"equal once both are {pair.unit}{how}"
    near = f"{_ulp(pair.max_scaled_ulp)} of {pair.unit}"
    if pair.max_scaled_ulp < pair.counts.max_ulp:
        near += f" at their usual size ({_ulp(pair.counts.max_ulp)} at their own)"
    if pair.likeness == Likeness.ROUNDING:
        return f"equal within {near} (rounding)"
    if pair.likeness == Likeness.LONG_SUM:
        length = sum_length(pair.max_scaled_ulp)
        return f"equal within {near}: rounding, provided it is a sum of about {length} numbers"
    return f"differs beyond rounding: by up to {near}, where {limits(pair.unit)[1]} can be rounding"


def details(pair: Pair, names: tuple[str, str]) -> Iterator[str]:
    """Format all that is known of a tensor, as lines with a margin of 2."""
    counts = pair.counts
    begin = f"; first difference at {_index(pair.first.index)}" if pair.first is not None else ""
    if counts.size:
        yield f"  {_times(counts.size)}, {share(counts.equal + counts.both_nan, counts.size)} equal{begin}"
    if pair.max_abs:
        own = f"{_ulp(counts.max_ulp)}, " if pair.unit else ""
        yield f"  max {own}absolute {pair.max_abs:.3g}, relative {pair.max_rel:.3g}"
    yield from (f"  {line}" for line in _special_values(counts, names))
    if counts.differing - counts.one_sided:
        yield f"  {'ulp' if pair.unit else 'difference'}: {_histogram(counts.histogram)}"
    if pair.one_sided:
        yield "  first NaN or Inf on one side only:"
        yield from format_mismatches(pair.one_sided, names)
    if pair.worst:
        yield "  largest differences:"
        yield from format_mismatches(pair.worst, names, pair.unit)
    if pair.nearness is not None:
        yield f"  {format_nearness(pair.nearness, names)}"
    yield from (f"  {note}" for note in pair.notes)


def _special_values(counts: Counts, names: tuple[str, str]) -> Iterator[str]:
    """Format what is counted apart, if there is any."""
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


def _histogram(buckets: Sequence[Bucket]) -> str:
    """Format a histogram in one line: "0: 8, 1: 1, 3-10: 5"."""
    return ", ".join(f"{_range(bucket)}: {bucket.count:,}" for bucket in buckets)


def _range(bucket: Bucket) -> str:
    if bucket.most is None:
        return f"above {bucket.least - 1:,}"
    return f"{bucket.least:,}" + (f"-{bucket.most:,}" if bucket.most > bucket.least else "")


def format_mismatches(found: Sequence[Mismatch], names: tuple[str, str], unit: str = "") -> Iterator[str]:
    """Format pairs of numbers below each other: index, distance, both values and their bits."""
    rows = [
        (
            _index(mismatch.index),
            "" if mismatch.ulp is None else _ulp(mismatch.ulp) if unit else _far(mismatch.ulp),
            f"{names[0]} {mismatch.a} ({mismatch.a_bits})",
            f"{names[1]} {mismatch.b} ({mismatch.b_bits})",
        )
        for mismatch in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "    " + "  ".join(text for text in (*map(str.ljust, row[:3], widths), row[3]) if text)


def format_nearness(found: Nearness, names: tuple[str, str]) -> str:
    """Format in one sentence who is nearer to the reference."""
    a, b = names
    right = [share(counts.size - counts.differing, counts.size) for counts in (found.a, found.b)]
    sides = ", ".join(
        f"{name} is correctly rounded in {part} (worst {_worst(counts)})"
        for name, part, counts in zip(names, right, (found.a, found.b), strict=True)
    )
    alike = "both are equally close" if found.a == found.b else "neither is closer throughout"
    nearer = {"a": f"{a} is closer", "b": f"{b} is closer", "": alike}[found.nearer]
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
