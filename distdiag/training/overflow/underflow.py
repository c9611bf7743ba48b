"""Gradients in float16 that are mostly zero or subnormal: what underflowed is no error, and worth a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distdiag.training.overflow import numbers

if TYPE_CHECKING:
    from distdiag.training.overflow.gradients import Gradient

_SHARE = 0.5
"""From this share of zeros and subnormals on."""
_STEPS = {0, 1, 10, 100, 1000, 10_000, 100_000}


class Underflow:
    """Looks at the gradients of a few steps, and tells of each once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, gradients: list[Gradient], step: int) -> str:
        """Say what underflowed in a step; empty if that is not to be looked at, or there is nothing new."""
        if step not in _STEPS:
            return ""
        shares = {one.name: share_of(one) for one in gradients}
        lost = {name: share for name, share in shares.items() if share >= _SHARE and name not in self._told}
        if not lost:
            return ""
        self._told |= lost.keys()
        name, share = max(lost.items(), key=lambda one: one[1])
        return (
            f"underflow in step {step}: of {len(shares)} gradients in float16 {len(lost)} are mostly zero "
            f"or subnormal; `{name}.grad`: {100 * share:.0f} %. A GradScaler, or bfloat16, mends that."
        )


def share_of(gradient: Gradient) -> float:
    """Give the share of a float16 gradient that is zero or subnormal; 0 for dtypes of more range."""
    if gradient.tensor.dtype is not torch.float16:
        return 0.0
    told = numbers.tally(gradient.tensor)
    return 0.0 if told is None or not told.of else (told.zeros + told.subnormals) / told.of
