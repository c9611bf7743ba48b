"""Tensors -> a few numbers. The device is not waited for until `fetch`, and then once for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_COMPLEX = {torch.complex128, torch.complex64, torch.complex32}
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
_PIECE = 1 << 24


@dataclass(frozen=True)
class Tally:
    """All that is told of a tensor that went wrong; read when there is time.

    `first`: where the first number stands that is not finite; `zeros` and `subnormals`: as shares of `of` they are what
    underflowed; `abs_max` is that of the finite numbers, nan where there are none.
    """

    shape: tuple[int, ...]
    dtype: str
    of: int
    nan: int
    inf: int
    minus_inf: int
    zeros: int
    subnormals: int
    first: tuple[int, ...] | None
    abs_max: float


def readable(tensor: Tensor) -> Tensor | str:
    """Give a strided tensor of real numbers that has the same least and greatest number, or say why there is none."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        local = _unwrapped(tensor)
        if isinstance(local, str):
            return local
        tensor = local
    if tensor.layout is not torch.strided or tensor.is_nested:
        return _of_sparse(tensor)
    if tensor.device.type == "meta":
        return "meta"
    dtype = tensor.dtype
    if dtype not in _FLOATS and dtype not in _WHOLE:
        converted = _converted(tensor)
        if isinstance(converted, str):
            return converted
        tensor = converted
    if tensor.numel() == 0:
        return "empty"
    return tensor if tensor.is_contiguous() else _in_order(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor can be read as it is."""
    kind = type(tensor)
    return (
        (kind is Tensor or kind is Parameter)
        and tensor.dtype in _FLOATS
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )


def _unwrapped(tensor: Tensor) -> Tensor | str:
    """Take a tensor out of a subclass: of a DTensor this rank's part."""
    local = getattr(tensor, "to_local", None)
    if local is not None:
        part: Tensor = local()
        return part
    if hasattr(tensor, "fake_mode"):
        return "fake"
    return tensor


def _of_sparse(tensor: Tensor) -> Tensor | str:
    if tensor.is_mkldnn:
        return readable(tensor.to_dense())
    if tensor.layout is torch.sparse_coo:
        return readable(tensor._values())
    return readable(tensor.values())


def _converted(tensor: Tensor) -> Tensor | str:
    if tensor.dtype in _COMPLEX:
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.is_quantized:
        return tensor.int_repr()
    try:
        # float8 in float32 keeps its nan and inf; wider whole numbers keep their size to 53 bits, which is enough here.
        return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.float64)
    except (RuntimeError, TypeError, NotImplementedError):
        return "unread"


def _in_order(tensor: Tensor) -> Tensor:
    """Order the dimensions as they lie in memory, without a copy: aminmax of a transposed tensor is 10 times slower."""
    for dim in range(tensor.dim() - 1, -1, -1):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:  # expanded: the same numbers again
            tensor = tensor.select(dim, 0)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order)


def start(tensor: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]] | str:
    """Give the readable numbers of a tensor and, still unknown, the least and the greatest, nan if there is one.

    One pass over the memory and no temporary: of all of torch's ways that see nan and inf, aminmax is the fastest on a
    CPU. Gives the reason instead where it cannot be read; never raises.
    """
    try:
        numbers = tensor if is_plain(tensor) else readable(tensor)
        return numbers if isinstance(numbers, str) else (numbers, torch.aminmax(numbers))
    except (RuntimeError, TypeError, ValueError):  # a dtype or a subclass of tomorrow
        return "unread"


def fetch(found: Sequence[Tensor]) -> list[float]:
    """Wait for 0-d tensors of any dtypes and give their values; one wait for each device."""
    if not found:
        return []
    dtype = found[0].dtype
    if dtype in _FLOATS and len({one.dtype for one in found}) == 1:
        try:
            return torch.stack(tuple(found)).tolist()
        except RuntimeError:  # of several devices
            pass
    values = [0.0] * len(found)
    places: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for number, one in enumerate(found):
        places.setdefault(one.device, {}).setdefault(one.dtype, []).append(number)
    for device, by_dtype in places.items():
        parts = [torch.stack([found[at] for at in where]).to(widest(device)) for where in by_dtype.values()]
        order = [at for where in by_dtype.values() for at in where]
        for at, value in zip(order, torch.cat(parts).tolist()):
            values[at] = value
    return values


