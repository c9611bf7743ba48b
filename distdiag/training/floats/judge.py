"""What distances mean: rounding, or more than that. Pure."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from distdiag.training.floats.model import Likeness

if TYPE_CHECKING:
    from distdiag.training.floats.model import Counts

_FINE, _SMALL, _TINY = (8, 256), (2, 8), (1, 2)


def limits(unit: str) -> tuple[int, int]:
    """Give the distances in ulp up to which numbers of a dtype differ by rounding: of one function, of a long sum.

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
        return _FINE
    return _SMALL if unit in ("float16", "bfloat16") else _TINY


def likeness(counts: Counts, unit: str, max_scaled_ulp: int) -> Likeness:
    """Judge the counts of one tensor; `unit` is empty for integers, where any difference counts."""
    if counts.one_sided:
        return Likeness.DIFFERS
    if not counts.differing:
        return Likeness.IDENTICAL
    function, sum_ = limits(unit)
    if not unit or max_scaled_ulp > sum_:
        return Likeness.DIFFERS
    return Likeness.ROUNDING if max_scaled_ulp <= function else Likeness.LONG_SUM


def share(part: int, whole: int) -> str:
    """Write a percentage that says 100 % of all alone, and 0 % of none alone."""
    if not whole or part in (0, whole):
        return "100 %" if part else "0 %"
    tenths = 1000 * part // whole
    if tenths in (0, 999):
        return "<0.1 %" if tenths == 0 else ">99.9 %"
    return f"{tenths // 10}.{tenths % 10} %"


def sum_of(max_ulp: int) -> str:
    """Say how long a sum would explain a distance."""
    length = max_ulp * max_ulp
    digits = 10 ** max(0, len(str(isqrt(length))) - 1)
    return f"{length // digits * digits:,}"
