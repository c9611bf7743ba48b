"""One operation computed in two ways: what was asked, and how far each result is from float64. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OPERATIONS = (
    *("matmul", "conv2d", "sum", "mean", "cumsum", "index_add"),
    *("exp", "log", "sin", "tanh", "pow", "rsqrt", "sigmoid", "gelu", "softmax", "layer_norm"),
)
DTYPES = ("float64", "float32", "float16", "bfloat16")
TF32_OPERATIONS = ("matmul", "conv2d")
PRECISIONS = ("highest", "high", "medium")


class Kind(StrEnum):
    """What explains the error of a result, the best first."""

    EXPECTED = "expected"
    """The rounding of its dtype."""
    TF32 = "tf32"
    """Inputs rounded to 11 bits, as TF32 does."""
    BFLOAT16 = "bfloat16"
    """Inputs rounded to 8 bits, as set_float32_matmul_precision("medium") does."""
    SHORT_SUM = "short-sum"
    """A sum that is kept in the 16 bits of the dtype."""
    BEYOND = "beyond"
    """Nothing of these."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to compute it, as typed, and what that means. `threads` 0: torch's own number."""

    typed: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    tf32: bool = False
    precision: str = ""
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How far one result is from the reference, which is computed in float64 from the same inputs.

    `of_limit`: the largest error over what the dtype's rounding explains there; `max_ulp`: the largest error in ulp of
    the dtype, at the size of the terms where they cancel; `not_finite`: numbers that are inf or NaN.
    """

    kind: Kind
    of_limit: float
    max_ulp: float
    right: float
    """Share of numbers that are correctly rounded, from 0 to 1."""
    not_finite: int
    reproducible: bool
    """Whether three runs gave the same bits."""
    worst_index: tuple[int, ...]
    worst_value: float
    worst_reference: float


@dataclass(frozen=True, kw_only=True)
class OpComparison:
    """Two ways to compute one operation. `identical`: the two results have the same bits."""

    operation: str
    size: int
    terms: int
    """Products or numbers that are added up to one result; 1 for a function."""
    sides: tuple[Side, Side]
    measured: tuple[Measured, Measured]
    numbers: int
    differing: int
    max_ulp: int
    """Between the two sides, in ulp of the coarser dtype."""
    unit: str
    identical: bool
