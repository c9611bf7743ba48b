"""Detects bfloat16 weights unchanged by an optimizer step: the update is below half their spacing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.optim import Optimizer

_SAMPLE = 1024
"""Sampled elements of each parameter, evenly spaced."""
_SHARE = 0.5
_KEPT_ELSEWHERE = ("master", "kahan", "comp", "shift")
"""Substrings of optimizer state names for float32 copies or compensation terms, which keep small updates."""


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
