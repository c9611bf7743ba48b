"""Gradients at the moment when the optimizer is about to use them, named by their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from distdiag.training.overflow import numbers
from distdiag.training.overflow.names import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


class Gradient(NamedTuple):
    """A gradient whose ends are still on the device."""

    name: str
    tensor: Tensor
    ends: tuple[Tensor, Tensor]


class Made(NamedTuple):
    """The gradients that an optimizer is about to use, and (`early`) the same when the backward made them, in order."""

    now: list[Gradient]
    early: list[Gradient]


NONE = Made([], [])


class Gradients:
    """The gradients of one model. With `each`, they are also looked at one by one while the backward makes them.

    Then the first bad one is known, before anything clips or scales them.
    """

    def __init__(self, model: Module, *, each: bool) -> None:
        self._model = model
        self._names: dict[int, str] = {}
        self._own: dict[int, bool] = {}
        self._made: dict[str, Gradient] = {}
        self._handles: list[RemovableHandle] = []
        if each:
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    self._handles.append(weight.register_post_accumulate_grad_hook(self._hook(clean(name))))

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._made.clear()

    def are_stepped_by(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer steps parameters of this model."""
        known = self._own.get(id(optimizer))
        if not known:  # parameters may have been given to it, or replaced, since
            self._names = {id(weight): clean(name) for name, weight in self._model.named_parameters()}
            known = any(id(weight) in self._names for weight in _weights(optimizer))
            self._own[id(optimizer)] = known
        return known

    def start(self, optimizer: Optimizer) -> Made:
        """Start to read the gradients that an optimizer is about to use, the last made first."""
        early, self._made = list(self._made.values()), {}
        if getattr(optimizer, "found_inf", None) is not None:
            return NONE  # a GradScaler and a fused optimizer: they are scaled, and looked at by those
        found = [_start(self._names[id(one)], one.grad) for one in _weights(optimizer) if id(one) in self._names]
        return Made([one for one in reversed(found) if one is not None], early)

    def now(self) -> Made:
        """Start to read all gradients there are, where no step comes to look at them."""
        found = [_start(clean(name), weight.grad) for name, weight in self._model.named_parameters()]
        return Made([one for one in reversed(found) if one is not None], list(self._made.values()))

    def _hook(self, name: str):  # type: ignore[no-untyped-def] # noqa: ANN202 - a hook of torch
        def look(weight: Tensor) -> None:
            found = _start(name, weight.grad)
            self._made.pop(name, None)  # of a step that was skipped, or of an earlier part of this one
            if found is not None:
                self._made[name] = found

        return look


def _start(name: str, grad: Tensor | None) -> Gradient | None:
    if grad is None:
        return None
    with torch.no_grad():
        found = numbers.start(grad)
    return None if isinstance(found, str) else Gradient(name, grad, found[1])


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
