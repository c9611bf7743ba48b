"""The operation that first produced nan or inf of finite numbers, observed while a forward is replayed."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from distdiag.training.overflow import extrema, nested
from distdiag.training.overflow.frames import Reading
from distdiag.training.overflow.replay import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from distdiag.training.overflow.frames import Frame, Line, Recorder


_FILL = ("fill", "where", "scatter", "index", "copy", "lift", "put", "tri", "clone", "detach", "pad")
"""Operations that write an -inf that the program chose, or move numbers unchanged; a conversion calculates nothing."""
_LEAST = {torch.finfo(dtype).min for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
"""Masks are made of these, too; two of them added up are -inf."""


@dataclass(frozen=True, eq=False)
class Maker:
    """An operation that produced nan or inf, in the module call `frame`.

    `least`: the least number of its only float input. `masked_row`: a softmax had a row of nothing but -inf.
    """

    operation: str
    frame: Frame | None
    least: float | None = None
    masked_row: bool = False


class Origins(TorchDispatchMode):
    """Maps each tensor that is not finite to the operation that produced it; filled-in -inf, as in masks, has none."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._made: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
        """Carry out an operation, and read its inputs and outputs."""
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in COLLECTIVES:
            return func(*args, **kwargs)
        given = None
        with contextlib.suppress(Exception):  # what cannot be read has no maker, and the forward continues
            given = _Given((args, kwargs))  # before the operation writes into them
        made = func(*args, **kwargs)
        if given is not None:
            with contextlib.suppress(Exception):
                self._keep(_name_of(func), given, made, args)
        return made

    def _keep(self, operation: str, given: _Given, made: object, args: Sequence[Any]) -> None:
        for tensor, least, greatest in extrema.pairs(tensor for _, tensor in nested.tensors(made, "")):
            if not extrema.is_bad(least, greatest):
                continue
            known = next((self._made[bad] for bad in given.bad if bad in self._made), None)
            if known is None and given.makes(operation, least, greatest):
                known = Maker(operation, self._recorder.current, given.least, given.has_masked_row(operation, args))
            if known is None:
                self._made.pop(tensor, None)  # filled in anew
            else:
                self._made[tensor] = known

    def maker_of(self, tensor: Tensor | None) -> Maker | None:
        """Return the operation that made a tensor not finite; None if it was filled in or is not known."""
        found: Maker | None = None if tensor is None else self._made.get(tensor)
        return found

    def of(self, line: Line) -> Maker | None:
        """Return the operation that made the tensor of a line not finite."""
        return self.maker_of(line.what.source) if isinstance(line.what, Reading) else None


class _Given:
    """The inputs of an operation."""

    def __init__(self, values: object) -> None:
        read = extrema.pairs(tensor for _, tensor in nested.tensors(values, ""))
        floats = [least for tensor, least, _ in read if tensor.dtype.is_floating_point]
        self.bad = [tensor for tensor, least, greatest in read if extrema.is_bad(least, greatest)]
        self.least = floats[0] if len(floats) == 1 and math.isfinite(floats[0]) else None
        self._is_any = bool(read)
        leaves = (leaf for _, leaf in nested.leaves(values, ""))
        self._has_bad = bool(self.bad) or any(least in _LEAST for least in floats)
        self._has_bad |= any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves)

    def makes(self, operation: str, least: float, greatest: float) -> bool:
        """Return whether an operation with this result calculated it: filled in or passed on is neither."""
        if not self._is_any or any(part in operation for part in _FILL):
            return False
        return not (self._has_bad and least == -math.inf < greatest < math.inf)

    def has_masked_row(self, operation: str, args: Sequence[Any]) -> bool:
        """Return whether a softmax had a row of nothing but -inf."""
        if "softmax" in operation:
            dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
            return any(extrema.has_masked_row(tensor, dim) for tensor in self.bad)
        return "attention" in operation and any(extrema.has_masked_row(tensor) for tensor in self.bad)


def _name_of(func: Any) -> str:  # noqa: ANN401
    return str(getattr(func, "_schema", func)).partition("(")[0].partition("::")[2].partition(".")[0].strip("_")
