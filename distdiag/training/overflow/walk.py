"""What a module is given and what it gives back, taken apart into tensors by name."""

from __future__ import annotations

from collections import UserDict
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DEEPEST = 16
_MOST = 4096
"""Of one value: whatever has more parts is data, and not what a model works with."""


def leaves(value: object, label: str) -> Iterator[tuple[str, object]]:
    """List what is no container, by the path that leads there: `output['x'][0]`, `output.hidden`.

    Tuples, lists, dicts (a ModelOutput of transformers is one) and dataclasses are opened, 16 levels deep.
    """
    if isinstance(value, Tensor):
        yield label, value
        return
    left = [_MOST]
    yield from _opened(value, label, 0, left)


def _opened(value: object, label: str, depth: int, left: list[int]) -> Iterator[tuple[str, object]]:
    inner = _inside(value) if depth < _DEEPEST else None
    if inner is None:
        left[0] -= 1
        yield label, value
        return
    for step, one in inner:
        if left[0] <= 0:
            return
        yield from _opened(one, label + step, depth + 1, left)


def _inside(value: object) -> Iterator[tuple[str, object]] | None:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (dict, UserDict)):  # another mapping may read a file for each of its values
        return ((f"[{key!r}]", one) for key, one in value.items())
    if isinstance(value, (tuple, list)):
        return ((f"[{number}]", one) for number, one in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{name}", vars(value)[name]) for name in _held(value))
    return None


def _held(value: object) -> list[str]:
    """Name the fields of a dataclass that are plain attributes; others are code, and may do anything."""
    return [field.name for field in fields(value) if field.name in getattr(value, "__dict__", {})]  # type: ignore[arg-type]


def inputs(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """List the arguments of a call: `input[0]`, `input['mask']`. Of keywords only tensors: the rest are settings."""
    for number, value in enumerate(args):
        yield from leaves(value, f"input[{number}]")
    for name, value in kwargs.items():
        for label, leaf in leaves(value, f"input[{name!r}]"):
            if isinstance(leaf, Tensor):
                yield label, leaf


def tensors(value: object, label: str) -> Iterator[tuple[str, Tensor]]:
    """List the tensors of a value by their paths."""
    for path, leaf in leaves(value, label):
        if isinstance(leaf, Tensor):
            yield path, leaf
