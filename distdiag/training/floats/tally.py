"""Counts pairs of numbers piece by piece, so that the memory it takes does not grow with the tensors."""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import TYPE_CHECKING

from distdiag.training.floats.bits import as_integers, distance, precision, rounded
from distdiag.training.floats.model import BUCKETS, FAR, Bucket, Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_MIXED = 0.05
_FLUSHED = 3
"""From so many numbers on that are 0 on one side, and none on the other, they did not become so by rounding."""
PIECE = 2**16
"""Numbers looked at together: what is calculated with them stays in the cache of a core."""


def pieces(tensors: tuple[torch.Tensor, ...], at: int = 0) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Cut tensors of one shape into the same flat pieces on the CPU, each with the flat index of its first number.

    A view, transposed or expanded, is copied piece by piece and never as a whole.
    """
    if all(one.is_contiguous() for one in tensors):
        tensors = tuple(one.view(-1) for one in tensors)
    first = tensors[0]
    if first.numel() <= PIECE:
        yield at, tuple(one.to("cpu").reshape(-1) for one in tensors)
        return
    row = first[0].numel()
    step = max(1, PIECE // row)
    for start in range(0, first.shape[0], step):
        yield from pieces(tuple(one[start : start + step].squeeze(0) for one in tensors), at + start * row)


def usual_size(tensor: torch.Tensor) -> float:
    """Give the geometric mean of the finite numbers that are not 0, which one large number among them does not move.

    0.0 if there are none, or they are of one sign (but for 5 %): what comes of sums in which terms cancel has both.
    """
    import torch

    total, count, negative = 0.0, 0, 0
    for _, (piece,) in pieces((tensor,)):
        numbers = piece.to(_wide(piece.dtype))
        numbers = numbers[numbers.isfinite() & (numbers != 0)]
        total += float(numbers.abs().log().sum(dtype=torch.float64))
        count += numbers.numel()
        negative += int((numbers < 0).sum())
    if not count or not _MIXED * count <= negative <= (1 - _MIXED) * count:
        return 0.0
    return math.exp(total / count)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Choose a dtype that holds the same numbers and can be calculated in."""
    import torch

    return torch.float32 if dtype.itemsize < 4 else dtype


def spacing(dtype: torch.dtype, size: float) -> float:
    """Give the distance of neighbours of a dtype near `size`: one ulp, in the unit of the numbers; 0.0 near 0.0."""
    import torch

    if size == 0.0:
        return 0.0
    smallest = math.frexp(torch.finfo(dtype).smallest_normal)[1]
    return math.ldexp(1.0, max(math.frexp(size)[1], smallest) - precision(dtype))


