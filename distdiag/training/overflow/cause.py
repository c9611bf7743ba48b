"""From the first bad line of a forward to a detection: where it began, which operation produced it, and the fix.

Origins observes the operations of a replay: it finds the one that first made nan or inf of finite numbers.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from distdiag.record import record
from distdiag.training.overflow import extrema, modules
from distdiag.training.overflow.frames import NEAR, Found
from distdiag.training.overflow.replay import COLLECTIVES, Mode
from distdiag.training.overflow.report import (
    BACKWARD,
    BETWEEN,
    GIVEN,
    HERE,
    LOSS,
    WEIGHTS,
    Detection,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from distdiag.training.overflow.frames import Frame, Line, Reading, Recorder
    from distdiag.training.overflow.report import Place, Tally, When


_FILL = ("fill", "where", "scatter", "index", "copy", "lift", "put", "tri", "clone", "detach", "pad")
"""Operations that write a chosen -inf or move values unchanged, dtype conversions (`_to_copy`) included."""
_LEAST = {torch.finfo(dtype).min for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
"""Also used as fill values of masks; the sum of two is -inf."""
_LOSS_GREW = 2.0
_LOGS = {"log": 0, "log2": 0, "log10": 0, "log1p": -1, "logit": 0, "xlogy": 0}
"""The largest input for which each yields nan or inf."""
_ROOTS = ("sqrt", "pow", "acos", "asin", "acosh", "atanh")
_DIVISIONS = ("div", "reciprocal", "rsqrt", "remainder", "fmod")
FIXES = {
    GIVEN: "check the batch: the data, or the code before the model",
    WEIGHTS: "check the previous step: clip gradients, lower the learning rate, skip steps whose gradients are bad",
    LOSS: "check the loss: a log of 0, a division by 0, an exp of large values?",
    BACKWARD: "check the loss and its scale; gradients='each' finds the first bad gradient",
}
"""By origin, without a known module."""


@record(eq=False)
class Maker:
    """An operation that produced nan or inf, in the module call `frame`.

    `least`: minimum of its only float input. `masked_row`: a softmax had a row entirely -inf.
    """

    operation: str
    frame: Frame | None
    least: float | None = None
    masked_row: bool = False


class Origins(Mode):
    """Maps each non-finite tensor to the operation that produced it; filled-in -inf, as in masks, has none."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._made: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
        """Run an operation and read its inputs and outputs."""
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in COLLECTIVES:
            return func(*args, **kwargs)
        given = None
        with contextlib.suppress(Exception):  # an unreadable tensor has no maker; the forward continues
            given = _Given((args, kwargs))  # before the operation writes into them
        made = func(*args, **kwargs)
        if given is not None:
            with contextlib.suppress(Exception):
                self._keep(_name_of(func), given, made, args)
        return made

    def _keep(self, operation: str, given: _Given, made: object, args: Sequence[Any]) -> None:
        for tensor, least, greatest in extrema.pairs(tensor for _, tensor in modules.tensors(made, "")):
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
        """Return the operation that made a tensor non-finite; None if filled in or unknown."""
        found: Maker | None = None if tensor is None else self._made.get(tensor)
        return found

    def of(self, line: Line) -> Maker | None:
        """Return the operation that made a line's tensor non-finite."""
        return self.maker_of(line.reading.source) if line.reading else None


class _Given:
    """The inputs of an operation."""

    def __init__(self, values: object) -> None:
        read = extrema.pairs(tensor for _, tensor in modules.tensors(values, ""))
        floats = [least for tensor, least, _ in read if tensor.dtype.is_floating_point]
        self.bad = [tensor for tensor, least, greatest in read if extrema.is_bad(least, greatest)]
        self.least = floats[0] if len(floats) == 1 and math.isfinite(floats[0]) else None
        self._is_any = bool(read)
        leaves = (leaf for _, leaf in modules.leaves(values, ""))
        self._has_bad = bool(self.bad) or any(least in _LEAST for least in floats)
        self._has_bad |= any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves)

    def makes(self, operation: str, least: float, greatest: float) -> bool:
        """Return whether the operation calculated this result, rather than filled it in or passed it on."""
        if not self._is_any or any(part in operation for part in _FILL):
            return False
        return not (self._has_bad and least == -math.inf < greatest < math.inf)

    def has_masked_row(self, operation: str, args: Sequence[Any]) -> bool:
        """Return whether a softmax had a row entirely -inf."""
        if "softmax" in operation:
            dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
            return any(extrema.has_masked_row(tensor, dim) for tensor in self.bad)
        return "attention" in operation and any(extrema.has_masked_row(tensor) for tensor in self.bad)


def _name_of(func: Any) -> str:  # noqa: ANN401
    return str(getattr(func, "_schema", func)).partition("(")[0].partition("::")[2].partition(".")[0].strip("_")


class _Beginning(NamedTuple):
    """The first bad line, the call that produced it in its own code, and the operation."""

    line: Line
    frame: Frame
    maker: Maker | None = None


