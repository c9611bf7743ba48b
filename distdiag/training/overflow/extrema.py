"""Minimum and maximum of tensors, computed on their devices and fetched together."""

from __future__ import annotations

import math
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from distdiag.training.overflow.report import Tally, is_one_of_many
from distdiag.training.printflock import printflock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Started = tuple[Tensor, tuple[Tensor, ...]]


_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_COMPLEX = {torch.complex128, torch.complex64, torch.complex32}
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
_PIECE = 1 << 24
replaying: set[int] = set()
"""The threads in which a forward is run again."""


def readable(tensor: Tensor) -> Tensor | str:
    """Return a strided real tensor with the same extrema, or the reason why that is impossible."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        local = getattr(tensor, "to_local", None)  # DTensor: this rank's part
        if local is None and hasattr(tensor, "fake_mode"):
            return "fake"
        tensor = tensor if local is None else local()
    if tensor.layout is not torch.strided or tensor.is_nested:
        if tensor.is_mkldnn:
            return readable(tensor.to_dense())
        return readable(tensor._values() if tensor.layout is torch.sparse_coo else tensor.values())
    if tensor.is_meta:
        return "meta"
    if tensor.dtype not in _FLOATS and tensor.dtype not in _WHOLE:
        tensor = _converted(tensor)
    if tensor.numel() == 0:
        return "empty"
    return tensor if tensor.is_contiguous() else _in_order(tensor)


def _converted(tensor: Tensor) -> Tensor:
    if tensor.dtype in _COMPLEX:
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.is_quantized:
        return tensor.int_repr()
    # float8 in float32 keeps its nan and inf; wider integers are exact to 53 bits, enough for a magnitude.
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.float64)


def _in_order(tensor: Tensor) -> Tensor:
    """Permute to memory order without a copy: aminmax of a transposed tensor is 10 times slower."""
    for dim in range(tensor.dim() - 1, -1, -1):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:  # expanded: the same numbers again
            tensor = tensor.select(dim, 0)
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def start(tensor: Tensor) -> Started | str:
    """Return the readable view of a tensor and its minimum and maximum, 0-d on the device, nan if any is.

    One pass and no temporary: aminmax is the fastest reduction on a CPU that propagates nan and inf. Returns the reason
    if the tensor cannot be read; never raises.
    """
    try:
        plain = readable(tensor)
        return plain if isinstance(plain, str) else (plain, tuple(torch.aminmax(plain)))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # a dtype or a subclass of tomorrow
        return "unread"


class Watched(NamedTuple):
    """A tensor with its extrema still on the device. `tensor`: its maximum alone if it was not to be kept.

    Outputs of a model are not: until the next optimizer step that would be the logits of many forwards.
    """

    label: str
    extrema: tuple[Tensor, ...]
    tensor: Tensor

    @property
    def is_bad(self) -> bool:
        """Whether it has nan or inf, and does not look like masked logits."""
        least, greatest = fetch(self.extrema)
        return is_bad(least, greatest) and not may_be_masked(least, greatest, self.extrema[0].dtype)


def watch(named: Iterable[tuple[str, Tensor]], *, keep: bool = False) -> list[Watched]:
    """Start to read tensors, except for the unreadable; `keep` them too."""
    with torch.no_grad():
        read = [(label, tensor, start(tensor)) for label, tensor in named]
    found = ((label, tensor, both[1]) for label, tensor, both in read if not isinstance(both, str))
    return [Watched(label, both, tensor if keep else both[1]) for label, tensor, both in found]


def pairs(tensors: Iterable[Tensor]) -> list[tuple[Tensor, float, float]]:
    """Return the readable tensors with minimum and maximum; synchronizes with the device once."""
    with torch.no_grad():
        found = [(tensor, start(tensor)) for tensor in tensors]
        read = [(tensor, started[1]) for tensor, started in found if not isinstance(started, str)]
        values = fetch([number for _, both in read for number in both])
    return [(tensor, least, greatest) for (tensor, _), least, greatest in zip(read, values[::2], values[1::2])]


def fetch(found: Sequence[Tensor]) -> list[float]:
    """Return the values of 0-d tensors of any dtypes; synchronizes once per device."""
    if len({(value.dtype, value.device) for value in found}) == 1 and found[0].dtype in _FLOATS:
        return torch.stack(tuple(found)).tolist()
    devices = {value.device for value in found}
    values: dict[int, float] = {}
    for device in devices:
        order = [at for at, value in enumerate(found) if value.device == device]
        values.update(zip(order, stacked([found[at] for at in order], device).tolist()))
    return [values[at] for at in range(len(found))]


def stacked(found: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return 0-d tensors of any dtypes and devices as one tensor of the widest float on a device, without a fetch."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, value in enumerate(found):
        places.setdefault((value.device, value.dtype), []).append(number)
    widest = torch.float32 if device.type == "mps" else torch.float64
    values = torch.empty(len(found), dtype=widest, device=device)
    for where in places.values():
        values[torch.tensor(where, device=device)] = torch.stack([found[at] for at in where]).to(device, widest)
    return values


def is_bad(least: float, greatest: float) -> bool:
    """Return whether a tensor with these extrema has nan or inf: aminmax passes both on."""
    return not (math.isfinite(least) and math.isfinite(greatest))


def any_bad(values: Iterable[float]) -> bool:
    """Return whether one of the numbers is not finite."""
    return not all(map(math.isfinite, values))


def abs_min_of_extrema(least: float, greatest: float) -> float | None:
    """Return the smallest magnitude from the extrema; None if their signs differ."""
    if math.isnan(least) or least >= 0:
        return least
    return -greatest if greatest <= 0 else None


def abs_min(tensor: Tensor) -> float:
    """Return the smallest magnitude, in chunks: abs() makes a copy."""
    if tensor.dtype in _WHOLE:
        tensor = tensor.to(torch.float64)
    pieces: Iterable[Tensor] = tensor.view(-1).split(_PIECE) if tensor.is_contiguous() else (tensor,)
    return min(fetch([piece.abs().min() for piece in pieces]))


def may_be_masked(least: float, greatest: float, dtype: torch.dtype) -> bool:
    """Return whether a tensor looks like a mask, scores or logits: some -inf, and the rest small.

    An overflow has large numbers beside it; where it has not, nan or inf follows from it, which is seen.
    """
    return least == -math.inf < greatest <= limit(dtype) / 100


def has_masked_row(tensor: Tensor, dim: int = -1) -> bool:
    """Return whether a row of a mask is -inf from end to end: its softmax is nan."""
    return tensor.dim() > 0 and bool((tensor == -math.inf).all(dim).any())


def tally(tensor: Tensor) -> Tally | None:
    """Count the values of a bad tensor; None if it cannot be read."""
    plain = readable(tensor)
    if isinstance(plain, str):
        return None
    # As the user indexes it, if possible: the dimensions of `plain` may be permuted.
    where = tensor if tensor.dtype in _FLOATS and tensor.layout is torch.strided and type(tensor) is Tensor else plain
    bad = ~torch.isfinite(where)
    first = bad.nonzero()[0].tolist() if bool(bad.any()) else None
    sizes = where.abs() if where.dtype in _FLOATS else where.to(torch.float64).abs()
    finite = sizes[~bad]
    tiny = torch.finfo(tensor.dtype).tiny if tensor.dtype.is_floating_point else 0.0
    counts = [where.isnan().sum(), (where == math.inf).sum(), (where == -math.inf).sum(), (sizes == 0).sum()]
    counts.append(((sizes > 0) & (sizes < tiny)).sum())
    nan, inf, minus_inf, zeros, subnormals = map(int, fetch(counts))
    return Tally(
        shape=tuple(where.shape),
        dtype=str(tensor.dtype)[len("torch.") :],
        of=where.numel(),
        nan=nan,
        inf=inf,
        minus_inf=minus_inf,
        zeros=zeros,
        subnormals=subnormals,
        first=None if first is None else tuple(first),
        abs_max=float(finite.max()) if finite.numel() else None,
    )


def limit(dtype: torch.dtype) -> float:
    """Return the largest number of a floating-point dtype; infinity for other dtypes."""
    return float(torch.finfo(dtype).max) if dtype.is_floating_point else math.inf


def detect_overflow(var: torch.Tensor, ctx: str) -> bool:
    """Return whether a tensor contains nan or inf; if so, print what and where: `after layer_norm has infs`.

    Args:
        var: a tensor of any shape, dtype and layout; a tensor without values (meta, empty) counts as finite.
        ctx: name of the tensor in the printed line.
    """
    with torch.no_grad():
        found = start(var.detach())
        if isinstance(found, str) or not any_bad(fetch(found[1])):
            return False
        if get_ident() in replaying:  # printed when this forward ran for the script
            return True
        counts = tally(var.detach())
    lines = [f"{ctx} has nans or infs"]
    if counts is not None:
        bad = counts.inf + counts.minus_inf
        lines = [f"{ctx} has {kind}" for kind, count in (("nans", counts.nan), ("infs", bad)) if count]
        at, shape = (", ".join(map(str, numbers)) for numbers in (counts.first or (), counts.shape))
        size = f"{counts.nan + bad:,} of {counts.of:,} bad"
        lines.append(f"{ctx}: {counts.dtype} of shape [{shape}], {size}, the first at [{at}]")
    printflock("\n".join(lines), prefix=is_one_of_many())
    return True
