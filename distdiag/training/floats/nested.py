"""Nested dicts and lists taken apart into tensors by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_DEEPEST, _MOST = 100, 1_000_000


class Opaque(Exception):
    """A value that is no tensor and no plain value either; its text says what it is."""


def leaves(value: object, path: tuple[object, ...] = ()) -> dict[tuple[object, ...], object]:
    """List all that is no dict and no list, by the keys and indices that lead there; a list of numbers is one leaf.

    Raises:
        ValueError: nested too deeply, as what contains itself is, or more than a million values.
    """
    found: dict[tuple[object, ...], object] = {}
    _take_apart(value, path, found)
    return found


def _take_apart(value: object, path: tuple[object, ...], found: dict[tuple[object, ...], object]) -> None:
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple)) and not _is_numbers(value):
        inner = [(Index(number), one) for number, one in enumerate(value)]
    else:
        found[path] = value
        return
    if len(path) >= _DEEPEST or len(found) + len(inner) > _MOST:
        raise ValueError(f"nested deeper than {_DEEPEST} levels, or more than {_MOST:,} values")
    for key, one in inner:
        _take_apart(one, (*path, key), found)


class Index(int):
    """The index of a list; equal to a dict's key of the same number, as lists are sometimes saved so."""


def _is_numbers(value: list[object] | tuple[object, ...]) -> bool:
    return bool(value) and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value)


def name_of(path: tuple[object, ...]) -> str:
    """Write a path as a name: "model.layers[0].weight"."""
    name = ""
    for key in path:
        name += f"[{int(key)}]" if isinstance(key, Index) else f"{'.' if name else ''}{key}"
    return name


def as_tensor(value: object) -> torch.Tensor | None:
    """Make a tensor of numbers, arrays and lists of numbers; None for plain values that are none: text, None, dtypes.

    Python's numbers become float64, int64, bool and complex128.

    Raises:
        Opaque: it is neither.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if value is None or isinstance(value, (str, bytes, torch.dtype, torch.device, torch.layout)):
        return None
    try:
        if isinstance(value, (bool, int, float, complex, list, tuple)):
            return _of_numbers(value)
        if hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an array that is only for reading is only read
                return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:  # text, dates, objects, float128
        raise Opaque(f"{type(value).__name__}: {str(error).splitlines()[0][:120]}") from error
    hint = "; give its state_dict()" if hasattr(value, "state_dict") else ""
    raise Opaque(f"{type(value).__name__}{hint}")


def _of_numbers(value: Any) -> torch.Tensor | None:  # noqa: ANN401 - what torch.tensor takes
    import torch

    items = value if isinstance(value, (list, tuple)) else [value]
    floats = any(isinstance(one, float) for one in items)
    try:
        if floats:
            return torch.tensor(value, dtype=torch.float64)
        return torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else None)
    except (OverflowError, RuntimeError, ValueError):  # whole numbers beyond 64 bits, which compare well without torch
        return None


def plain(tensor: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Give a strided tensor of real numbers with the same values, and what there is to say about that.

    Raises:
        Opaque: it holds no values, or none that can be taken out.
    """
    import torch

    notes = []
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
        notes.append("a DTensor: only this rank's part")
    if tensor.is_meta:
        raise Opaque("a tensor on the meta device, which holds no values")
    if tensor.is_nested:
        raise Opaque("a nested tensor; give its components")
    if tensor.is_quantized:
        tensor = tensor.dequantize()
        notes.append("quantized: the values it stands for")
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
        notes.append("sparse: all of its values, the zeros too")
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
        notes.append("complex: two numbers each; the last index is 0 for the real part, 1 for the imaginary one")
    tensor = tensor.resolve_neg()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 and _is_odd_format(tensor.dtype):
        tensor = tensor.view(torch.uint8)
        notes.append("a format without ulps: compared byte by byte")
    return tensor, notes


def _is_odd_format(dtype: torch.dtype) -> bool:
    from distdiag.training.floats.bits import precision

    return precision(dtype) == 0
