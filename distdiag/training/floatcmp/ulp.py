"""Pairs of numbers of one dtype: distances in ulp, correct rounding, and counts, taken in pieces of large tensors."""

from __future__ import annotations

import math
import sys
from functools import cache, reduce
from typing import TYPE_CHECKING

import torch

from distdiag.training.floatcmp.result import BUCKETS, FAR, Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Sides = tuple[torch.Tensor, torch.Tensor]

PIECE = 2**16
"""Values per chunk: the intermediate results fit in a core's cache."""
_PRECISION = {
    **{"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8},
    **{"float8_e4m3fn": 4, "float8_e4m3fnuz": 4, "float8_e5m2": 3, "float8_e5m2fnuz": 3},
}
_MIXED_SIGNS = 0.05
_FLUSHED = 3
"""Minimum count of zeros on one side only that rounding does not explain."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name: "float32"."""
    return str(dtype).removeprefix("torch.")


def precision(dtype: torch.dtype) -> int:
    """Return the bits of a float's significand, the hidden one included; 0 for integers, which are compared exactly."""
    return _PRECISION.get(dtype_name(dtype), 0)


def as_integers(numbers: torch.Tensor) -> torch.Tensor:
    """Return a view of the same bits as signed integers."""
    return numbers.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.dtype.itemsize])


