"""Distances in ulp (units in the last place): of two numbers, and counted over tensors in bounded memory."""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import TYPE_CHECKING

import torch

from distdiag.training.floatcmp.result import BUCKETS, FAR, Bucket, Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PIECE = 2**16
"""Numbers compared together: what is calculated with them stays in the cache of a core."""
_PRECISION = {
    "float64": 53,
    "float32": 24,
    "float16": 11,
    "bfloat16": 8,
    "float8_e4m3fn": 4,
    "float8_e4m3fnuz": 4,
    "float8_e5m2": 3,
    "float8_e5m2fnuz": 3,
}
_MIXED_SIGNS = 0.05
_FLUSHED = 3
"""From so many numbers on that are 0 on one side, and none on the other, they did not become so by rounding."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name: "float32"."""
    return str(dtype).removeprefix("torch.")


def precision(dtype: torch.dtype) -> int:
    """Return the bits of a float's significand, the hidden one included; 0 for integers, which are compared exactly."""
    return _PRECISION.get(dtype_name(dtype), 0)


def as_integers(numbers: torch.Tensor) -> torch.Tensor:
    """Return a view of the same bits as signed integers."""
    return numbers.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.dtype.itemsize])


def ordinals(numbers: torch.Tensor) -> torch.Tensor:
    """Number the values of a dtype: neighbours differ by 1, and -0.0 and 0.0 are both 0. int64, of the same shape.

    Floats are stored as a sign and a magnitude whose bits rise with the number (IEEE 754, 3.4), so that counting down
    from zero for the negative ones is enough. The ordinal of a nan has no meaning.
    """
    if precision(numbers.dtype):
        bits = as_integers(numbers)
        lowest = torch.iinfo(bits.dtype).min
        bits = bits.to(torch.int64)
        return torch.where(bits < 0, lowest - bits, bits)
    if dtype_name(numbers.dtype) == "uint64":  # torch has it since 2.3
        return numbers.view(torch.int64) ^ torch.iinfo(torch.int64).min  # the order stays, the zero moves
    return numbers.to(torch.int64)


