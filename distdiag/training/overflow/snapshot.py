"""What a model holds in Python, to be put back: attributes, lists, dicts, counters, generators, gradients."""

from __future__ import annotations

import random
from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distdiag.training.overflow.random_numbers import numpy_random

if TYPE_CHECKING:
    from collections.abc import Callable

_DEEPEST = 6
_MOST = 200_000
"""So many objects are looked at; a model that holds more holds data."""
_NO_STATE = (str, bytes, int, float, complex, type, Tensor, FunctionType, MethodType, BuiltinFunctionType, ModuleType)


class Snapshot:
    """Remembers which objects the modules of a model hold, not what is in their tensors.

    Globals and what only a closure holds are not found.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._gradients = [(one, one.grad) for one in model.parameters()]
        self._modules = set(model.modules())
        for module in self._modules:
            self._keep(vars(module), 0)

    def put_back(self) -> None:
        """Let all be as it was."""
        for undo in self._undo:
            undo()
        for weight, grad in self._gradients:
            if weight.grad is not grad:
                weight.grad = grad

    def _keep(self, one: object, depth: int) -> None:
        if one is None or isinstance(one, _NO_STATE) or depth > _DEEPEST:
            return
        if id(one) in self._seen or len(self._seen) > _MOST:
            return
        if isinstance(one, nn.Module) and one in self._modules:
            return
        self._seen.add(id(one))
        undo, inside = _undo_of(one)
        if undo is not None:
            self._undo.append(undo)
        for part in inside:
            self._keep(part, depth + 1)


def _undo_of(one: Any) -> tuple[Callable[[], None] | None, list[object]]:  # noqa: ANN401
    """Give what puts an object back as it is now, and what it holds."""
    if isinstance(one, dict):
        before = dict(one)
        return (lambda: None if _same(one, before) else _fill(one, before)), list(before.values())
    if isinstance(one, (list, deque, bytearray)):
        items = list(one)
        return (lambda: None if _alike(one, items) else _refill(one, items)), items
    if isinstance(one, set):
        members = set(one)
        return (lambda: None if one == members else _refill(one, members)), []
    if isinstance(one, tuple):
        return None, list(one)
    drawn = _undo_of_generator(one)
    if drawn is not None:
        return drawn, []
    held = getattr(one, "__dict__", None)
    return None, [held] if isinstance(held, dict) else []


def _undo_of_generator(one: Any) -> Callable[[], None] | None:  # noqa: ANN401
    if isinstance(one, torch.Generator):
        state = one.get_state()
        return lambda: (one.set_state(state), None)[1]
    if isinstance(one, random.Random):
        numbers = one.getstate()
        return lambda: one.setstate(numbers)
    numpy = numpy_random()
    if numpy is not None and isinstance(one, numpy.Generator):
        bits = one.bit_generator.state
        return lambda: setattr(one.bit_generator, "state", bits)
    if numpy is not None and isinstance(one, numpy.RandomState):
        legacy = one.get_state(legacy=False)
        return lambda: one.set_state(legacy)
    return None


def _same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and all(
        a is c and b is d for (a, b), (c, d) in zip(now.items(), before.items(), strict=True)
    )


def _fill(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    now.clear()
    now.update(before)


def _alike(now: Any, before: list[object]) -> bool:  # noqa: ANN401
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _refill(now: Any, before: Any) -> None:  # noqa: ANN401
    now.clear()
    now.update(before) if isinstance(now, set) else now.extend(before)
