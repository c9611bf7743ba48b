"""Dtypes: their bits as integers in the order of the numbers, and correct rounding from one to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.training.floats.model import FAR

if TYPE_CHECKING:
    import torch

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
"""Bits of the significand, the hidden one included."""


def name_of(dtype: torch.dtype) -> str:
    """Give the short name: "float32"."""
    return str(dtype).removeprefix("torch.")


def precision(dtype: torch.dtype) -> int:
    """Count the significant bits of a float; 0 for integers, which are compared exactly."""
    return _PRECISION.get(name_of(dtype), 0)


def as_integers(numbers: torch.Tensor) -> torch.Tensor:
    """Look at the same bits as integers, without a copy."""
    import torch

    return numbers.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.dtype.itemsize])


def ordered(numbers: torch.Tensor) -> torch.Tensor:
    """Number the values of a dtype: neighbours differ by 1, and -0.0 and 0.0 are both 0. int64, of the same shape.

    Floats are stored as a sign and a magnitude whose bits rise with the number (IEEE 754, 3.4), so that counting down
    from zero for the negative ones is enough. A nan gets a number that means nothing.
    """
    import torch

    if precision(numbers.dtype):
        stored = as_integers(numbers)
        lowest = torch.iinfo(stored.dtype).min
        stored = stored.to(torch.int64)
        return torch.where(stored < 0, lowest - stored, stored)
    if name_of(numbers.dtype) == "uint64":  # torch has it since 2.3
        return numbers.view(torch.int64) ^ torch.iinfo(torch.int64).min  # the order stays, the zero moves
    return numbers.to(torch.int64)


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Count the steps from each number to the other one, int64; what int64 cannot hold becomes FAR."""
    import torch

    a, b = ordered(x), ordered(y)
    apart = a - b
    if x.dtype.itemsize < 8:
        return apart.abs()
    wrapped = (((a ^ b) & (apart ^ a)) < 0) | (apart == torch.iinfo(torch.int64).min)
    return torch.where(wrapped, FAR, apart.abs())


def rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest, ties to even, to a dtype that is not finer.

    torch goes from float64 to a small float by way of float32 and so rounds twice: 1 + 2**-8 + 2**-40 becomes 1.0 in
    bfloat16, which is the farther neighbour. Rounding to odd in between makes that right, as float32 has at least two
    bits more than those (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    import torch

    small = precision(dtype) <= precision(torch.float32) - 2
    if numbers.dtype == torch.float64 and small and precision(dtype):
        return _rounded_to_odd(numbers).to(dtype)
    return numbers.to(dtype)


def _rounded_to_odd(numbers: torch.Tensor) -> torch.Tensor:
    """Cut float64 to float32 towards zero, and set the last bit where something was cut off."""
    import torch

    nearest = numbers.to(torch.float32)
    back = nearest.to(torch.float64)
    stored = as_integers(nearest)
    towards_zero = stored - (back.abs() > numbers.abs()).to(torch.int32)
    # A nan is unequal to itself, and keeps its bits.
    inexact = (back != numbers) & ~numbers.isnan()
    return torch.where(inexact, towards_zero | 1, stored).view(torch.float32)
