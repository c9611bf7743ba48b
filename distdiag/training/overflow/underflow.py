"""Gradients that float16 is too coarse for: what underflowed is no error, and worth a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distdiag.training.overflow import numbers
from distdiag.training.overflow.glance import is_due
from distdiag.training.overflow.trail import Trail

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from distdiag.training.overflow.detection import Place
    from distdiag.training.overflow.gradients import Gradient

_SHARE = 0.5
"""From this share of zeros and subnormals on, if as much of what is not zero is subnormal.

Zeros alone mean nothing: rows of an embedding that were not looked up, and all that lies before a layer of zeros.
"""
_MEND = "Autocast and a GradScaler with weights in float32 mend that, or bfloat16: model.to(torch.bfloat16)"
_SCALED = (
    "Scale the loss: scaler = torch.amp.GradScaler({device!r}); scaler.scale(loss).backward(); "
    "scaler.step(optimizer); scaler.update()"
)


class Underflow:
    """Looks at the gradients of a few steps, and tells of each once.

    Where all of them are exactly 0 the next backward is followed: only what is lost there by rounding is told.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._before_zeros: set[str] = set()
        """Gradients that were exactly 0 while others were not, as before a layer of zeros; it begins to learn then."""
        self._zeros_at = -1
        self._trail: Trail | None = None

    @property
    def wants_trail(self) -> bool:
        """Whether the next backward is to be followed."""
        return self._zeros_at >= 0

    def follow(self, losses: object, places: Mapping[Any, Place]) -> None:
        """Follow a backward that is about to run."""
        if self._trail is None:  # of several before a step the first, whose forward was looked at
            self._trail = Trail(losses, places)

    def look(self, gradients: Sequence[Gradient], step: int, *, scaled: bool) -> str:
        """Say what underflowed in a step; empty if that is not to be looked at, or there is nothing new."""
        if self._trail is not None:
            trail, self._trail, before = self._trail, None, self._zeros_at
            self._zeros_at = -1
            return self._all_lost(trail, gradients, step, before)
        if not is_due(step) or not gradients:
            return ""
        if not scaled and "" not in self._told and _are_zero(gradients):
            self._zeros_at = step
            return ""
        return self._partly_lost(gradients, step)

    def _all_lost(self, trail: Trail, gradients: Sequence[Gradient], step: int, before: int) -> str:
        lost = trail.lost()
        if lost is None or not _are_zero(gradients):
            return ""
        self._told.add("")
        weight = gradients[0].tensor
        where = f"behind the output of {lost.behind}" if lost.behind else "before it comes to the model"
        mend = _MEND if weight.dtype is torch.float16 else _SCALED.format(device=weight.device.type)
        return (
            f"step {step}: all {len(gradients)} gradients are exactly 0, as they were in step {before}: they underflow "
            f"in float16. {lost.size:.1e} at most goes into the backward of {lost.operation}, {where}, and 0 comes "
            f"out; float16 has no number below 6e-08. {mend}"
        )

    def _partly_lost(self, gradients: Sequence[Gradient], step: int) -> str:
        shares = {one.name: self._share_of(one) for one in gradients}
        lost = {name: share for name, share in shares.items() if share >= _SHARE and name not in self._told}
        if not lost:
            return ""
        self._told |= lost.keys()
        name, share = max(lost.items(), key=lambda one: one[1])
        return (
            f"underflow in step {step}: of {len(shares)} gradients in float16 {len(lost)} "
            f"are mostly zero or subnormal; `{name}.grad`: {100 * share:.0f} %. {_MEND}"
        )

    def _share_of(self, gradient: Gradient) -> float:
        """Give the share of a float16 gradient that is lost; 0 for dtypes of more range, and where zeros are meant."""
        told = numbers.tally(gradient.tensor) if gradient.tensor.dtype is torch.float16 else None
        if told is None or not told.of:
            return 0.0
        share = (told.zeros + told.subnormals) / told.of
        if told.zeros == told.of:
            self._before_zeros.add(gradient.name)
        elif share < _SHARE:
            self._before_zeros.discard(gradient.name)
        is_meant = gradient.name in self._before_zeros or told.subnormals < _SHARE * (told.of - told.zeros)
        return 0.0 if is_meant else share


def _are_zero(gradients: Sequence[Gradient]) -> bool:
    return bool(gradients) and not any(numbers.fetch([end for one in gradients for end in one.ends]))
