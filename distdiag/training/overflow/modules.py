"""The modules of a model: by the names the user gave them, hooks that stay with them, and which are watched."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

    from distdiag.training.overflow.detector import DebugUnderflowOverflow


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes under which torch.compile, FSDP and activation checkpointing keep the module that they wrap."""


def within_ddp(model: Module) -> Module:
    """Return what DistributedDataParallel calls in its own forward, with inputs that are on the device.

    Raises:
        ValueError: it is DataParallel, which copies the modules and their hooks into threads.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    if isinstance(model, DataParallel):
        raise ValueError("DataParallel copies the model for each device; use DistributedDataParallel (torchrun)")
    return model


def ddp_in(model: Module) -> DistributedDataParallel | None:
    """Find the DistributedDataParallel that a compiled model calls."""
    while not isinstance(model, DistributedDataParallel):
        inner = model._modules.get("_orig_mod")
        if inner is None:
            return None
        model = inner
    return model


def innermost(model: Module) -> Module:
    """Return the user's own module: what runs without torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
            continue
        inner = model._modules.get("_orig_mod")
        if inner is None:
            return model
        model = inner


def named(model: Module) -> dict[Module, str]:
    """Name all modules below one, itself "" ; a module that is used twice has the first of its names."""
    return {module: clean(name) for name, module in model.named_modules()}


def clean(name: str) -> str:
    """Leave the wrappers out of a name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def kind_of(module: Module) -> str:
    """Return the class's name, as the user wrote it: fully_shard puts FSDP before it."""
    kind = type(module)
    wrapped = kind.__name__.startswith("FSDP") and len(kind.__bases__) > 1
    return kind.__bases__[-1].__name__ if wrapped else kind.__name__


class Hook:
    """Calls a method. Copied (an average of the weights is often a copy of the model) or pickled, it does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method
        self.__name__ = type(self).__name__

    def __call__(self, *args: object) -> None:
        """Do as the method does."""
        self._method(*args)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[object, ...]:
        # Of the standard library, so that a file can be read where there is no distdiag; it takes anything.
        return getattr, (contextlib.nullcontext(), "__exit__")


_watched: weakref.WeakKeyDictionary[Module, weakref.ref[DebugUnderflowOverflow]] = weakref.WeakKeyDictionary()


def is_watched(module: Module) -> bool:
    """Return whether a detector is on a model."""
    return _watcher(module) is not None


def displace_watcher(module: Module) -> None:
    """Detach a detector that the script did not ask for."""
    other = _watcher(module)
    if other is not None and other.gives_way:
        other.detach()


def mark_watched(module: Module, detector: DebugUnderflowOverflow) -> None:
    """Note that it is watched by this detector."""
    _watched[module] = weakref.ref(detector)


def unmark_watched(module: Module, detector: DebugUnderflowOverflow) -> bool:
    """Note that it is not watched by this detector any more; False if it was not."""
    if _watcher(module) is not detector:
        return False
    del _watched[module]
    return True


def _watcher(module: Module) -> DebugUnderflowOverflow | None:
    watcher = _watched.get(module)
    return watcher() if watcher is not None else None