class Tally:
    """What is known of all pieces so far.

    `scale` gives the ulp of the usual size, as a number, once numbers were found to differ; 0.0: each has its own.
    """

    def __init__(self, unit: torch.dtype, *, keep: int, scale: Callable[[], float] = float) -> None:
        import torch

        self._unit, self._keep, self._scale = unit, keep, cache(scale)
        self._limits = torch.tensor(BUCKETS, dtype=torch.int64)
        self._buckets = torch.zeros(len(BUCKETS) + 1, dtype=torch.int64)
        self._counts: dict[str, int] = {}
        self.worst: list[tuple[int, int]] = []
        """(minus the distance, flat index), the worst first."""
        self.one_sided: list[int] = []
        self.first: int | None = None
        self.largest: tuple[float, int] = (0.0, -1)
        self._scaled = self._scaled_zero = self._own_zero = 0
        self._zeros = [0, 0]
        self.max_rel = 0.0

    @property
    def max_scaled(self) -> int:
        """The largest distance, of small numbers in ulp of the usual size."""
        return max(self._scaled, self._own_zero if self.flushed else self._scaled_zero)

    @property
    def flushed(self) -> tuple[int, int] | None:
        """How many numbers are 0 on the one side alone, or on the other; None where rounding may have made them so."""
        a, b = self._zeros
        return (a, b) if min(a, b) == 0 and max(a, b) >= _FLUSHED else None

    def add(self, at: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Count a piece: flat tensors on the CPU, of one length; `at` is the flat index of the first number."""
        x, y = rounded(a, self._unit), rounded(b, self._unit)
        unlike = as_integers(x) != as_integers(y)
        self._add(size=x.numel())
        if precision(self._unit):
            if a.dtype != b.dtype:  # an infinity against what only rounding has made one
                unlike |= _finite(a) != _finite(b)
            both_nan = _nan(a) & _nan(b)
            self._add(both_nan=int(both_nan.sum()))
            unlike &= ~both_nan
            if a.dtype != b.dtype:
                self._add(converted=int((~unlike & ~both_nan & ~_same_value(a, b)).sum()))
            self._add(equal=x.numel() - int(both_nan.sum()))
        else:
            self._add(equal=x.numel())
        where = unlike.nonzero().flatten()
        self._add(equal=-where.numel())
        if where.numel():
            made = x[where], y[where]
            given = made if a.dtype == b.dtype else (a[where], b[where])
            self._measure(at, *self._finite_ones(at, where, given, made))

    def _add(self, **more: int) -> None:
        for name, count in more.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def _finite_ones(
        self,
        at: int,
        where: torch.Tensor,
        given: tuple[torch.Tensor, torch.Tensor],
        made: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count what is no finite number on one side only; the others: their places, and both sides as `made`."""
        import torch

        if not precision(self._unit) or all(bool(_finite(one).all()) for one in (*given, *made)):
            return where, *made
        nan_a, nan_b = (_nan(one) for one in given)
        inf_a, inf_b = (~_finite(one) & ~_nan(one) for one in given)
        lost_a, lost_b = (_finite(one) & ~_finite(fit) for one, fit in zip(given, made, strict=True))
        no_nan = ~(nan_a | nan_b)
        kinds = {
            "nan_only_a": nan_a,
            "nan_only_b": nan_b,
            "inf_only_a": no_nan & (inf_a | lost_a) & ~inf_b,
            "inf_only_b": no_nan & (inf_b | lost_b) & ~inf_a,
            "inf_opposite": no_nan & inf_a & inf_b,
        }
        self._add(**{name: int(mask.sum()) for name, mask in kinds.items()})
        one_sided = torch.stack(tuple(kinds.values())).any(0)
        places = where[one_sided][: self._keep + 1].tolist()
        self._note_first(at, places)
        self.one_sided = (self.one_sided + [at + place for place in places])[: self._keep]
        finite = ~one_sided
        return where[finite], made[0][finite], made[1][finite]

    def _note_first(self, at: int, places: list[int]) -> None:
        # A piece comes after all pieces that were counted before it.
        if places:
            self.first = min(self.first if self.first is not None else FAR, at + places[0])

    def _measure(self, at: int, where: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Count finite pairs whose bits are unlike: only zeros of two signs are equal among them."""
        import torch

        if not where.numel():
            return
        apart = distance(x, y)
        zeros = int((apart == 0).sum())
        self._add(equal=zeros, zero_signs=zeros)
        if zeros:
            some = apart != 0
            where, x, y, apart = where[some], x[some], y[some], apart[some]
            if not where.numel():
                return
        self._note_first(at, where[:1].tolist())
        self._buckets += torch.bincount(torch.bucketize(apart, self._limits), minlength=len(BUCKETS) + 1)
        self._keep_worst(at, where, apart)
        self._errors(at, where, (x, y), apart)

    def _keep_worst(self, at: int, where: torch.Tensor, apart: torch.Tensor) -> None:
        import torch

        self._counts["max_ulp"] = max(self._counts.get("max_ulp", 0), int(apart.max()))
        keep = min(self._keep, apart.numel())
        if not keep or (len(self.worst) == self._keep and -self.worst[-1][0] >= int(apart.max())):
            return
        # Not what topk names: of equal distances it takes any, and we want the first ones.
        least = apart.topk(keep).values[-1]
        chosen = torch.cat([(apart > least).nonzero().flatten(), (apart == least).nonzero().flatten()[:keep]])
        found = zip((-apart[chosen]).tolist(), (at + where[chosen]).tolist(), strict=True)
        self.worst = sorted([*self.worst, *found])[: self._keep]

    def _errors(
        self, at: int, where: torch.Tensor, numbers: tuple[torch.Tensor, torch.Tensor], apart: torch.Tensor
    ) -> None:
        import torch

        x, y = (one.to(_wide(one.dtype)).to(torch.float64) for one in numbers)
        exact = not precision(self._unit)
        off = apart.to(torch.float64) if exact else (x - y).abs_().clamp_(max=sys.float_info.max)
        most, place = off.max(0)
        if float(most) > self.largest[0]:
            self.largest = (float(most), at + int(where[place]))
        size = torch.maximum(x.abs(), y.abs())
        self.max_rel = max(self.max_rel, min(2.0, float((off / size).max())))
        scale = self._scale() if not exact else 0.0
        scaled = torch.minimum(apart, (off / scale).ceil().clamp(1, 2.0**62).long()) if scale else apart
        no_a, no_b = x == 0, y == 0
        self._zeros = [self._zeros[0] + int(no_a.sum()), self._zeros[1] + int(no_b.sum())]
        zero = no_a | no_b
        if bool(zero.any()):
            self._scaled_zero = max(self._scaled_zero, int(scaled[zero].max()))
            self._own_zero = max(self._own_zero, int(apart[zero].max()))
            scaled = scaled[~zero]
        if scaled.numel():
            self._scaled = max(self._scaled, int(scaled.max()))

    def counts(self) -> Counts:
        """Give the counts of all pieces."""
        exact = self._counts.get("equal", 0)
        numbers = [int(count) for count in self._buckets]
        numbers[0] += exact
        lows = [0, *(limit + 1 for limit in BUCKETS)]
        highs = [*BUCKETS, None]
        buckets = zip(lows, highs, numbers, strict=True)
        return Counts(
            **self._counts,
            histogram=tuple(Bucket(least=low, most=high, count=count) for low, high, count in buckets if count),
        )


def _same_value(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Tell where numbers of two dtypes are the same, of which 64 bits of integers are too many for any float."""
    import torch

    if precision(a.dtype):
        a, b = b, a
    if a.dtype.itemsize < 8 or precision(a.dtype):
        return a.to(torch.float64) == b.to(torch.float64)
    b = b.to(torch.float64)
    fits = (b == b.trunc()) & (b >= -(2.0**63)) & (b < 2.0**63)
    return fits & (torch.where(fits, b, 0.0).to(torch.int64) == a.to(torch.int64))


def _nan(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(_wide(numbers.dtype)).isnan()


def _finite(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(_wide(numbers.dtype)).isfinite()
