"""The result of floatcmp as plain data without torch, limits of rounding, and the text of both."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FAR = 2**63 - 1
"""The distance of float64 and 64-bit integers at least this far apart."""
BUCKETS = {
    **{0: "0", 1: "1", 2: "2", 10: "3-10", 100: "11-100", 1_000: "101-1,000", 10_000: "1,001-10,000"},
    **{100_000: "10,001-100,000", 1_000_000: "100,001-1,000,000", FAR: "above 1,000,000"},
}
"""The highest distance of each bucket of a histogram, and its label."""
NO_REFERENCE = "the reference is not used"
"""Beginning of the note that gives the reason."""
_TENSORS, _NAMES = 12, 8


class Likeness(StrEnum):
    """The verdict of a comparison, the best first."""

    IDENTICAL = "identical"
    ROUNDING = "rounding"
    LONG_SUM = "long-sum"
    NOT_COMPARED = "not-compared"
    DIFFERS = "differs"


@record(kw_only=True)
class Mismatch:
    """One pair of numbers: the repr of each, which is exact, and the bits in its own dtype.

    `index` of complex numbers ends in 0 for the real part and 1 for the imaginary part; `ulp` is None unless both are
    finite.
    """

    index: tuple[int, ...]
    a: str
    a_bits: str
    b: str
    b_bits: str
    ulp: int | None


@record(kw_only=True)
class Counts:
    """Pairs of values by kind; the kinds add up to `size`.

    `equal` includes equal infinities and zeros of opposite signs (`zero_signs`). `one_sided`: a NaN or an infinity
    against anything else, also an infinity from rounding to the coarser dtype. `histogram`: distances of finite pairs
    and equal infinities. `max_ulp` of integers is their largest difference.
    """

    size: int = 0
    equal: int = 0
    both_nan: int = 0
    one_sided: int = 0
    zero_signs: int = 0
    histogram: dict[str, int] = field(default_factory=dict)
    max_ulp: int = 0

    @property
    def differing(self) -> int:
        """Unequal pairs; nan against nan counts as equal."""
        return self.size - self.equal - self.both_nan


@record(kw_only=True)
class Nearness:
    """Counts of each side against the reference, in the dtype of the comparison."""

    a: Counts
    b: Counts

    @property
    def nearer(self) -> str:
        """Return "a" or "b", the nearer side; "" if alike, or if fewer errors of one side are larger."""
        worst_a, worst_b = ((side.one_sided, side.max_ulp) for side in (self.a, self.b))
        wrong_a, wrong_b = self.a.differing, self.b.differing
        if (wrong_a, worst_a) == (wrong_b, worst_b):
            return ""
        if wrong_a <= wrong_b and worst_a <= worst_b:
            return "a"
        return "b" if wrong_b <= wrong_a and worst_b <= worst_a else ""


@record(kw_only=True)
class Pair:
    """Two tensors of the same name; `key` is empty if bare tensors were compared.

    `unit`: the dtype of the ulps, the coarser of the two; empty for integers, which are exact. `max_scaled_ulp` counts
    small values in ulps of the usual size: see floatcmp. `max_abs` and `max_rel` (relative to the larger of the two: 0
    to 2) are over finite pairs. `first`: the first difference in memory order of a contiguous tensor; `worst`: finite
    pairs, the largest distance first; `one_sided`: the first places with a nan or an infinity on one side only.
    """

    key: str
    likeness: Likeness
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    dtype_a: str
    dtype_b: str
    unit: str
    counts: Counts
    max_scaled_ulp: int
    max_abs: float
    max_rel: float
    first: Mismatch | None
    worst: tuple[Mismatch, ...]
    one_sided: tuple[Mismatch, ...]
    nearness: Nearness | None
    notes: tuple[str, ...]

    @property
    def is_plainly_identical(self) -> bool:
        """Whether it needs no report."""
        counts = self.counts
        noted = self.nearness or self.notes or counts.zero_signs or counts.both_nan
        return self.likeness is Likeness.IDENTICAL and not noted


@record(kw_only=True)
class Comparison:
    """The result of floatcmp. str() of it is for people; the fields are for programs, and hold no tensors.

    `a`, `b`: names of the two sides; in the command's report, the files. `tensors`: how many both sides have; `pairs`
    has them in the order of the first; in the command's report, the worst first and without those that are plainly
    identical. `only_a`, `only_b`: names that the other side lacks, or has as another kind of value. `values_differ`:
    names of text and other values that are not tensors. `not_compared`: names of values that floatcmp cannot compare,
    each with the reason.
    """

    a: str
    b: str
    reference: str = ""
    tensors: int
    identical: int
    numbers: int
    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    values_differ: tuple[str, ...]
    not_compared: tuple[str, ...]

    @property
    def likeness(self) -> Likeness:
        """The worst of all pairs; names missing on one side count as differing, unequal text does not."""
        if self.only_a or self.only_b:
            return Likeness.DIFFERS
        found = [pair.likeness for pair in self.pairs] + [Likeness.NOT_COMPARED] * bool(self.not_compared)
        return max(found, key=list(Likeness).index, default=Likeness.NOT_COMPARED)

    @property
    def worst_first(self) -> tuple[Pair, ...]:
        """The tensors, the most different first."""
        rank = list(Likeness).index
        return tuple(
            sorted(self.pairs, key=lambda x: (rank(x.likeness), x.counts.one_sided, x.max_scaled_ulp), reverse=True)
        )

    def __str__(self) -> str:
        return "\n".join(describe(self, (self.a, self.b)))


def limits(unit: str) -> tuple[int, int]:
    """Return the distances in ulp up to which numbers of a dtype differ by rounding: of one function, of a long sum.

    They are a convention, not a proof. One function of float32 or float64: CUDA's own tables (CUDA C++ Programming
    Guide, mathematical functions) and vector libraries of CPUs allow exp, log, sin and pow 1 to 4 ulp, so two sides are
    up to 8 apart. In 16 bits it is calculated in float32 and rounded once: each side is within 1 ulp.

    A sum over n numbers, taken in two orders, differs by about sqrt(n) ulp, a random walk (Higham and Mary, "A new
    approach to probabilistic rounding error analysis", 2019). 256 is n = 65536, about the longest dot product of
    today's models. In 16 bits sums are kept in float32; left are partial sums of some tens of ranks, 8 = sqrt(64).
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
    """Format a percentage: 100 % only for all, 0 % only for none."""
    if not whole or part in (0, whole):
        return "100 %" if part else "0 %"
    tenths = 1000 * part // whole
    if tenths in (0, 999):
        return "<0.1 %" if tenths == 0 else ">99.9 %"
    return f"{tenths // 10}.{tenths % 10} %"


def sum_length(max_ulp: int) -> str:
    """Format how long a sum would explain a distance: in n numbers, rounding walks sqrt(n) ulp."""
    return f"{float(f'{max_ulp**2:.2g}'):,.0f}"


def describe(found: Comparison, names: tuple[str, str]) -> Iterator[str]:
    """Format it as lines: the verdict, the worst tensors, values without a counterpart, and the worst in full."""
    unlike = [pair for pair in found.worst_first if pair.likeness != Likeness.IDENTICAL]
    shown = unlike[:_TENSORS] or [pair for pair in found.pairs if pair.nearness][:1]
    is_one = found.tensors == 1 and found.pairs[0].likeness == found.likeness
    shown = list(found.pairs) if is_one else shown
    yield f"{names[0]} and {names[1]}: {verdict(shown[0]) if is_one else _overall(found)}"
    yield from (f"  {pair.key}: {verdict(pair)}" for pair in shown if not is_one)
    if len(unlike) > len(shown):
        yield f"  ... and {len(unlike) - len(shown)} more that differ"
    for title, listed in (
        (f"only in {names[0]}", found.only_a),
        (f"only in {names[1]}", found.only_b),
        ("non-tensor values that differ", found.values_differ),
        ("not compared", found.not_compared),
    ):
        if listed:
            yield f"  {title}: {shorten(listed)}"
    if shown and found.tensors > 1:
        yield f"{shown[0].key} in full:"
    yield from (line for pair in shown[:1] for line in details(pair, names))


def _overall(found: Comparison) -> str:
    kinds = [pair.likeness for pair in found.pairs]
    words = {
        Likeness.DIFFERS: "differ beyond rounding",
        Likeness.LONG_SUM: "differ as long sums do",
        Likeness.ROUNDING: "are equal within rounding",
        Likeness.IDENTICAL: "are identical",
    }
    counted = ", ".join(f"{kinds.count(kind)} {text}" for kind, text in words.items() if kind in kinds)
    return f"of {found.tensors:,} tensors, {counted}" if counted else "no tensors in common"


def shorten(names: Sequence[str]) -> str:
    """Format the first names and the number of the others."""
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(name or "(the whole)" for name in names[:_NAMES]) + more


def verdict(pair: Pair) -> str:
    """Format the verdict about one tensor."""
    if pair.shape_a != pair.shape_b:
        return f"different shapes, {_index(pair.shape_a)} and {_index(pair.shape_b)}"
    if pair.counts.one_sided:
        return f"differs: NaN or Inf on one side only, in {_times(pair.counts.one_sided)}"
    if pair.likeness == Likeness.IDENTICAL:
        return "identical"
    if not pair.unit:
        return f"differs: {_times(pair.counts.differing)} of {pair.counts.size:,} are not equal"
    if pair.likeness == Likeness.ROUNDING and not pair.counts.differing:
        return f"equal once both are {pair.unit}"
    near = f"{_ulp(pair.max_scaled_ulp)} of {pair.unit}"
    if pair.max_scaled_ulp < pair.counts.max_ulp:
        near += f" at their usual size ({_ulp(pair.counts.max_ulp)} at their own)"
    if pair.likeness == Likeness.ROUNDING:
        return f"equal within {near} (rounding)"
    if pair.likeness == Likeness.LONG_SUM:
        length = sum_length(pair.max_scaled_ulp)
        return f"equal within {near}: rounding, provided it is a sum of about {length} numbers"
    return f"differs beyond rounding: by up to {near}; rounding explains at most {limits(pair.unit)[1]}"


def details(pair: Pair, names: tuple[str, str]) -> Iterator[str]:
    """Format one tensor in full, as lines with a margin of 2."""
    counts = pair.counts
    begin = f"; first difference at {_index(pair.first.index)}" if pair.first is not None else ""
    if counts.size:
        yield f"  {_times(counts.size)}, {share(counts.equal + counts.both_nan, counts.size)} equal{begin}"
    if pair.max_abs:
        own = f"{_ulp(counts.max_ulp)}, " if pair.unit else ""
        yield f"  max {own}absolute {pair.max_abs:.3g}, relative {pair.max_rel:.3g}"
    if counts.both_nan:
        yield f"  nan on both sides: {counts.both_nan:,}"
    if counts.zero_signs:
        yield f"  zeros of opposite signs, which are equal: {counts.zero_signs:,}"
    if counts.differing - counts.one_sided:
        histogram = ", ".join(f"{label}: {count:,}" for label, count in counts.histogram.items())
        yield f"  {'ulp' if pair.unit else 'difference'}: {histogram}"
    if pair.one_sided:
        yield "  first NaN or Inf on one side only:"
        yield from format_mismatches(pair.one_sided, names)
    if pair.worst:
        yield "  largest differences:"
        yield from format_mismatches(pair.worst, names, pair.unit)
    if pair.nearness is not None:
        yield f"  {format_nearness(pair.nearness, names)}"
    yield from (f"  {note}" for note in pair.notes)


def format_mismatches(found: Sequence[Mismatch], names: tuple[str, str], unit: str = "") -> Iterator[str]:
    """Format pairs of values as a table: index, distance, both values and bits."""
    a, b = names
    for pair in found:
        distance = "" if pair.ulp is None or not unit else f"  {_ulp(pair.ulp)}"
        yield f"    {_index(pair.index)}{distance}  {a} {pair.a} ({pair.a_bits})  {b} {pair.b} ({pair.b_bits})"


def format_nearness(found: Nearness, names: tuple[str, str]) -> str:
    """Format in one sentence how near each side is to the reference."""
    sides = []
    for name, counts in zip(names, (found.a, found.b), strict=True):
        right = share(counts.size - counts.differing, counts.size)
        worst = f"{counts.one_sided:,} nan or inf" if counts.one_sided else _ulp(counts.max_ulp)
        sides.append(f"{name} is correctly rounded in {right} (worst {worst})")
    alike = "both are equally close" if found.a == found.b else "neither is closer throughout"
    nearer = f"{names['ab'.index(found.nearer)]} is closer" if found.nearer else alike
    return f"against the reference: {', '.join(sides)}: {nearer}"


def _ulp(distance: int) -> str:
    return "2**63 ulp or more" if distance >= FAR else f"{distance:,} ulp"


def _times(count: int) -> str:
    return f"{count:,} number{'' if count == 1 else 's'}"


def _index(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]"
