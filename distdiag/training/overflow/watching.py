"""Which models are watched, and by whom: each by one detector at most."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

    from distdiag.training.overflow.detector import DebugUnderflowOverflow

_watched: weakref.WeakKeyDictionary[Module, weakref.ref[DebugUnderflowOverflow]] = weakref.WeakKeyDictionary()


def is_watched(module: Module) -> bool:
    """Tell whether a detector is on a model."""
    return _watcher(module) is not None


def make_way(module: Module) -> None:
    """Take off a detector that the script did not ask for."""
    other = _watcher(module)
    if other is not None and other.gives_way:
        other.detach()


def begin(module: Module, detector: DebugUnderflowOverflow) -> None:
    """Note that it is watched by this detector."""
    _watched[module] = weakref.ref(detector)


def end(module: Module, detector: DebugUnderflowOverflow) -> bool:
    """Note that it is not watched by this detector any more; False if it was not."""
    if _watcher(module) is not detector:
        return False
    del _watched[module]
    return True


def _watcher(module: Module) -> DebugUnderflowOverflow | None:
    watcher = _watched.get(module)
    return watcher() if watcher is not None else None
