"""Modules of a model by the user's names, and the tensors within their inputs and outputs."""

from __future__ import annotations

import contextlib
import copy
from collections import UserDict
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.nn import Module


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes under which torch.compile, FSDP and activation checkpointing keep the wrapped module."""


def within_ddp(model: Module) -> Module:
    """Return the module that DistributedDataParallel calls in its forward, with inputs already on the device.

    Raises:
        ValueError: the model is DataParallel, which copies modules and their hooks into threads.
    """
    model = next(module for module in _nested(model) if not isinstance(module, DistributedDataParallel))
    if isinstance(model, DataParallel):
        raise ValueError("DataParallel copies the model for each device; use DistributedDataParallel (torchrun)")
    return model


def ddp_in(model: Module) -> DistributedDataParallel | None:
    """Find the DistributedDataParallel that a compiled model calls."""
    return next((module for module in _nested(model) if isinstance(module, DistributedDataParallel)), None)


def innermost(model: Module) -> Module:
    """Return the user's own module, without DistributedDataParallel and torch.compile."""
    return list(_nested(model))[-1]


def _nested(model: Module | None) -> Iterator[Module]:
    while model is not None:
        yield model
        model = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")


def named(model: Module) -> dict[Module, str]:
    """Map all modules of a model to their names ("" for the model); a shared module has its first name."""
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
    """Calls a method; a deep copy (an averaged model, for instance) or a pickle of it does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method
        self.__name__ = type(self).__name__

    def __call__(self, *args: object) -> None:
        """Call the method."""
        self._method(*args)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[object, ...]:
        # From the standard library, to load without distdiag; it accepts any arguments.
        return getattr, (contextlib.nullcontext(), "__exit__")


_DEEPEST = 16
_MOST = 4096
"""Limit on the parts of one value: larger containers are data, not inputs or outputs of modules."""


def leaves(value: object, label: str) -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested containers with their paths: `output['x'][0]`, `output.hidden`.

    Tuples, lists, dicts (a ModelOutput of transformers is one) and dataclasses are opened, 16 levels deep. Any other
    object with attributes is opened only at the top level: a nested one may be a cache of unbounded size.
    """
    if isinstance(value, Tensor):
        yield label, value
        return
    left = [_MOST]
    if _inside(value) is None and _is_object(value):
        for name, part in list(vars(value).items()):
            yield from _opened(part, f"{label}.{name}", 1, left)
        return
    yield from _opened(value, label, 0, left)


def _opened(value: object, label: str, depth: int, left: list[int]) -> Iterator[tuple[str, object]]:
    inner = _inside(value) if depth < _DEEPEST else None
    if inner is None:
        left[0] -= 1
        yield label, value
        return
    for step, part in inner:
        if left[0] <= 0:
            return
        yield from _opened(part, label + step, depth + 1, left)


def _inside(value: object) -> Iterator[tuple[str, object]] | None:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (dict, UserDict)):  # another mapping may read a file for each of its values
        return ((f"[{key!r}]", part) for key, part in value.items())
    if isinstance(value, (tuple, list)):
        return ((f"[{number}]", part) for number, part in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{name}", vars(value)[name]) for name in _held(value))
    return None


def _is_object(value: object) -> bool:
    return bool(getattr(value, "__dict__", None)) and not callable(value) and not isinstance(value, ModuleType)


def _held(value: object) -> list[str]:
    """Name the fields of a dataclass stored as plain attributes; others may run code."""
    return [field.name for field in fields(value) if field.name in getattr(value, "__dict__", {})]  # type: ignore[arg-type]


def inputs(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the arguments of a call, `input[0]`, `input['mask']`; of keyword arguments only tensors."""
    for number, value in enumerate(args):
        yield from leaves(value, f"input[{number}]")
    for name, value in kwargs.items():
        for label, leaf in leaves(value, f"input[{name!r}]"):
            if isinstance(leaf, Tensor):
                yield label, leaf


def tensors(value: object, label: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a value with their paths."""
    for path, leaf in leaves(value, label):
        if isinstance(leaf, Tensor):
            yield path, leaf


_PLAIN = (str, bytes, int, float, complex, type, slice, range, Enum, FunctionType, MethodType, partial, nn.Module)
_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator)


def opaque(value: object) -> str:
    """Name the class of a mutable object within a value that cannot be copied here; "" if all can.

    A cache of keys and values is such an object.
    """
    left = [_MOST]
    for _, leaf in _opened(value, "", 0, left):
        known = leaf is None or isinstance(leaf, (Tensor, *_PLAIN, *_TORCHS)) or callable(leaf)
        if not known:
            return type(leaf).__name__
    return "" if left[0] > 0 else f"{type(value).__name__} of more than {_MOST} parts"


def copied(value: object, leaf: Callable[[object], object]) -> Any:  # noqa: ANN401 - as it was given
    """Copy the containers of a value, with `leaf` applied to each leaf."""
    inside = _inside(value)
    if inside is None:
        return leaf(value)
    parts = [copied(part, leaf) for _, part in inside]
    if isinstance(value, tuple):
        same = all(a is b for a, b in zip(value, parts, strict=True))
        return value if same else value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    made: Any = copy.copy(value)
    if isinstance(value, list):
        made[:] = parts
    elif isinstance(value, (dict, UserDict)):
        for key, part in zip(value, parts, strict=True):
            made[key] = part
    else:
        for name, part in zip(_held(value), parts, strict=True):
            object.__setattr__(made, name, part)
    return made
