"""Which operation of which module first made nan or inf of finite numbers, seen while a forward is run again."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from distdiag.training.overflow import extrema, nested
from distdiag.training.overflow.recorder import Reading
from distdiag.training.overflow.replay import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.training.overflow.recorder import Frame, Line, Recorder


_FILL = ("fill", "where", "scatter", "index", "copy", "lift", "put", "tri", "clone", "detach", "pad")
"""Operations that write an -inf that the program chose, or move numbers unchanged; a conversion calculates nothing."""
_LEAST = {torch.finfo(dtype).min for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
"""Masks are made of these, too; two of them added up are -inf."""


@dataclass(frozen=True, eq=False)
class Maker:
    """An operation that made nan or inf, and the call of a module that it ran in.

    `least`: the least number that it was given, where that was one tensor. `masked_row`: a softmax was given a row of
    nothing but -inf.
    """

    operation: str
    frame: Frame | None
    least: float | None = None
    masked_row: bool = False


class Origins(TorchDispatchMode):
    """Sees each operation of a forward, and keeps of each tensor that is not finite which operation made that.

    -inf that was filled in, as in masks, has no maker; what makes nan or inf of it has.
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._made: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
        """Carry out an operation, and look at what goes in and comes out."""
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in COLLECTIVES:
            return func(*args, **kwargs)
        given = None
        with contextlib.suppress(Exception):  # what cannot be read has no maker, and the forward goes on
            given = _Given((args, kwargs))  # before it writes into them
        made = func(*args, **kwargs)
        if given is not None:
            with contextlib.suppress(Exception):
                self._keep(_name_of(func), given, made, args)
        return made

    def _keep(self, operation: str, given: _Given, made: object, args: Sequence[Any]) -> None:
        for tensor, least, greatest in _not_finite(made):
            known = next((self._made[bad] for bad in given.bad if bad in self._made), None)
            if known is None and given.makes(operation, least, greatest):
                known = Maker(operation, self._recorder.current, given.least, given.has_masked_row(operation, args))
            if known is None:
                self._made.pop(tensor, None)  # filled in anew
            else:
                self._made[tensor] = known

    def maker_of(self, tensor: Tensor | None) -> Maker | None:
        """Return what made a tensor not finite; None where it was filled in, or that is not known."""
        found: Maker | None = None if tensor is None else self._made.get(tensor)
        return found

    def of(self, line: Line) -> Maker | None:
        """Return what made a tensor of a frame not finite."""
        return self.maker_of(line.what.source) if isinstance(line.what, Reading) else None


class _Given:
    """What an operation was given."""

    def __init__(self, values: object) -> None:
        read = list(_read(values))
        floats = [least for tensor, least, _ in read if tensor.dtype.is_floating_point]
        self.bad = [tensor for tensor, least, greatest in read if extrema.is_bad(least, greatest)]
        self.least = floats[0] if len(floats) == 1 and math.isfinite(floats[0]) else None
        self._is_any = bool(read)
        self._has_least = any(least in _LEAST for least in floats)
        self._has_scalar = any(
            isinstance(leaf, float) and not math.isfinite(leaf) for _, leaf in nested.leaves(values, "")
        )

    def makes(self, operation: str, least: float, greatest: float) -> bool:
        """Return whether an operation with this result calculated it, and did not fill in or hand on what is meant."""
        if not self._is_any or any(part in operation for part in _FILL):
            return False
        if not (self.bad or self._has_least or self._has_scalar):
            return True
        return not least == -math.inf < greatest < math.inf

    def has_masked_row(self, operation: str, args: Sequence[Any]) -> bool:
        """Return whether a softmax was given a row of nothing but -inf."""
        if "softmax" in operation:
            dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
            return any(extrema.has_masked_row(tensor, dim) for tensor in self.bad)
        return "attention" in operation and any(extrema.has_masked_row(tensor) for tensor in self.bad)


def _name_of(func: Any) -> str:  # noqa: ANN401
    return str(getattr(func, "_schema", func)).partition("(")[0].partition("::")[2].partition(".")[0].strip("_")


def _read(value: object) -> Iterator[tuple[Tensor, float, float]]:
    """List the tensors of a value with the least and the greatest of each; the device is waited for once."""
    with torch.no_grad():
        found = ((tensor, extrema.start(tensor)) for _, tensor in nested.tensors(value, ""))
        read = [(tensor, pair[1]) for tensor, pair in found if not isinstance(pair, str)]
        values = extrema.fetch([number for _, pair in read for number in pair])
    for (tensor, _), least, greatest in zip(read, values[::2], values[1::2]):
        yield tensor, least, greatest


def _not_finite(value: object) -> Iterator[tuple[Tensor, float, float]]:
    return (read for read in _read(value) if extrema.is_bad(read[1], read[2]))


@dataclass(frozen=True)
class Beginning:
    """Where it began: the first line that shows it, and the call whose own code made it.

    `maker` is None where only the frames tell.
    """

    line: Line
    frame: Frame
    maker: Maker | None = None


def beginning(bad: Line, masks: Sequence[Line], origins: Origins | None) -> Beginning | None:
    """Go back from what went wrong to where it began, -inf that was taken for a mask included.

    None where the line itself is all that is known.
    """
    maker = None if origins is None else origins.of(bad)
    before = [mask for mask in masks if mask.order < bad.order]
    if maker is None or maker.frame is None or origins is None:
        line = _through_frames(bad, before)
        return None if line is None else Beginning(line, line.frame)
    if maker.frame is bad.frame:
        return Beginning(bad, bad.frame, maker)
    if maker.frame in _around(bad.frame):
        shown = (line for line in before if line.phase == "input" and origins.of(line) is maker)
        return Beginning(min(shown, key=lambda line: line.order, default=bad), maker.frame, maker)
    line = next((line for line in maker.frame.lines if line.phase == "output" and is_bad(line)), None)
    return None if line is None else Beginning(line, maker.frame, maker)


def _through_frames(bad: Line, masks: Sequence[Line]) -> Line | None:
    """Find the output with -inf that came to a module which made nan of it, of a module with finite inputs."""
    outputs = sorted((mask for mask in masks if mask.phase == "output"), key=lambda line: line.order)
    read = went_in(bad.frame) if bad.phase == "output" else []
    found = None
    while read:
        found = next((line for line in outputs if any(line.what is given.what for given in read)), None)
        if found is None:
            return None
        outputs = [line for line in outputs if line.order < found.order]
        read = went_in(found.frame)
    return found


def went_in(frame: Frame) -> list[Line]:
    """List what went into a call and was not finite."""
    return [line for line in frame.lines if line.phase == "input" and is_bad(line)]


def is_bad(line: Line) -> bool:
    """Return whether a line is of a tensor with nan or inf."""
    return isinstance(line.what, Reading) and line.what.is_bad


def _around(frame: Frame) -> Iterator[Frame]:
    while frame.parent is not None:
        frame = frame.parent
        yield frame