def from_frames(
    bad: Line, frames: Sequence[Frame], masks: Sequence[Line], when: When, origins: Origins | None = None
) -> Found:
    """Describe the first bad line from the frames before it and, in a replay, the `origins` of its tensors."""
    began = _beginning(bad, masks, origins) if bad.phase in ("input", "output") else None
    line, frame, maker = began or _Beginning(bad, bad.frame)
    origin, frame = _origin(line, frame)
    place, made_by = line.frame.place, frame.place
    tally = _tally(line)
    became = "" if line is bad else f", and {bad.frame.place} turned it into {_bad_kinds(bad)}"
    detection = Detection(
        "",
        *when,
        module=place.module,
        module_class=place.kind,
        tensor=line.label,
        origin=origin,
        made_by=made_by.module,
        made_by_class=made_by.kind,
        operation="" if maker is None else maker.operation,
        what=tally.kinds if tally else line.reading.not_finite if line.reading else "",
        why=_why(origin, made_by, _before(line, masks, origin), maker, became),
        hints=tuple(_hints(bad, frames, masks)),
        fix=_fix(origin, maker, line, made_by),
        tally=tally,
        number=max(line.frame.number, 0),
    )
    return Found(detection, tuple(frames))


def except_for_masks(masks: Sequence[Line], origins: Origins) -> str:
    """Name the first module output with -inf, calculated before filled in, and its operation."""
    outputs = [mask for mask in masks if mask.phase == "output"]
    line = next(iter([*filter(origins.of, outputs), *outputs]), None)
    if line is None:
        return ""
    maker = origins.of(line)
    by = ", as in masks" if maker is None else f", which {how(maker)} produced from finite values"
    return f"-inf in `{line.label}` of {line.frame.place}{by}"


def how(maker: Maker) -> str:
    """Describe the operation that produced nan or inf: `log` of a tensor with min 0."""
    if maker.masked_row:
        return f"`{maker.operation}` of a row that is all -inf"
    depends_on_min = maker.operation in (*_LOGS, *_ROOTS, "reciprocal", "rsqrt")
    given = f" of a tensor with min {maker.least:.3g}" if maker.least is not None and depends_on_min else ""
    return f"`{maker.operation}`{given}"