def ulp_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Count the steps from each number to the other one, int64; what int64 cannot hold becomes FAR."""
    a, b = ordinals(x), ordinals(y)
    difference = a - b
    if x.dtype.itemsize < 8:
        return difference.abs()
    overflowed = (((a ^ b) & (difference ^ a)) < 0) | (difference == torch.iinfo(torch.int64).min)
    return torch.where(overflowed, FAR, difference.abs())


def round_to(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest, ties to even, to a dtype that is not finer.

    torch goes from float64 to a small float by way of float32 and so rounds twice: 1 + 2**-8 + 2**-40 becomes 1.0 in
    bfloat16, which is the farther neighbour. Rounding to odd in between makes that right, as float32 has at least two
    bits more than those (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    small = precision(dtype) <= precision(torch.float32) - 2
    if numbers.dtype == torch.float64 and small and precision(dtype):
        return _round_to_odd(numbers).to(dtype)
    return numbers.to(dtype)


def _round_to_odd(numbers: torch.Tensor) -> torch.Tensor:
    """Cut float64 to float32 towards zero, and set the last bit where something was cut off."""
    nearest = numbers.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = as_integers(nearest)
    towards_zero = bits - (back.abs() > numbers.abs()).to(torch.int32)
    # A nan is unequal to itself, and keeps its bits.
    inexact = (back != numbers) & ~numbers.isnan()
    return torch.where(inexact, towards_zero | 1, bits).view(torch.float32)


def pieces(tensors: tuple[torch.Tensor, ...], at: int = 0) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Cut tensors of one shape into the same flat pieces on the CPU, each with the flat index of its first number.

    A view, transposed or expanded, is copied piece by piece and never as a whole.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    first = tensors[0]
    if first.numel() <= PIECE:
        yield at, tuple(tensor.to("cpu").reshape(-1) for tensor in tensors)
        return
    row = first[0].numel()
    step = max(1, PIECE // row)
    for start in range(0, first.shape[0], step):
        yield from pieces(tuple(tensor[start : start + step].squeeze(0) for tensor in tensors), at + start * row)


def usual_size(tensor: torch.Tensor) -> float:
    """Return the geometric mean of the finite numbers that are not 0, which one large number among them does not move.

    0.0 if there are none, or they are of one sign (but for 5 %): what comes of sums in which terms cancel has both.
    """
    total, count, negative = 0.0, 0, 0
    for _, (piece,) in pieces((tensor,)):
        numbers = piece.to(_wide(piece.dtype) if precision(piece.dtype) else torch.float64)
        numbers = numbers[numbers.isfinite() & (numbers != 0)]
        total += float(numbers.abs().log().sum(dtype=torch.float64))
        count += numbers.numel()
        negative += int((numbers < 0).sum())
    if not count or not _MIXED_SIGNS * count <= negative <= (1 - _MIXED_SIGNS) * count:
        return 0.0
    return math.exp(total / count)


def ulp_at(dtype: torch.dtype, size: float) -> float:
    """Return the distance of neighbours of a dtype near `size`, in the unit of the numbers; 0.0 near 0.0."""
    if size == 0.0:
        return 0.0
    smallest = math.frexp(torch.finfo(dtype).smallest_normal)[1]
    return math.ldexp(1.0, max(math.frexp(size)[1], smallest) - precision(dtype))


class Tally:
    """Counts of pairs of numbers, taken piece by piece, so that the memory does not grow with the tensors.

    `scale` returns the ulp of the usual size, in the unit of the numbers, and is called once numbers are found to
    differ; 0.0: each number has its own. Of the worst places `keep` are remembered.
    """

    def __init__(self, unit: torch.dtype, *, keep: int, scale: Callable[[], float] = float) -> None:
        self._unit, self._keep, self._scale = unit, keep, cache(scale)
        self._limits = torch.tensor(BUCKETS, dtype=torch.int64)
        self._buckets = torch.zeros(len(BUCKETS) + 1, dtype=torch.int64)
        self._counts: dict[str, int] = {}
        self.worst: list[tuple[int, int]] = []
        """(minus the distance, flat index), the worst first."""
        self.one_sided: list[int] = []
        self.first: int | None = None
        self.largest: tuple[float, int] = (0.0, -1)
        self.max_rel = 0.0
        self._zeros = [0, 0]
        # The largest distances: scaled; and, where one side is 0, scaled and in the number's own ulp.
        self._max_scaled = self._max_scaled_at_zero = self._max_ulp_at_zero = 0

    @property
    def max_scaled(self) -> int:
        """The largest distance, of small numbers in ulp of the usual size."""
        return max(self._max_scaled, self._max_ulp_at_zero if self.flushed else self._max_scaled_at_zero)

    @property
    def flushed(self) -> tuple[int, int] | None:
        """How many numbers are 0 on the one side alone, or on the other; None where rounding may have made them so."""
        a, b = self._zeros
        return (a, b) if min(a, b) == 0 and max(a, b) >= _FLUSHED else None

    def add(self, at: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Count a piece: flat tensors on the CPU, of one length; `at` is the flat index of the first number."""
        x, y = round_to(a, self._unit), round_to(b, self._unit)
        unlike = as_integers(x) != as_integers(y)
        self._count(size=x.numel(), equal=x.numel())
        if precision(self._unit):
            if a.dtype != b.dtype:  # an infinity against what only rounding has made one
                unlike |= _finite(a) != _finite(b)
            both_nan = _nan(a) & _nan(b)
            unlike &= ~both_nan
            if a.dtype != b.dtype:
                self._count(converted=int((~unlike & ~both_nan & ~_same_value(a, b)).sum()))
            nans = int(both_nan.sum())
            self._count(both_nan=nans, equal=-nans)
        where = unlike.nonzero().flatten()
        self._count(equal=-where.numel())
        if where.numel():
            converted = x[where], y[where]
            given = converted if a.dtype == b.dtype else (a[where], b[where])
            self._measure(at, *self._split_off_non_finite(at, where, given, converted))

    def _count(self, **more: int) -> None:
        for name, count in more.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def _split_off_non_finite(
        self,
        at: int,
        where: torch.Tensor,
        given: tuple[torch.Tensor, torch.Tensor],
        converted: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count a nan or infinity against anything else; return the places of the other pairs, and both sides."""
        if not precision(self._unit) or all(bool(_finite(side).all()) for side in (*given, *converted)):
            return where, *converted
        nan_a, nan_b = (_nan(side) for side in given)
        inf_a, inf_b = (~_finite(side) & ~_nan(side) for side in given)
        lost_a, lost_b = (_finite(side) & ~_finite(fit) for side, fit in zip(given, converted, strict=True))
        no_nan = ~(nan_a | nan_b)
        kinds = {
            "nan_only_a": nan_a,
            "nan_only_b": nan_b,
            "inf_only_a": no_nan & (inf_a | lost_a) & ~inf_b,
            "inf_only_b": no_nan & (inf_b | lost_b) & ~inf_a,
            "inf_opposite": no_nan & inf_a & inf_b,
        }
        self._count(**{name: int(mask.sum()) for name, mask in kinds.items()})
        one_sided = torch.stack(tuple(kinds.values())).any(0)
        places = where[one_sided][: self._keep + 1].tolist()
        self._note_first(at, places)
        self.one_sided = (self.one_sided + [at + place for place in places])[: self._keep]
        finite = ~one_sided
        return where[finite], converted[0][finite], converted[1][finite]

    def _note_first(self, at: int, places: list[int]) -> None:
        # A piece comes after all pieces that were counted before it.
        if places:
            self.first = min(self.first if self.first is not None else FAR, at + places[0])

    def _measure(self, at: int, where: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Count finite pairs whose bits are unlike: only zeros of two signs are equal among them."""
        distances = ulp_distance(x, y)
        differ = distances != 0
        zero_signs = distances.numel() - int(differ.sum())
        if zero_signs:
            self._count(equal=zero_signs, zero_signs=zero_signs)
            where, x, y, distances = where[differ], x[differ], y[differ], distances[differ]
        if not where.numel():
            return
        self._note_first(at, where[:1].tolist())
        self._buckets += torch.bincount(torch.bucketize(distances, self._limits), minlength=len(BUCKETS) + 1)
        self._keep_worst(at, where, distances)
        self._measure_errors(at, where, (x, y), distances)

    def _keep_worst(self, at: int, where: torch.Tensor, distances: torch.Tensor) -> None:
        highest = int(distances.max())
        self._counts["max_ulp"] = max(self._counts.get("max_ulp", 0), highest)
        keep = min(self._keep, distances.numel())
        if not keep or (len(self.worst) == self._keep and -self.worst[-1][0] >= highest):
            return
        # Not what topk names: of equal distances it takes any, and we want the first ones.
        least = distances.topk(keep).values[-1]
        chosen = torch.cat([(distances > least).nonzero().flatten(), (distances == least).nonzero().flatten()[:keep]])
        found = zip((-distances[chosen]).tolist(), (at + where[chosen]).tolist(), strict=True)
        self.worst = sorted([*self.worst, *found])[: self._keep]

    def _measure_errors(
        self, at: int, where: torch.Tensor, sides: tuple[torch.Tensor, torch.Tensor], distances: torch.Tensor
    ) -> None:
        """Keep the largest absolute, relative and scaled differences of pairs that are not equal."""
        x, y = (side.to(_wide(side.dtype)).to(torch.float64) for side in sides)
        exact = not precision(self._unit)
        error = distances.to(torch.float64) if exact else (x - y).abs_().clamp_(max=sys.float_info.max)
        most, place = error.max(0)
        if float(most) > self.largest[0]:
            self.largest = (float(most), at + int(where[place]))
        size = torch.maximum(x.abs(), y.abs())
        self.max_rel = max(self.max_rel, min(2.0, float((error / size).max())))
        scale = self._scale() if not exact else 0.0
        scaled = torch.minimum(distances, (error / scale).ceil().clamp(1, 2.0**62).long()) if scale else distances
        zero_a, zero_b = x == 0, y == 0
        self._zeros = [self._zeros[0] + int(zero_a.sum()), self._zeros[1] + int(zero_b.sum())]
        zero = zero_a | zero_b
        if bool(zero.any()):
            self._max_scaled_at_zero = max(self._max_scaled_at_zero, int(scaled[zero].max()))
            self._max_ulp_at_zero = max(self._max_ulp_at_zero, int(distances[zero].max()))
            scaled = scaled[~zero]
        if scaled.numel():
            self._max_scaled = max(self._max_scaled, int(scaled.max()))

    def counts(self) -> Counts:
        """Return the counts of all pieces."""
        numbers = self._buckets.tolist()
        numbers[0] += self._counts.get("equal", 0)
        lows, highs = [0, *(limit + 1 for limit in BUCKETS)], [*BUCKETS, None]
        buckets = zip(lows, highs, numbers, strict=True)
        return Counts(
            **self._counts,
            histogram=tuple(Bucket(least=low, most=high, count=count) for low, high, count in buckets if count),
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Choose a dtype that holds the same numbers and can be calculated in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _nan(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(_wide(numbers.dtype)).isnan()


def _finite(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(_wide(numbers.dtype)).isfinite()


def _same_value(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where numbers of two dtypes are the same, of which 64 bits of integers are too many for any float."""
    if precision(a.dtype):
        a, b = b, a
    if a.dtype.itemsize < 8 or precision(a.dtype):
        return a.to(torch.float64) == b.to(torch.float64)
    b = b.to(torch.float64)
    fits = (b == b.trunc()) & (b >= -(2.0**63)) & (b < 2.0**63)
    return fits & (torch.where(fits, b, 0.0).to(torch.int64) == a.to(torch.int64))
