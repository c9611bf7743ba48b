"""Warnings about 16 bits: float16 outputs that grow, gradients that underflow, bfloat16 weights that stay unchanged.

Outputs and gradients are checked in steps 0, 1, 2, 4 and so on, and every 256th.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distdiag.training.overflow import extrema
from distdiag.training.overflow.cause import in_float32
from distdiag.training.overflow.frames import Reading, Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from distdiag.training.overflow.gradients import Gradient
    from distdiag.training.overflow.replay import Call
    from distdiag.training.overflow.report import Place


_EVERY = 256
_LARGE = 1e4
"""In float16 the product of two such numbers is inf."""
_GROWTH = 2.0
_SHARE = 0.5
"""Minimum share of unchanged weights; of zeros and subnormals.

Subnormals must be as large a share of the nonzero values: embeddings have many zero rows, and gradients before a layer
of zeros are 0.
"""
_BFLOAT = "In bfloat16: model.to(torch.bfloat16)"
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


class Growth:
    """Tracks float16 outputs of modules between checks; records the first forward of a step."""

    def __init__(self, model: Module, *, reads_frames: bool) -> None:
        self._model, self._reads_frames = model, reads_frames
        self._recorder: Recorder | None = None
        self._sizes: dict[Place, list[float]] = {}
        """The first, the previous and the latest largest magnitude of each module."""
        self._steps: list[int] = []
        self._noted = 0.0

    def begin(self, step: int, args: tuple[object, ...], kwargs: dict[str, object], *, autocast: bool) -> None:
        """Record the forward if a check is due and some of it is float16."""
        if not self._reads_frames or not _is_due(step) or step in self._steps[-1:]:
            return
        if any(map(_is_compiled, self._model.modules())):
            return
        if not autocast and not any(weight.dtype is torch.float16 for weight in self._model.parameters()):
            return
        self._steps.append(step)
        self._recorder = Recorder(self._model, 1, ("*",), exact=False)
        self._recorder.attach()
        self._recorder.begin(args, kwargs, everything=True)

    def end(self, output: object, *, autocast: bool) -> str:
        """End the recording; warn of outputs that grew over three checks to near the float16 maximum."""
        if self._recorder is None:
            return ""
        self._recorder.end(output)
        sizes: dict[Place, float] = {}
        for frame in self._recorder.frames:
            for line in frame.lines:
                if line.phase == "output" and isinstance(line.what, Reading) and line.what.dtype is torch.float16:
                    sizes[frame.place] = max(sizes.get(frame.place, 0.0), _finite_size(line.what))
        self.stop()
        grown = [place for place, size in sizes.items() if self._has_grown(place, size)]
        most = max((sizes[place] for place in grown), default=0.0)
        if not grown or most < _GROWTH * self._noted:
            return ""
        self._noted = most
        place, device = grown[0], next(self._model.parameters()).device.type
        others = f", as in {len(grown) - 1} modules after it" if len(grown) > 1 else ""
        return (
            f"step {self._steps[-1]}: the float16 output of {place} grows{others}: {self._sizes[place][0]:.1e} in step "
            f"{self._steps[0]}, {sizes[place]:.1e} now, {100 * sizes[place] / extrema.limit(torch.float16):.0f}% of "
            f"float16 max; 1e4 x 1e4 overflows. {in_float32(place.module, device) if autocast else _BFLOAT}"
        )

    def stop(self) -> None:
        """Remove the hooks, also after an exception in the forward."""
        if self._recorder is not None:
            self._recorder.detach()
            self._recorder = None

    def _has_grown(self, place: Place, size: float) -> bool:
        known = self._sizes.setdefault(place, [])
        known.append(size)
        if len(known) > 3:
            del known[1]
        rises = len(known) == 3 and known[0] < known[1] < known[2]
        return size >= _LARGE and rises and size >= _GROWTH * known[0]


def _finite_size(reading: Reading) -> float:
    """Return the largest magnitude; 0 for nan, inf and the fill value of masks."""
    return reading.abs_max if reading.share_of_limit else 0.0


def _is_compiled(module: Module) -> bool:
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


class Underflow:
    """Detects gradients all exactly 0 in two consecutive steps, and mostly subnormal float16 gradients."""

    def __init__(self) -> None:
        self._noted: set[str] = set()
        self._before_zeros: set[str] = set()
        """Gradients exactly 0 while others were not, as before a zero-initialized layer."""
        self._zeros_at = -1

    def look(self, gradients: Sequence[Gradient], step: int, *, autocast: bool, scaled: bool) -> str:
        """Describe new underflow of a step; empty without any."""
        was_zero, self._zeros_at = self._zeros_at >= 0, -1
        if not gradients or not (was_zero or _is_due(step)):
            return ""
        half = autocast or any(gradient.tensor.dtype is torch.float16 for gradient in gradients)
        if half and not scaled and "" not in self._noted and _are_zero(gradients):
            if was_zero:
                return self._all_zero(gradients, step)
            self._zeros_at = step
            return ""
        return self._partly_lost(gradients, step) if _is_due(step) else ""

    def _all_zero(self, gradients: Sequence[Gradient], step: int) -> str:
        self._noted.add("")
        weight = gradients[0].tensor
        mend = _MEND if weight.dtype is torch.float16 else _SCALED.format(device=weight.device.type)
        return (
            f"step {step}: all {len(gradients)} gradients are exactly 0, as in the step before: nothing is learned. "
            f"Either the loss does not depend on the weights, or they underflow: float16 has no number below 6e-08. "
            f"{mend}"
        )

    def _partly_lost(self, gradients: Sequence[Gradient], step: int) -> str:
        shares = {gradient.name: self._share_of(gradient) for gradient in gradients}
        lost = {name: share for name, share in shares.items() if share >= _SHARE and name not in self._noted}
        if not lost:
            return ""
        self._noted |= lost.keys()
        name, share = max(lost.items(), key=lambda item: item[1])
        return (
            f"underflow in step {step}: {len(lost)} of {len(shares)} float16 gradients are mostly zero or subnormal; "
            f"`{name}.grad`: {100 * share:.0f}%. {_MEND}"
        )

    def _share_of(self, gradient: Gradient) -> float:
        """Return the underflowed share of a float16 gradient; 0 for other dtypes and expected zeros."""
        tally = extrema.tally(gradient.tensor) if gradient.tensor.dtype is torch.float16 else None
        if tally is None or not tally.of:
            return 0.0
        share = (tally.zeros + tally.subnormals) / tally.of
        if tally.zeros == tally.of:
            self._before_zeros.add(gradient.name)
        elif share < _SHARE:
            self._before_zeros.discard(gradient.name)
        is_meant = gradient.name in self._before_zeros or tally.subnormals < _SHARE * (tally.of - tally.zeros)
        return 0.0 if is_meant else share


def _are_zero(gradients: Sequence[Gradient]) -> bool:
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


class Advice:
    """All warnings for one model. `scaled`: whether a GradScaler scales the loss."""

    def __init__(self, model: Module, *, reads_frames: bool) -> None:
        self._growth, self._underflow = Growth(model, reads_frames=reads_frames), Underflow()
        self._lost_updates = LostUpdates()
        self._autocast = self.scaled = False
        self.stop = self._growth.stop
        self.after_step = self._lost_updates.after_step

    def before_forward(self, step: int, call: Call, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Begin with the first forward of a step."""
        self._autocast = call.casts_to(torch.float16)
        self._growth.begin(step, args, kwargs, autocast=self._autocast)

    def after_forward(self, output: object) -> str:
        """Return a warning about the outputs, or ""."""
        return self._growth.end(output, autocast=self._autocast)

    def before_step(self, gradients: Sequence[Gradient], step: int, optimizer: Optimizer) -> str:
        """Return a warning of the gradients of a step, or "", and prepare after_step(): a warning of its updates."""
        self._lost_updates.before_step(optimizer)
        return self._underflow.look(gradients, step, autocast=self._autocast, scaled=self.scaled)
