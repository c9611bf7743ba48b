"""Modules by the names the user gave them, below whatever wraps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from torch.nn import Module

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes under which torch.compile, FSDP and activation checkpointing keep the module that they wrap."""


def within_ddp(model: Module) -> Module:
    """Give what DistributedDataParallel calls in its own forward, with inputs that are on the device.

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
    """Give the user's own module: what runs without torch.compile."""
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
    """Give the class's name, as the user wrote it: fully_shard puts FSDP before it."""
    kind = type(module)
    wrapped = kind.__name__.startswith("FSDP") and len(kind.__bases__) > 1
    return kind.__bases__[-1].__name__ if wrapped else kind.__name__
