"""Warnings about 16 bits: gradients that underflow, checked in steps 0, 1, 2, 4 and so on, and every 256th;
and bfloat16 weights that stay unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distdiag.training.overflow import extrema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from distdiag.training.overflow.extrema import Watched


_EVERY = 256
_SHARE = 0.5
"""Minimum share of unchanged weights; of zeros and subnormals.

Subnormals must be as large a share of the nonzero values: embeddings have many zero rows, and gradients before a layer
of zeros are 0.
"""
_MEND = "Use autocast and a GradScaler with float32 weights, or bfloat16: model.to(torch.bfloat16)"
_SCALED = (
    "Scale the loss: scaler = torch.amp.GradScaler({device!r}); scaler.scale(loss).backward(); "
    "scaler.step(optimizer); scaler.update()"
)
_SAMPLE = 1024
"""Sampled elements of each bfloat16 parameter, evenly spaced."""
_KEPT_ELSEWHERE = ("master", "kahan", "comp", "shift")
"""Substrings of optimizer state names for float32 copies or compensation terms, which keep small updates."""


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


class LostUpdates:
    """Compares a sample of the weights before and after one optimizer step; synchronizes once.

    Only weights with a gradient count. The step checked is the first with a learning rate not above the previous: small
    updates are expected during warmup.
    """

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._sampled: list[tuple[Tensor, Tensor, Tensor]] = []
        self._is_over = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Copy the sample if this step is to be checked."""
        if self._is_over:
            return
        rate = _learning_rate(optimizer)
        last = self._last.get(id(optimizer))
        self._last[id(optimizer)] = rate
        if last is None or not 0 < rate <= last or getattr(optimizer, "found_inf", None) is not None:
            return
        self._is_over = True
        if not _keeps_more(optimizer):
            self._sampled = [(now, now.clone(), gradient != 0) for now, gradient in _samples(optimizer)]

    def after_step(self, optimizer: Optimizer, step: int) -> str:
        """Return a warning if most of the sample is unchanged."""
        sampled, self._sampled = self._sampled, []
        if not sampled:
            return ""
        device = sampled[0][0].device
        counts = [torch.stack(((now == was).logical_and(used).sum(), used.sum())) for now, was, used in sampled]
        same, of = torch.stack([each.to(device) for each in counts]).sum(0).tolist()
        if not of or same < _SHARE * of:
            return ""
        return (
            f"step {step}: {same / of:.0%} of the bfloat16 weights with a gradient did not change, of a sample of "
            f"{of:,}: at a learning rate of {_learning_rate(optimizer):.3g} the update is smaller than half the "
            "spacing of bfloat16, and is lost. Keep the weights in float32 and compute in bfloat16 by autocast, or use "
            "an optimizer with float32 copies or stochastic rounding"
        )


def _learning_rate(optimizer: Optimizer) -> float:
    """Return the maximum over its groups; a tensor counts as 0, to avoid a fetch."""
    return max(
        (rate for group in optimizer.param_groups if isinstance(rate := group.get("lr"), (int, float))), default=0.0
    )


def _keeps_more(optimizer: Optimizer) -> bool:
    """Return whether the optimizer rounds stochastically or keeps extra bits of the weights."""
    names = {str(name).lower() for state in optimizer.state.values() if isinstance(state, dict) for name in state}
    return any(part in name for name in names for part in _KEPT_ELSEWHERE) or any(
        "stochastic" in name and bool(value) for name, value in vars(optimizer).items()
    )


def _samples(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of each bfloat16 parameter and its gradient, of the local shard if sharded."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is None or weight.dtype is not torch.bfloat16:
                continue
            local = [getattr(each, "_local_tensor", each).detach() for each in (weight, weight.grad)]
            if all(each.is_contiguous() and each.numel() for each in local):
                distance = -(-local[0].numel() // _SAMPLE)
                now, gradient = (each.view(-1)[::distance] for each in local)
                yield now, gradient
