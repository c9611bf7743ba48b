"""The modules of a model: within wrappers, by the names the user gave them; and hooks that copies do not inherit."""

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

detectors: weakref.WeakKeyDictionary[Module, weakref.ref[DebugUnderflowOverflow]] = weakref.WeakKeyDictionary()
"""By the model that each is on, as `within_ddp` returns it."""


def detector_of(module: Module) -> DebugUnderflowOverflow | None:
    """Return the detector that is on a model."""
    found = detectors.get(module)
    return found() if found is not None else None


def within_ddp(model: Module) -> Module:
    """Return the module that DistributedDataParallel calls in its forward, with inputs that are on the device.

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
    """Return the user's own module, without DistributedDataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
        if inner is None:
            return model
        model = inner


def named(model: Module) -> dict[Module, str]:
    """Map all modules of a model, itself "", to their names; one that is used twice has its first name."""
    return {module: clean(name) for name, module in model.named_modules()}


def clean(name: str) -> str:
    """Remove the wrappers from a name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def kind_of(module: Module) -> str:
    """Return the class's name as the user wrote it: fully_shard puts FSDP before it."""
    kind = type(module)
    wrapped = kind.__name__.startswith("FSDP") and len(kind.__bases__) > 1
    return kind.__bases__[-1].__name__ if wrapped else kind.__name__


class Hook:
    """Calls a method. Copied (an average of the weights is often a copy of the model) or pickled, it does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method
        self.__name__ = type(self).__name__

    def __call__(self, *args: object) -> None:
        """Call the method."""
        self._method(*args)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[object, ...]:
        # Of the standard library, so that a file can be read where there is no distdiag; it takes anything.
        return getattr, (contextlib.nullcontext(), "__exit__")
