"""What floatcmp finds: plain data without tensors, which a process can send to another one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BUCKETS = (0, 1, 2, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
"""The highest distance of each bucket of a histogram; what is above the last is a bucket of its own."""

FAR = 2**63 - 1
"""Distances do not count further: all float64 and 64-bit integers that lie further apart have this one."""

NO_REFERENCE = "the reference is not used"
"""How the note begins that says why."""


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
class Place:
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
        """Tell who is nearer: "a" or "b"; "" if they are alike, or the one right more often is wrong by more."""
        worst_a, worst_b = ((one.one_sided, one.max_ulp) for one in (self.a, self.b))
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
    first: Place | None
    """Where they begin to differ, in the order of memory of a contiguous tensor."""
    worst: tuple[Place, ...]
    """Finite pairs, the largest distance in ulp first; of equal ones the first."""
    largest: Place | None
    """The largest absolute difference."""
    one_sided: tuple[Place, ...]
    """The first places with a nan or an infinity on one side only."""
    nearness: Nearness | None
    notes: tuple[str, ...]