def widen(numbers: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype that torch can compute in: float32 for anything below 32 bits."""
    return numbers.to(torch.float32) if numbers.dtype.itemsize < 4 else numbers


def ordinals(numbers: torch.Tensor) -> torch.Tensor:
    """Number the values of a dtype: neighbours differ by 1, and -0.0 and 0.0 are both 0. int64, of the same shape.

    Floats are stored as sign and magnitude, and the magnitude's bits rise with the number (IEEE 754, 3.4): negative
    numbers count down from zero. The ordinal of a NaN has no meaning.
    """
    if precision(numbers.dtype):
        bits = as_integers(numbers)
        lowest = torch.iinfo(bits.dtype).min
        bits = bits.to(torch.int64)
        return torch.where(bits < 0, lowest - bits, bits)
    if dtype_name(numbers.dtype) == "uint64":  # torch has it since 2.3
        return numbers.view(torch.int64) ^ torch.iinfo(torch.int64).min  # same order, shifted zero
    return numbers.to(torch.int64)


def ulp_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Count the steps between each pair of numbers, int64; FAR where int64 overflows."""
    a, b = ordinals(x), ordinals(y)
    difference = a - b
    if x.dtype.itemsize < 8:
        return difference.abs()
    overflowed = (((a ^ b) & (difference ^ a)) < 0) | (difference == torch.iinfo(torch.int64).min)
    return torch.where(overflowed, FAR, difference.abs())


def round_to(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest, ties to even, to a dtype not finer than the input's.

    torch converts float64 to a small float through float32, rounding twice: 1 + 2**-8 + 2**-40 becomes 1.0 in bfloat16,
    the farther neighbour. Rounding to odd in between avoids this, as float32 has at least two more bits than the small
    formats (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    if numbers.dtype != torch.float64 or not 0 < precision(dtype) <= precision(torch.float32) - 2:
        return numbers.to(dtype)
    nearest = numbers.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = as_integers(nearest)
    towards_zero = bits - (back.abs() > numbers.abs()).to(torch.int32)
    inexact = (back != numbers) & ~numbers.isnan()
    return torch.where(inexact, towards_zero | 1, bits).view(torch.float32).to(dtype)


def pieces(tensors: tuple[torch.Tensor, ...], at: int = 0) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Cut tensors of one shape into the same flat pieces on the CPU; yield the flat index of each piece with it.

    A transposed or expanded view is copied piece by piece, never as a whole.
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


def usual_ulp(tensors: Sides, unit: torch.dtype) -> float:
    """Return the ulp at the smaller of the usual sizes of two tensors; 0.0 if one has none."""
    size = min(map(_usual_size, tensors))
    return float(ulp_at(torch.tensor(size, dtype=torch.float64), unit)) if size else 0.0


def _usual_size(tensor: torch.Tensor) -> float:
    """Return the geometric mean magnitude of the finite nonzero values, robust to a single large value.

    0.0 without any, or if 95 % have one sign: results of cancellation have both signs.
    """
    total, count, negative = 0.0, 0, 0
    for _, (piece,) in pieces((tensor,)):
        numbers = widen(piece) if precision(piece.dtype) else piece.to(torch.float64)
        numbers = numbers[numbers.isfinite() & (numbers != 0)]
        total += float(numbers.abs().log().sum(dtype=torch.float64))
        count += numbers.numel()
        negative += int((numbers < 0).sum())
    if not count or not _MIXED_SIGNS * count <= negative <= (1 - _MIXED_SIGNS) * count:
        return 0.0
    return math.exp(total / count)


def ulp_at(sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the ulp of a dtype at each of these magnitudes, float64."""
    smallest = math.frexp(torch.finfo(dtype).smallest_normal)[1]
    exponents = torch.frexp(sizes.to(torch.float64))[1].clamp_min(smallest) - precision(dtype)
    return torch.exp2(exponents.to(torch.float64))


class Tally:
    """Counts, worst places and largest errors of two tensors compared in the dtype `unit`.

    `scale` returns the ulp at the tensor's usual size, 0.0 to use each value's own; it is called at the first
    difference. `keep`: limit on remembered places. `worst`: (minus the distance, flat index), the worst first.
    """

    def __init__(self, unit: torch.dtype, *, keep: int, scale: Callable[[], float] = float) -> None:
        self._unit, self._keep, self._scale = unit, keep, cache(scale)
        self._limits = torch.tensor(list(BUCKETS)[:-1], dtype=torch.int64)
        self._buckets = torch.zeros(len(BUCKETS), dtype=torch.int64)
        self._size = self._both_nan = self._one_sided = self._zero_signs = self._max_ulp = 0
        self.worst: list[tuple[int, int]] = []
        self.one_sided: list[int] = []
        self.first = FAR
        self.max_abs = self.max_rel = 0.0
        self._zeros = [0, 0]
        self._max_scaled, self._at_zero = 0, [0, 0]
        """The largest scaled distance; and for pairs with one zero: scaled, and in the nonzero value's own ulp."""

    @property
    def max_scaled(self) -> int:
        """The largest distance, with small values in ulps of the usual size."""
        return max(self._max_scaled, self._at_zero[1 if self.flushed else 0])

    @property
    def flushed(self) -> tuple[int, int] | None:
        """Counts of zeros in a only and in b only, if rounding cannot explain the difference."""
        a, b = self._zeros
        return (a, b) if min(a, b) == 0 and max(a, b) >= _FLUSHED else None

    def counts(self) -> Counts:
        """Return the counts of all pieces."""
        numbers = self._buckets.tolist()
        equal = self._size - self._both_nan - self._one_sided - sum(numbers)
        numbers[0] += equal
        return Counts(
            size=self._size,
            equal=equal,
            both_nan=self._both_nan,
            one_sided=self._one_sided,
            zero_signs=self._zero_signs,
            histogram={label: count for label, count in zip(BUCKETS.values(), numbers, strict=True) if count},
            max_ulp=self._max_ulp,
        )

    def add(self, at: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Count a piece: flat tensors on the CPU, of one length; `at` is the flat index of the first number."""
        x, y = round_to(a, self._unit), round_to(b, self._unit)
        unlike = as_integers(x) != as_integers(y)
        self._size += x.numel()
        if precision(self._unit):
            if a.dtype != b.dtype:  # an infinity against a number that became one by rounding
                unlike |= widen(a).isfinite() != widen(b).isfinite()
            both_nan = widen(a).isnan() & widen(b).isnan()
            unlike &= ~both_nan
            self._both_nan += int(both_nan.sum())
        where = unlike.nonzero().flatten()
        if not where.numel():
            return
        sides = [side[where] for side in ((x, y) if a.dtype == b.dtype else (x, y, a, b))]
        finite = reduce(torch.logical_and, (widen(side).isfinite() for side in sides))
        if not bool(finite.all()):
            self._one_sided += int((~finite).sum())
            self.one_sided = (self.one_sided + (at + where[~finite][: self._keep]).tolist())[: self._keep]
            self.first = min(self.first, at + int(where[~finite][0]))
            where, sides = where[finite], [side[finite] for side in sides]
        self._measure(at + where, sides[0], sides[1])

    def _measure(self, places: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Count finite pairs with different bits: equal values among these are zeros of opposite signs."""
        distances = ulp_distance(x, y)
        differ = distances != 0
        if not bool(differ.all()):
            self._zero_signs += int((~differ).sum())
            places, x, y, distances = places[differ], x[differ], y[differ], distances[differ]
        if not places.numel():
            return
        self.first = min(self.first, int(places[0]))
        self._buckets += torch.bincount(torch.bucketize(distances, self._limits), minlength=len(BUCKETS))
        self._keep_worst(places, distances)
        self._measure_errors(x, y, distances)

    def _keep_worst(self, places: torch.Tensor, distances: torch.Tensor) -> None:
        highest = int(distances.max())
        self._max_ulp = max(self._max_ulp, highest)
        keep = min(self._keep, distances.numel())
        if not keep or (len(self.worst) == self._keep and -self.worst[-1][0] >= highest):
            return
        # topk picks arbitrarily among equal distances; keep the first.
        least = distances.topk(keep).values[-1]
        chosen = torch.cat([(distances > least).nonzero().flatten(), (distances == least).nonzero().flatten()[:keep]])
        found = zip((-distances[chosen]).tolist(), places[chosen].tolist(), strict=True)
        self.worst = sorted([*self.worst, *found])[: self._keep]

    def _measure_errors(self, x: torch.Tensor, y: torch.Tensor, distances: torch.Tensor) -> None:
        exact = not precision(self._unit)
        x, y = widen(x).to(torch.float64), widen(y).to(torch.float64)
        error = distances.to(torch.float64) if exact else (x - y).abs_().clamp_(max=sys.float_info.max)
        self.max_abs = max(self.max_abs, float(error.max()))
        self.max_rel = max(self.max_rel, min(2.0, float((error / torch.maximum(x.abs(), y.abs())).max())))
        scale = 0.0 if exact else self._scale()
        scaled = torch.minimum(distances, (error / scale).ceil().clamp(1, 2.0**62).long()) if scale else distances
        zero = (x == 0) | (y == 0)
        self._zeros = [count + int((side == 0).sum()) for count, side in zip(self._zeros, (x, y), strict=True)]
        if bool(zero.any()):
            of_zeros = int(scaled[zero].max()), int(distances[zero].max())
            self._at_zero = [max(pair) for pair in zip(self._at_zero, of_zeros, strict=True)]
            scaled = scaled[~zero]
        if scaled.numel():
            self._max_scaled = max(self._max_scaled, int(scaled.max()))
