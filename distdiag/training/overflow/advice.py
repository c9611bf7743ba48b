"""Warnings about float16: gradients that underflow, checked in steps 0, 1, 2, 4 and so on, and every 256th."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distdiag.training.overflow import extrema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.training.overflow.extrema import Watched


_EVERY = 256
_SHARE = 0.5
"""Minimum share of zeros and subnormals.

Subnormals must be as large a share of the nonzero values: embeddings have many zero rows, and gradients before a layer
of zeros are 0.
"""
_MEND = "Use autocast and a GradScaler with float32 weights, or bfloat16: model.to(torch.bfloat16)"
_SCALED = (
    "Scale the loss: scaler = torch.amp.GradScaler({device!r}); scaler.scale(loss).backward(); "
    "scaler.step(optimizer); scaler.update()"
)


def _is_due(step: int) -> bool:
    return step % _EVERY == 0 or (step < _EVERY and step & (step - 1) == 0)


class Underflow:
    """Detects gradients all exactly 0 in two consecutive steps, and mostly subnormal float16 gradients."""

    def __init__(self) -> None:
        self.autocast = self.scaled = False
        """Whether the forward computes in float16 by autocast, and whether a GradScaler scales the loss."""
        self._noted: set[str] = set()
        self._before_zeros: set[str] = set()
        """Gradients exactly 0 while others were not, as before a zero-initialized layer."""
        self._zeros_at = -1

    def look(self, gradients: Sequence[Watched], step: int) -> str:
        """Describe new underflow of a step; empty without any."""
        was_zero, self._zeros_at = self._zeros_at >= 0, -1
        if not gradients or not (was_zero or _is_due(step)):
            return ""
        half = self.autocast or any(gradient.tensor.dtype is torch.float16 for gradient in gradients)
        if half and not self.scaled and "" not in self._noted and _are_zero(gradients):
            if was_zero:
                return self._all_zero(gradients, step)
            self._zeros_at = step
            return ""
        return self._partly_lost(gradients, step) if _is_due(step) else ""

    def _all_zero(self, gradients: Sequence[Watched], step: int) -> str:
        self._noted.add("")
        weight = gradients[0].tensor
        mend = _MEND if weight.dtype is torch.float16 else _SCALED.format(device=weight.device.type)
        return (
            f"step {step}: all {len(gradients)} gradients are exactly 0, as in the step before: nothing is learned. "
            f"Either the loss does not depend on the weights, or they underflow: float16 has no number below 6e-08. "
            f"{mend}"
        )

    def _partly_lost(self, gradients: Sequence[Watched], step: int) -> str:
        shares = {gradient.label: self._share_of(gradient) for gradient in gradients}
        lost = {name: share for name, share in shares.items() if share >= _SHARE and name not in self._noted}
        if not lost:
            return ""
        self._noted |= lost.keys()
        name, share = max(lost.items(), key=lambda item: item[1])
        return (
            f"underflow in step {step}: {len(lost)} of {len(shares)} float16 gradients are mostly zero or subnormal; "
            f"`{name}.grad`: {100 * share:.0f}%. {_MEND}"
        )

    def _share_of(self, gradient: Watched) -> float:
        """Return the underflowed share of a float16 gradient; 0 for other dtypes and expected zeros."""
        tally = extrema.tally(gradient.tensor) if gradient.tensor.dtype is torch.float16 else None
        if tally is None or not tally.of:
            return 0.0
        share = (tally.zeros + tally.subnormals) / tally.of
        if tally.zeros == tally.of:
            self._before_zeros.add(gradient.label)
        elif share < _SHARE:
            self._before_zeros.discard(gradient.label)
        is_meant = gradient.label in self._before_zeros or tally.subnormals < _SHARE * (tally.of - tally.zeros)
        return 0.0 if is_meant else share


def _are_zero(gradients: Sequence[Watched]) -> bool:
    return bool(gradients) and not any(extrema.fetch([value for gradient in gradients for value in gradient.extrema]))