def widest(device: torch.device) -> torch.dtype:
    """Give the floats of a device that hold those of all other dtypes, as far as it has such."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_bad(least: float, greatest: float) -> bool:
    """Tell whether a tensor with these ends holds nan or inf: aminmax hands on both."""
    return not (math.isfinite(least) and math.isfinite(greatest))


def any_bad(values: Iterable[float]) -> bool:
    """Tell whether one of the numbers is not finite."""
    return not all(map(math.isfinite, values))


def abs_max(least: float, greatest: float) -> float:
    """Give the greatest magnitude from the ends."""
    return greatest if math.isnan(greatest) else max(abs(least), abs(greatest))


def abs_min_of_ends(least: float, greatest: float) -> float | None:
    """Give the smallest magnitude from the ends; None where they lie on both sides of zero."""
    if math.isnan(least) or least >= 0:
        return least
    return -greatest if greatest <= 0 else None


def abs_min(tensor: Tensor) -> float:
    """Read the numbers again for the smallest magnitude, in pieces: abs() makes a copy."""
    if tensor.dtype in _WHOLE:
        tensor = tensor.to(torch.float64)
    pieces: Iterable[Tensor] = tensor.view(-1).split(_PIECE) if tensor.is_contiguous() else (tensor,)
    return min(fetch([piece.abs().min() for piece in pieces]))


def may_be_masked(least: float, greatest: float, dtype: torch.dtype) -> bool:
    """Tell whether it looks meant that a tensor is not finite: some of it is -inf, and the rest is small.

    So are masks, scores and logits where something is left out. What overflows has large numbers beside it; where it
    has not, nan or inf comes of it, which is seen.
    """
    return least == -math.inf < greatest <= limit(dtype) / 100


def has_masked_row(tensor: Tensor) -> bool:
    """Tell whether a row of a mask is -inf from end to end: its softmax is nan."""
    return tensor.dim() > 0 and bool((tensor == -math.inf).all(-1).any())


def tally(tensor: Tensor) -> Tally | None:
    """Count what is wrong in a tensor; None where its numbers cannot be read."""
    numbers = readable(tensor)
    if isinstance(numbers, str):
        return None
    name = str(tensor.dtype)[len("torch.") :]
    # As the user indexes it, where that is possible: `numbers` may have its dimensions in another order.
    where = tensor if tensor.dtype in _FLOATS and tensor.layout is torch.strided and type(tensor) is Tensor else numbers
    bad = ~torch.isfinite(where)
    first = bad.nonzero()[0].tolist() if bool(bad.any()) else None
    sizes = where.abs() if where.dtype in _FLOATS else where.to(torch.float64).abs()
    finite = sizes[~bad]
    tiny = torch.finfo(tensor.dtype).tiny if tensor.dtype.is_floating_point else 0.0
    counts = [where.isnan().sum(), (where == math.inf).sum(), (where == -math.inf).sum(), (sizes == 0).sum()]
    counts.append(((sizes > 0) & (sizes < tiny)).sum())
    nan, inf, minus_inf, zeros, subnormals = (int(one) for one in fetch(counts))
    return Tally(
        shape=tuple(where.shape),
        dtype=name,
        of=where.numel(),
        nan=nan,
        inf=inf,
        minus_inf=minus_inf,
        zeros=zeros,
        subnormals=subnormals,
        first=None if first is None else tuple(first),
        abs_max=float(finite.max()) if finite.numel() else math.nan,
    )


def limit(dtype: torch.dtype) -> float:
    """Give the greatest number of a dtype of floats; infinity for other dtypes."""
    return float(torch.finfo(dtype).max) if dtype.is_floating_point else math.inf
