"""Distances between numbers of one dtype in ulp, correct rounding, and walking large tensors in pieces."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from distdiag.training.floatcmp.result import FAR

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE = 2**16
"""Numbers compared together: the intermediate results of so many stay in a core's cache."""
_PRECISION = {
    **{"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8},
    **{"float8_e4m3fn": 4, "float8_e4m3fnuz": 4, "float8_e5m2": 3, "float8_e5m2fnuz": 3},
}
_MIXED_SIGNS = 0.05


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
    """Return the same numbers in a dtype that torch can compute in: float32 for anything below 32 bits."""
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
    """Round to nearest, ties to even, to a dtype that is not finer.

    torch goes from float64 to a small float by way of float32 and so rounds twice: 1 + 2**-8 + 2**-40 becomes 1.0 in
    bfloat16, which is the farther neighbour. Rounding to odd in between avoids that, as float32 has at least two
    bits more than those (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
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


def usual_size(tensor: torch.Tensor) -> float:
    """Return the geometric mean of the finite nonzero numbers, which a single large number hardly moves.

    0.0 if there are none, or if 95 % have one sign: results in which terms cancel have both signs.
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
    """Return the distance of a dtype's neighbours at each of these sizes, float64."""
    smallest = math.frexp(torch.finfo(dtype).smallest_normal)[1]
    exponents = torch.frexp(sizes.to(torch.float64))[1].clamp_min(smallest) - precision(dtype)
    return torch.exp2(exponents.to(torch.float64))
