"""Gradients that an optimizer is about to use, and hooks on torch's own functions."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from distdiag.training.overflow.extrema import Watched, watch
from distdiag.training.overflow.modules import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    class Listener(Protocol):
        """A detector, notified of calls of torch's functions; `last_forward` orders detectors by their last forward."""

        last_forward: int

        def before_backward(self, tensors: object) -> None:
            """The script calls backward on these."""

        def before_scale(self, tensors: object, *, scales: bool) -> None:
            """A GradScaler, if enabled, is about to scale these."""

        def before_update(self, *, skips: bool) -> None:
            """A GradScaler updates its scale, after a skipped step or not."""


class StepGradients(NamedTuple):
    """Gradients before an optimizer step, the last computed first; `early`: as read during the backward."""

    now: list[Watched]
    early: list[Watched]


NO_GRADIENTS = StepGradients([], [])


class GradientReader:
    """Reads the gradients of one model: not, before each step, or with "each" also one by one during the backward.

    That finds the first bad gradient, before clipping or scaling.
    """

    def __init__(self, model: Module, mode: str) -> None:
        self._model, self._is_off = model, mode == "off"
        self._names: dict[int, str] = {}
        self._own: set[int] = set()
        self._made: dict[str, Watched] = {}
        self._handles: list[RemovableHandle] = []
        for name, weight in model.named_parameters() if mode == "each" else ():
            if weight.requires_grad:
                hook = functools.partial(self._saw, clean(name))
                self._handles.append(weight.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove the hooks, and read no more."""
        self._is_off = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._made.clear()

    def are_stepped_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps parameters of this model."""
        if id(optimizer) not in self._own:  # parameters may have been added to it, or replaced, since
            self._names = {id(weight): clean(name) for name, weight in self._model.named_parameters()}
            if any(id(weight) in self._names for weight in _weights(optimizer)):
                self._own.add(id(optimizer))
        return id(optimizer) in self._own

    def start(self, optimizer: Optimizer) -> StepGradients:
        """Start to read the gradients of an optimizer's parameters."""
        early, self._made = list(self._made.values()), {}
        if self._is_off or getattr(optimizer, "found_inf", None) is not None:
            return NO_GRADIENTS  # or a GradScaler with a fused optimizer: still scaled, and checked by those
        own = ((self._names.get(id(weight)), weight) for weight in _weights(optimizer))
        return StepGradients(_started((name, weight) for name, weight in own if name is not None), early)

    def now(self) -> StepGradients:
        """Start to read all gradients of the model, without a step."""
        named = ((clean(name), weight) for name, weight in self._model.named_parameters())
        return StepGradients(_started(named), list(self._made.values()))

    def _saw(self, name: str, weight: Tensor) -> None:
        self._made.pop(name, None)  # from a skipped step, or an earlier backward of this step
        self._made.update((gradient.label, gradient) for gradient in _started([(name, weight)]))


def _started(weights: Iterable[tuple[str, Tensor]]) -> list[Watched]:
    return watch(((name, weight.grad) for name, weight in weights if weight.grad is not None), keep=True)[::-1]


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_ours: dict[str, Callable[..., Any]] = {}
"""Our wrappers of torch's functions, by name."""


def listen(detector: Listener) -> None:
    """Notify a detector of backward and of a GradScaler's scale and update from now on."""
    _listeners.add(detector)
    for name, (place, before) in _places().items():
        if name not in _ours:
            _wrap(place, name, before)


def stop(detector: Listener) -> None:
    """Stop notifying it; after the last detector torch is restored, unless another wrapper was added since."""
    _listeners.discard(detector)
    if not _listeners:
        for name, (place, _) in _places().items():
            if name in _ours and vars(place)[name] is _ours[name]:
                setattr(place, name, _ours.pop(name).__wrapped__)  # type: ignore[attr-defined]


def _places() -> dict[str, tuple[Any, Callable[..., None]]]:
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # before 2.3
    return {
        "backward": (torch.autograd, lambda tensors=None, *_, **__: _newest().before_backward(tensors)),
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


def _before_scale(scaler: torch.amp.GradScaler, outputs: object = None) -> None:
    """Check a loss before scaling: overflow by the scale is the scaler's to handle."""
    _newest().before_scale(outputs, scales=scaler.is_enabled())


def _newest() -> Listener:
    return max(_listeners, key=lambda detector: detector.last_forward)


def _before_update(scaler: torch.amp.GradScaler, *args: object, **kwargs: object) -> None:
    """Notify of a skipped step, which leaves its gradients unchecked."""
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    skips = any(float(bad) for state in states for bad in state.get("found_inf_per_device", {}).values())
    for detector in tuple(_listeners):
        detector.before_update(skips=skips)
