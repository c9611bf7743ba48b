"""Refuses, while a forward is run again, whatever would change what lives on after it or wait for other ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SPEAKS = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem")
_MEANS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")
"""Operations that write into their running mean and variance, of which torch's schemas say nothing."""


class Refused(Exception):
    """The forward was about to do what must not be done a second time."""


class Guard(TorchDispatchMode):
    """Sees each operation before it is carried out. `refused` says what was refused; empty if nothing was.

    Written to may be only what was made while it is on, or is `ours`; with `writes`, anything. Collectives may be those
    among `ranks`, who all run this.
    """

    supports_higher_order_operators = True

    def __init__(self, ranks: frozenset[int], *, writes: bool, ours: Iterable[object] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused = ""
        self._ranks, self._writes = ranks, writes
        self._made = {_memory_of(one) for one in ours if isinstance(one, Tensor)}
        self._generators = {id(one) for one in ours if isinstance(one, torch.Generator)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
        """Carry out an operation, unless it is refused."""
        kwargs = kwargs or {}
        if any(kind not in (Tensor, Parameter) for kind in types):
            return NotImplemented  # a subclass: what it does with its parts comes here again
        self._check(func, args, kwargs)
        made = func(*args, **kwargs)
        if not self._writes and _makes_anew(func):
            self._made |= {_memory_of(one) for one in _flat((made,)) if isinstance(one, Tensor)}
        return made

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ANN401
        if getattr(func, "namespace", "") in _SPEAKS and not _speakers(args, kwargs) <= self._ranks:
            self._refuse("it speaks with other ranks, which do not run it again")
        if self._writes:
            return
        for one in _written(func, args, kwargs):
            if isinstance(one, Tensor) and _memory_of(one) not in self._made:
                self._refuse(f"it changes a tensor that lives on after it ({func})")
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.Generator) and id(one) not in self._generators:
                self._refuse("it draws from a torch.Generator of the script's own")

    def _refuse(self, why: str) -> None:
        self.refused = self.refused or why
        raise Refused(why)


def _memory_of(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse: its parts are tensors of their own
        return id(tensor)


def _flat(values: Iterable[object]) -> Iterator[object]:
    for one in values:
        if isinstance(one, (tuple, list)):
            yield from _flat(one)
        else:
            yield one


@lru_cache(maxsize=4096)
def _arguments_written(func: Any) -> tuple[tuple[int, str], ...]:  # noqa: ANN401
    """List the places and names of the arguments that an operation writes into."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    if schema.name.partition("::")[2] in _MEANS:
        return tuple((at, one.name) for at, one in enumerate(schema.arguments) if one.name.startswith("running_"))
    found = ((at, one) for at, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write)
    return tuple((at, one.name) for at, one in found)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[object]:  # noqa: ANN401
    places = _arguments_written(func)
    if places and places[0][1].startswith("running_") and _is_off(func, args, kwargs):
        return
    for at, name in places:
        yield from _flat((args[at] if at < len(args) else kwargs.get(name),))


def _is_off(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ANN401
    """Tell whether a batch norm is told not to train."""
    at = next((at for at, one in enumerate(func._schema.arguments) if one.name in ("training", "train")), None)
    if at is None:
        return False
    given = args[at] if at < len(args) else kwargs.get(func._schema.arguments[at].name)
    return given is False


@lru_cache(maxsize=4096)
def _makes_anew(func: Any) -> bool:  # noqa: ANN401
    """Tell whether what an operation gives back is memory of its own."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    return schema.name == "aten::lift_fresh" or all(one.alias_info is None for one in schema.returns)


def _speakers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """Give the ranks that a collective is for; rank -1 is among them where that is not to be seen."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    found: set[int] = set()
    for one in _flat((*args, *kwargs.values())):
        try:
            if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
                found |= set(dist.get_process_group_ranks(dist.ProcessGroup.unbox(one)))
            elif isinstance(one, str):
                found |= set(dist.get_process_group_ranks(_resolve_process_group(one)))  # type: ignore[arg-type]
        except (RuntimeError, ValueError, KeyError, AttributeError):  # "sum", or a group that nobody names
            if not isinstance(one, str):
                found.add(-1)
    return frozenset(found)
