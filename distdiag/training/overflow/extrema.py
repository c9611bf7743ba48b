"""The least and the greatest number of tensors. The device is not waited for until they are fetched, all at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.training.overflow.recorder import Reading


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
    """Return a strided tensor of real numbers that has the same least and greatest number, or say why there is none."""
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
    """Return whether a tensor can be read as it is."""
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
    """Return the tensor within a subclass: of a DTensor this rank's part."""
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
    """Return the readable numbers of a tensor and, still unknown, the least and the greatest, nan if there is one.

    One pass over the memory and no temporary: of all of torch's ways that see nan and inf, aminmax is the fastest on a
    CPU. Gives the reason instead where it cannot be read; never raises.
    """
    try:
        plain = tensor if is_plain(tensor) else readable(tensor)
        return plain if isinstance(plain, str) else (plain, torch.aminmax(plain))
    except (RuntimeError, TypeError, ValueError):  # a dtype or a subclass of tomorrow
        return "unread"


def fetch(found: Sequence[Tensor]) -> list[float]:
    """Wait for 0-d tensors of any dtypes and give their values; one wait for each device."""
    if not found:
        return []
    dtype = found[0].dtype
    if dtype in _FLOATS and len({value.dtype for value in found}) == 1:
        try:
            return torch.stack(tuple(found)).tolist()
        except RuntimeError:  # of several devices
            pass
    values = [0.0] * len(found)
    places: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for number, value in enumerate(found):
        places.setdefault(value.device, {}).setdefault(value.dtype, []).append(number)
    for device, by_dtype in places.items():
        parts = [torch.stack([found[at] for at in where]).to(widest(device)) for where in by_dtype.values()]
        order = [at for where in by_dtype.values() for at in where]
        for at, value in zip(order, torch.cat(parts).tolist()):
            values[at] = value
    return values


def widest(device: torch.device) -> torch.dtype:
    """Return the floats of a device that hold those of all other dtypes, as far as it has such."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_bad(least: float, greatest: float) -> bool:
    """Return whether a tensor with these extrema holds nan or inf: aminmax hands on both."""
    return not (math.isfinite(least) and math.isfinite(greatest))


def any_bad(values: Iterable[float]) -> bool:
    """Return whether one of the numbers is not finite."""
    return not all(map(math.isfinite, values))


def abs_max(least: float, greatest: float) -> float:
    """Return the greatest magnitude from the extrema."""
    return greatest if math.isnan(greatest) else max(abs(least), abs(greatest))


def abs_min_of_extrema(least: float, greatest: float) -> float | None:
    """Return the smallest magnitude from the extrema; None where they lie on both sides of zero."""
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
    """Return whether it looks meant that a tensor is not finite: some of it is -inf, and the rest is small.

    So are masks, scores and logits where something is left out. What overflows has large numbers beside it; where it
    has not, nan or inf comes of it, which is seen.
    """
    return least == -math.inf < greatest <= limit(dtype) / 100


def has_masked_row(tensor: Tensor, dim: int = -1) -> bool:
    """Return whether a row of a mask is -inf from end to end: its softmax is nan."""
    return tensor.dim() > 0 and bool((tensor == -math.inf).all(dim).any())


def tally(tensor: Tensor) -> Tally | None:
    """Count what is wrong in a tensor; None where its numbers cannot be read."""
    plain = readable(tensor)
    if isinstance(plain, str):
        return None
    name = str(tensor.dtype)[len("torch.") :]
    # As the user indexes it, where that is possible: `numbers` may have its dimensions in another order.
    where = tensor if tensor.dtype in _FLOATS and tensor.layout is torch.strided and type(tensor) is Tensor else plain
    bad = ~torch.isfinite(where)
    first = bad.nonzero()[0].tolist() if bool(bad.any()) else None
    sizes = where.abs() if where.dtype in _FLOATS else where.to(torch.float64).abs()
    finite = sizes[~bad]
    tiny = torch.finfo(tensor.dtype).tiny if tensor.dtype.is_floating_point else 0.0
    counts = [where.isnan().sum(), (where == math.inf).sum(), (where == -math.inf).sum(), (sizes == 0).sum()]
    counts.append(((sizes > 0) & (sizes < tiny)).sum())
    nan, inf, minus_inf, zeros, subnormals = (int(count) for count in fetch(counts))
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
    """Return the greatest number of a dtype of floats; infinity for other dtypes."""
    return float(torch.finfo(dtype).max) if dtype.is_floating_point else math.inf


_PAIRS = 256


class ExtremaReader:
    """Reads tensors on their devices, and fetches all that was read at once.

    What is read is written side by side where it is fetched from: nothing is allocated for it, nor put together.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[torch.dtype, torch.device], _Buffer] = {}
        self._room: _Buffer | None = None

    def start(self, tensor: Tensor) -> tuple[Tensor, list[Reading]] | str:
        """Begin to read a tensor: gives its numbers, and where to put who wants to know; or why it cannot be read."""
        try:
            found = tensor if is_plain(tensor) else readable(tensor)
            if isinstance(found, str):
                return found
            room = self._room
            if room is None or room.dtype is not found.dtype or room.device != found.device:
                room = self._room = self._room_for(found)
            waiting = room.waiting
            if len(waiting) == len(room.pairs):
                room.grow()
            torch.aminmax(found, out=room.pairs[len(waiting)])
        except (RuntimeError, TypeError, ValueError):  # a dtype or a subclass of tomorrow
            return "unread"
        return found, waiting

    def fetch(self) -> tuple[list[float], list[Reading]]:
        """Wait for what was begun, once for each device: all numbers, and the readings, which have them as well now."""
        values: list[float] = []
        done: list[Reading] = []
        for device in {room.device for room in self._rooms.values() if room.waiting}:
            rooms = [room for room in self._rooms.values() if room.waiting and room.device == device]
            fetched = _together([room.written() for room in rooms]).tolist()
            readings = [reading for room in rooms for reading in room.waiting]
            for reading, least, greatest in zip(readings, fetched[::2], fetched[1::2]):
                reading.least, reading.greatest = least, greatest
            values, done = values + fetched, done + readings
        self.forget()
        return values, done

    def forget(self) -> None:
        """Nobody wants to know any more."""
        for room in self._rooms.values():
            room.waiting = []

    def _room_for(self, tensor: Tensor) -> _Buffer:
        kind = (tensor.dtype, tensor.device)
        if kind not in self._rooms:
            self._rooms[kind] = _Buffer(*kind)
        return self._rooms[kind]


class _Buffer:
    """Numbers of one dtype on one device, in pairs; `waiting`: who wants to know the first of them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.waiting: list[Reading] = []
        self._all = self._make(_PAIRS)

    def grow(self) -> None:
        """Make room for as many again."""
        before = self.written()
        self._all = self._make(2 * len(self.pairs))
        self._all[: len(before)] = before

    def written(self) -> Tensor:
        """Return what was read so far."""
        return self._all[: 2 * len(self.waiting)]

    def _make(self, pairs: int) -> Tensor:
        with torch.inference_mode(mode=False):  # a tensor of that mode could not be written to outside of it
            room = torch.empty(2 * pairs, dtype=self.dtype, device=self.device)
            self.pairs = [(room[at], room[at + 1]) for at in range(0, 2 * pairs, 2)]
        return room


def _together(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.to(widest(part.device)) for part in parts])