def diverges(losses: Sequence[float]) -> list[str]:
    """Return a hint if the last losses grew, the oldest first."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 3 or finite[-1] < _LOSS_GREW * abs(finite[0]):
        return []
    shown = ", ".join(f"{loss:.3g}" for loss in losses)
    return [f"The loss was growing ({shown}): lower the learning rate, use warm-up, or clip the gradients."]


def _beginning(bad: Line, masks: Sequence[Line], origins: Origins | None) -> _Beginning | None:
    """Trace a bad line back through -inf assumed to be a mask; None if it began at the line itself."""
    maker = None if origins is None else origins.of(bad)
    before = [mask for mask in masks if mask.order < bad.order]
    if maker is None or maker.frame is None or origins is None:
        line = _through_frames(bad, before)
        return None if line is None else _Beginning(line, line.frame)
    if maker.frame is bad.frame:
        return _Beginning(bad, bad.frame, maker)
    if maker.frame in _around(bad.frame):
        shown = (line for line in before if line.phase == "input" and origins.of(line) is maker)
        return _Beginning(min(shown, key=lambda line: line.order, default=bad), maker.frame, maker)
    line = next((line for line in maker.frame.lines if line.phase == "output" and line.is_bad), None)
    return None if line is None else _Beginning(line, maker.frame, maker)


def _through_frames(bad: Line, masks: Sequence[Line]) -> Line | None:
    """Find the -inf output of a module with finite inputs that a later module turned into nan."""
    outputs = sorted((mask for mask in masks if mask.phase == "output"), key=lambda line: line.order)
    read = _bad_inputs(bad.frame) if bad.phase == "output" else []
    found = None
    while read:
        found = next((line for line in outputs if any(line.what is given.what for given in read)), None)
        if found is None:
            return None
        outputs = [line for line in outputs if line.order < found.order]
        read = _bad_inputs(found.frame)
    return found


def _bad_inputs(frame: Frame) -> list[Line]:
    return [line for line in frame.lines if line.phase == "input" and line.is_bad]


def _around(frame: Frame) -> Iterator[Frame]:
    while frame.parent is not None:
        frame = frame.parent
        yield frame


def _origin(line: Line, frame: Frame) -> tuple[str, Frame]:
    """Return the origin (see Detection) and the call that produced it."""
    if line.phase in ("weight", "buffer"):
        return WEIGHTS, line.frame
    if frame is not line.frame:
        return BETWEEN, frame
    if line.phase == "input":
        return (GIVEN, frame) if frame.parent is None else (BETWEEN, frame.parent)
    return HERE, frame


def _before(line: Line, masks: Sequence[Line], origin: str) -> str:
    """Describe earlier -inf assumed to be a mask; empty if all values were finite."""
    if origin == HERE:
        labels = [f"`{given.label}`" for given in _bad_inputs(line.frame)]
        return f"Inputs were finite except for -inf in {', '.join(labels)}, as in masks" if labels else ""
    earlier = (mask for mask in masks if mask.phase == "output" and mask.order < line.order)
    mask = next(earlier, None) if origin == BETWEEN else None
    if mask is None:
        return ""
    return f"Outputs before it were finite except for -inf in `{mask.label}` of {mask.frame.place}, as in masks"


def _why(origin: str, made_by: Place, before: str, maker: Maker | None, became: str) -> str:
    """Describe the origin; `became`: the module that turned -inf, possibly intended, into nan or inf."""
    by = f" ({how(maker)})" if maker else ""
    if origin == HERE:
        return f"{before or 'Inputs were finite'}; this module produced it{by}{became}."
    if origin == BETWEEN:
        before = before or "All outputs before it were finite"
        return f"{before}: the forward of {made_by} produced it{by} and passed it on{became}."
    return ""


def _tally(line: Line) -> Tally | None:
    reading = line.reading
    source = reading.source if reading and reading.unchanged() else None
    return None if source is None else extrema.tally(source)


def _bad_kinds(line: Line) -> str:
    """Count nan and inf of a tensor without the -inf passed through."""
    tally = _tally(line)
    return (replace(tally, minus_inf=0).kinds if tally else "") or (line.reading.not_finite if line.reading else "")


def _hints(bad: Line, frames: Sequence[Frame], masks: Sequence[Line]) -> Iterator[str]:
    if bad.phase == "output":
        rows = [mask for mask in masks if mask.order < bad.order and _has_masked_row(mask.reading)]
        for mask in rows[-1:]:
            yield f"A whole row of the mask `{mask.label}` of {mask.frame.place} is -inf: its softmax is nan."
    near = max((line for frame in frames for line in frame.lines if line is not bad), key=_share, default=bad)
    if near.reading is not None and near is not bad and _share(near) >= NEAR:
        dtype = str(near.reading.dtype)[len("torch.") :]
        of_limit = f"{near.reading.abs_max:.2e} = {100 * _share(near):.0f}% of {dtype} max"
        wider = " Run that part in bfloat16 or float32." if dtype == "float16" else ""
        yield f"Before it: {of_limit}, `{near.label}` of {near.frame.place}.{wider}"
    weights = [line.reading for line in bad.frame.lines if line.phase == "weight"]
    source = bad.reading.source if bad.reading and bad.reading.dtype is torch.float16 else None
    if (
        source is not None
        and bad.phase == "output"
        and not any(each and each.dtype is torch.float16 for each in weights)
    ):
        yield _in_float32(bad.frame.name, source.device.type)  # only autocast makes float16 of float32 weights


def _has_masked_row(reading: Reading | None) -> bool:
    numbers = reading.numbers if reading and reading.unchanged() else None
    return numbers is not None and extrema.has_masked_row(numbers)


def _share(line: Line) -> float:
    return line.reading.share_of_limit if line.reading else 0.0


def _fix(origin: str, maker: Maker | None, line: Line, made_by: Place) -> str:
    """Return the fix, or a check if the cause is uncertain."""
    dtype = line.reading.dtype if line.reading else None
    if origin == HERE:
        return _of_operation(maker) or _of_dtype(dtype, "this module")
    if origin != BETWEEN:
        return FIXES.get(origin, "")
    by = f"`{made_by.module}`" if made_by.module else "the model"
    where = f"in the forward of {by}, before it calls `{line.frame.name}`"
    if maker is None:
        return f"check the code {where}: a division, log, exp or scale"
    return f"{_of_operation(maker) or _of_dtype(dtype, f'`{maker.operation}`')} ({where})"


def _of_operation(maker: Maker | None) -> str:
    """Return the fix for an operation; empty if only large inputs make it overflow."""
    if maker is None:
        return ""
    name = f"`{maker.operation}`"
    if maker.masked_row:
        return (
            f"leave at least one position unmasked in each row, or set the rows that are all masked to 0 after {name}"
        )
    if maker.operation in _LOGS:
        lowest = _LOGS[maker.operation]
        if maker.least is not None and maker.least <= lowest:
            return f"{name} read {maker.least:.3g}: clamp its input, or add an epsilon"
        return f"an input of {name} at or below {lowest}? clamp it, or add an epsilon"
    if maker.operation in _ROOTS:
        return f"an input of {name} out of its range? clamp it"
    return f"{name} by 0? clamp the divisor, or add an epsilon" if maker.operation in _DIVISIONS else ""


def _of_dtype(dtype: torch.dtype | None, what: str) -> str:
    if dtype is torch.float16:
        return f"if the inputs of {what} are near 65504, run it in bfloat16 or float32; else check its formula"
    return f"check the formula of {what} and the size of its inputs"


def _in_float32(name: str, device: str) -> str:
    """Write the lines that make a module run in float32, without autocast."""
    module = f"model.get_submodule({name!r})" if name else "model"
    return (
        f"In float32, without autocast: m = {module}; "
        "m.register_forward_pre_hook(lambda m, a: tuple(x.float() if x.is_floating_point() else x for x in a)); "
        f'm.forward = torch.autocast("{device}", enabled=False)(m.forward)'
    )
