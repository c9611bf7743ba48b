"""What the first line that went wrong means: where it began, what made it, and what helps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from distdiag.training.overflow import extrema
from distdiag.training.overflow.detection import BETWEEN, GIVEN, HERE, WEIGHTS, Became, Detection, Place, kinds
from distdiag.training.overflow.fixes import depends_on_min, fix_of, in_float32
from distdiag.training.overflow.origins import Beginning, beginning, went_in
from distdiag.training.overflow.recorder import NEAR, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.training.overflow.detection import When
    from distdiag.training.overflow.extrema import Tally
    from distdiag.training.overflow.origins import Maker, Origins
    from distdiag.training.overflow.recorder import Frame, Line


_LOSS_GREW = 2.0


def from_frames(
    bad: Line, frames: Sequence[Frame], masks: Sequence[Line], when: When, origins: Origins | None = None
) -> Detection:
    """Describe what the first line that went wrong means, from the frames that lead up to it and their `origins`."""
    began = beginning(bad, masks, origins) if bad.phase in ("input", "output") else None
    began = began or Beginning(bad, bad.frame)
    line, maker = began.line, began.maker
    origin, made = _origin(began)
    tally, dtype = _tally(line), line.what.dtype if isinstance(line.what, Reading) else None
    return Detection(
        when=when,
        place=_place(line.frame),
        tensor=line.label,
        origin=origin,
        made_by=_place(made),
        tally=tally,
        hints=tuple(_hints(bad, frames, masks)),
        number=max(line.frame.number, 0),
        seen=_before(line, masks, origin),
        operation="" if maker is None else maker.operation,
        how="" if maker is None else how(maker),
        became=None if line is bad else Became(_place(bad.frame), bad.label, _bad_kinds(bad)),
        kinds=_kinds(line),
        fix=fix_of(origin, maker, dtype, _place(line.frame), _place(made)),
        frames=tuple(frames),
    )


def except_for_masks(masks: Sequence[Line], origins: Origins) -> str:
    """Name the first output of a module that has -inf, one that was calculated before others, and what made that."""
    outputs = [mask for mask in masks if mask.phase == "output"]
    calculated = [mask for mask in outputs if origins.of(mask) is not None]
    line = next(iter([*calculated, *outputs]), None)
    if line is None:
        return ""
    maker = origins.of(line)
    by = ", as in masks" if maker is None else f", which {how(maker)} produced from finite values"
    return f"-inf in `{line.label}` of {_place(line.frame)}{by}"


def how(maker: Maker) -> str:
    """Describe an operation that made nan or inf: `log` of a tensor with min 0."""
    if maker.masked_row:
        return f"`{maker.operation}` of a row that is all -inf"
    given = f" of a tensor with min {maker.least:.3g}" if maker.least is not None and depends_on_min(maker) else ""
    return f"`{maker.operation}`{given}"


def diverges(losses: Sequence[float]) -> list[str]:
    """Return a hint where the last losses grew, the oldest first."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 3 or finite[-1] < _LOSS_GREW * abs(finite[0]):
        return []
    shown = ", ".join(f"{loss:.3g}" for loss in losses)
    return [f"The loss was growing ({shown}): lower the learning rate, use warm-up, or clip the gradients."]


def _origin(began: Beginning) -> tuple[str, Frame]:
    """Return where it was made, in the words of a detection, and in which call."""
    line, frame = began.line, began.line.frame
    if line.phase in ("weight", "buffer"):
        return WEIGHTS, frame
    if began.frame is not frame:
        return BETWEEN, began.frame
    if line.phase == "input":
        return (GIVEN, frame) if frame.parent is None else (BETWEEN, frame.parent)
    return HERE, frame


def _before(line: Line, masks: Sequence[Line], origin: str) -> str:
    """Describe what came before, where not all of it was finite: what was taken for a mask; empty if all was."""
    if origin == HERE:
        labels = [f"`{given.label}`" for given in went_in(line.frame)]
        return f"Inputs were finite except for -inf in {', '.join(labels)}, as in masks" if labels else ""
    earlier = (mask for mask in masks if mask.phase == "output" and mask.order < line.order)
    mask = next(earlier, None) if origin == BETWEEN else None
    if mask is None:
        return ""
    return f"Outputs before it were finite except for -inf in `{mask.label}` of {_place(mask.frame)}, as in masks"


def _tally(line: Line) -> Tally | None:
    reading = line.what
    source = reading.source if isinstance(reading, Reading) and reading.unchanged() else None
    return None if source is None else extrema.tally(source)


def _bad_kinds(line: Line) -> str:
    """Count the nan and inf in a tensor; -inf came there as it was."""
    tally = _tally(line)
    return kinds(tally and replace(tally, minus_inf=0)) or _kinds(line)


def _kinds(line: Line) -> str:
    return line.what.not_finite if isinstance(line.what, Reading) else ""


def _hints(bad: Line, frames: Sequence[Frame], masks: Sequence[Line]) -> list[str]:
    hints = []
    if bad.phase == "output":
        rows = [mask for mask in masks if mask.order < bad.order and _has_masked_row(mask.what)]
        hints += [
            f"A whole row of the mask `{mask.label}` of {_place(mask.frame)} is -inf: its softmax is nan."
            for mask in rows[-1:]
        ]
    lines = [line for frame in frames for line in frame.lines if line is not bad and isinstance(line.what, Reading)]
    near = max(lines, key=_share, default=None)
    if near is not None and _share(near) >= NEAR:
        hints.append(f"Before it: {_near_limit(near.what)}, `{near.label}` of {_place(near.frame)}.{_wider(near.what)}")
    return hints + _in_float32(bad)


def _in_float32(bad: Line) -> list[str]:
    """Write what lets a module that overflows under autocast run without it; its weights are in float32 there."""
    weights = [line.what for line in bad.frame.lines if line.phase == "weight" and isinstance(line.what, Reading)]
    what = bad.what
    if not isinstance(what, Reading) or what.dtype is not torch.float16 or bad.phase != "output" or what.source is None:
        return []
    if any(weight.dtype is torch.float16 for weight in weights):
        return []
    return [in_float32(bad.frame.name, what.source.device.type)]


def _has_masked_row(what: Reading | str) -> bool:
    if isinstance(what, str) or what.numbers is None or not what.unchanged():
        return False
    return extrema.has_masked_row(what.numbers)


def _share(line: Line) -> float:
    return line.what.share_of_limit if isinstance(line.what, Reading) else 0.0


def _near_limit(what: Reading | str) -> str:
    assert isinstance(what, Reading)
    dtype = str(what.dtype)[len("torch.") :]
    return f"{what.abs_max:.2e} = {100 * what.share_of_limit:.0f}% of {dtype} max"


def _wider(what: Reading | str) -> str:
    is_half = isinstance(what, Reading) and what.dtype is torch.float16
    return " Run that part in bfloat16 or float32." if is_half else ""


def _place(frame: Frame) -> Place:
    return Place(frame.name, frame.kind)
