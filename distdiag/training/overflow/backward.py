"""The gradients of a model as the optimizer is about to use them, and calls of backward and of a GradScaler."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distdiag.training.overflow import extrema
from distdiag.training.overflow.modules import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from distdiag.training.overflow.detector import DebugUnderflowOverflow


class Gradient(NamedTuple):
    """A gradient whose extrema are still on the device."""

    name: str
    tensor: Tensor
    extrema: tuple[Tensor, Tensor]


class StepGradients(NamedTuple):
    """The gradients that an optimizer is about to use, and (`early`) the same when the backward made them, in order."""

    now: list[Gradient]
    early: list[Gradient]


NO_GRADIENTS = StepGradients([], [])


class GradientReader:
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
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._made.clear()

    def are_stepped_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps parameters of this model."""
        known = self._own.get(id(optimizer))
        if not known:  # parameters may have been given to it, or replaced, since
            self._names = {id(weight): clean(name) for name, weight in self._model.named_parameters()}
            known = any(id(weight) in self._names for weight in _weights(optimizer))
            self._own[id(optimizer)] = known
        return known

    def start(self, optimizer: Optimizer) -> StepGradients:
        """Start to read the gradients that an optimizer is about to use, the last made first."""
        early, self._made = list(self._made.values()), {}
        if getattr(optimizer, "found_inf", None) is not None:
            return NO_GRADIENTS  # a GradScaler and a fused optimizer: they are scaled, and looked at by those
        found = [
            _start(self._names[id(weight)], weight.grad) for weight in _weights(optimizer) if id(weight) in self._names
        ]
        return StepGradients([gradient for gradient in reversed(found) if gradient is not None], early)

    def now(self) -> StepGradients:
        """Start to read all gradients there are, where no step comes to look at them."""
        found = [_start(clean(name), weight.grad) for name, weight in self._model.named_parameters()]
        return StepGradients(
            [gradient for gradient in reversed(found) if gradient is not None], list(self._made.values())
        )

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
        found = extrema.start(grad)
    return None if isinstance(found, str) else Gradient(name, grad, found[1])


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


_listeners: weakref.WeakSet[DebugUnderflowOverflow] = weakref.WeakSet()
_ours: dict[str, Callable[..., Any]] = {}
"""What stands in place of torch's own functions, by name."""


def listen(detector: DebugUnderflowOverflow) -> None:
    """Notify a detector from now on."""
    _listeners.add(detector)
    for name, (place, before) in _places().items():
        if name not in _ours:
            _wrap(place, name, before)


def stop(detector: DebugUnderflowOverflow) -> None:
    """Notify it no more; torch is as it was, unless somebody else has wrapped it since."""
    _listeners.discard(detector)
    if not _listeners:
        for name, (place, _) in _places().items():
            if name in _ours and vars(place)[name] is _ours[name]:
                setattr(place, name, _ours.pop(name).__wrapped__)  # type: ignore[attr-defined]


def _places() -> dict[str, tuple[Any, Callable[..., None]]]:
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # before 2.3
    return {
        "backward": (torch.autograd, _before_backward),
        "scale": (scaler, _before_scale),
        "update": (scaler, _before_update),
    }


def _wrap(place: Any, name: str, before: Callable[..., None]) -> None:  # noqa: ANN401
    original = vars(place)[name]

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if _listeners and not torch.compiler.is_compiling():
            before(*args, **kwargs)
        return original(*args, **kwargs)

    _ours[name] = wrapped
    setattr(place, name, wrapped)


def _before_backward(tensors: Any = None, *args: object, **kwargs: object) -> None:  # noqa: ANN401
    _newest().before_backward(tensors)


def _before_scale(scaler: torch.amp.GradScaler, outputs: object = None) -> None:
    """Look at a loss before it is scaled: inf that the scale makes is the scaler's own business."""
    _newest().before_scale(outputs, scales=scaler.is_enabled())


def _newest() -> DebugUnderflowOverflow:
    return max(_listeners, key=lambda detector: detector.last_forward)


def _before_update(scaler: torch.amp.GradScaler, *args: object, **kwargs: object) -> None:
    """Return whether the scaler skipped a step; as no step then comes, nobody else looks at these gradients."""
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    skips = any(float(bad) for state in states for bad in state.get("found_inf_per_device", {}).values())
    for detector in tuple(_listeners):
        detector.before_update(scaler, skips=skips)
