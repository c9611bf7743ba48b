"""Tells detectors of each call of backward, and of what a GradScaler does, while there are any."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.training.overflow.detector import DebugUnderflowOverflow

_listeners: weakref.WeakSet[DebugUnderflowOverflow] = weakref.WeakSet()
_ours: dict[str, Callable[..., Any]] = {}
"""What stands in place of torch's own functions, by name."""


def listen(detector: DebugUnderflowOverflow) -> None:
    """Tell a detector from now on."""
    _listeners.add(detector)
    for name, (place, before) in _places().items():
        if name not in _ours:
            _wrap(place, name, before)


def stop(detector: DebugUnderflowOverflow) -> None:
    """Tell it no more; torch is as it was, unless somebody else has wrapped it since."""
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
    return max(_listeners, key=lambda one: one.last_forward)


def _before_update(scaler: torch.amp.GradScaler, *args: object, **kwargs: object) -> None:
    """Tell whether the scaler skipped a step; as no step then comes, nobody else looks at these gradients."""
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    skips = any(float(bad) for state in states for bad in state.get("found_inf_per_device", {}).values())
    for one in tuple(_listeners):
        one.before_update(scaler, skips=skips)
