"""What was found: one bad tensor, where it was made, how that reads, and the files and streams that it goes to."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from distdiag.facts import private_files
from distdiag.facts.machine import host_name
from distdiag.facts.rank_identity import own_rank
from distdiag.training.overflow import extrema, ranks
from distdiag.training.overflow.recorder import HEADING, NEAR, Reading, finite_or_text
from distdiag.training.printflock import printflock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.training.overflow.extrema import Tally
    from distdiag.training.overflow.recorder import Frame, Line


HERE, BETWEEN, GIVEN, WEIGHTS = "here", "between", "given", "weights"
LOSS, BACKWARD, UNSEEN = "loss", "backward", "unseen"
"""Where it was made: in the module itself; in the forward of the module around it, before it called this one; before
the model was called; before this forward, in the weights; by the script, on the way to what it calls backward on; in
the backward; or that could not be seen."""


_MEND = "Run that part in bfloat16 or float32."
_LOSS_GREW = 2.0


class OverflowDetected(ValueError):
    """nan or inf was detected. `detection` has the details; of several ranks all raise it for the same tensor."""

    def __init__(self, detection: Detection) -> None:
        super().__init__(f"DebugUnderflowOverflow: {detection.sentence}")
        self.detection = detection

    def __reduce__(self) -> tuple[type, tuple[Detection]]:
        return type(self), (self.detection,)


@dataclass(frozen=True)
class Place:
    """A module: its name, empty for the model itself, and its class."""

    module: str
    kind: str

    def __str__(self) -> str:
        return f"`{self.module}` ({self.kind})" if self.module else f"the model ({self.kind})"


@dataclass(frozen=True)
class When:
    """`batch` counts what `unit` says, forwards or steps, from 0; `step` the optimizer's steps that were complete.

    `phase`: "training" or "evaluation", as the model was set: forwards count in both.
    """

    batch: int
    step: int
    unit: str
    phase: str = "training"


@dataclass(frozen=True)
class Detection:
    """The first bad tensor, of the module at `place`; `made_by` is the module whose code made it."""

    when: When
    place: Place
    tensor: str
    origin: str
    made_by: Place
    tally: Tally | None
    rank: int | None = None
    host: str = ""
    other_ranks: tuple[int, ...] = ()
    hints: tuple[str, ...] = ()
    number: int = 0
    """Which frame of the forward it was: of several ranks the lowest was the first."""
    seen: str = ""
    """What is known of the forward and of the other gradients, where it was not made in a module."""
    frames: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @property
    def sentence(self) -> str:
        """Describe who, when, where and what, and where it was made."""
        who = "" if self.rank is None else f"rank {self.rank} ({self.host}), "
        others = ""
        if self.other_ranks:
            others = f" (also on rank{'s' if len(self.other_ranks) > 1 else ''} {_ranks(self.other_ranks)})"
        where = "the loss that backward was called on" if self.origin == LOSS else f"`{self.tensor}` of {self.place}"
        phase = ", evaluation" if self.when.phase == "evaluation" else ""
        at = f"batch {self.when.batch} (step {self.when.step}{phase})"
        return f"{who}{at}: {self.what} in {where}{others}. {self.why}".rstrip()

    @property
    def what(self) -> str:
        """Name the kinds of bad numbers."""
        if self.tally is None:
            return "nan or inf"
        kinds = (("nan", self.tally.nan), ("inf", self.tally.inf), ("-inf", self.tally.minus_inf))
        return " and ".join(f"{count:,} {kind}" for kind, count in kinds if count) or "nan or inf"

    @property
    def why(self) -> str:
        """Describe where it was made."""
        return {
            HERE: f"{self.seen or 'Inputs were finite'}; this module produced it.",
            BETWEEN: f"All outputs before it were finite: the forward of {self.made_by} produced it and passed it on.",
            GIVEN: "It was in the model's input: check the data, or the code before the model.",
            WEIGHTS: "It was there before the forward: an optimizer step produced it, or the checkpoint contains it.",
            LOSS: f"{self.seen}: the script produced it between there and the loss.",
            BACKWARD: self.seen,
            UNSEEN: "",
        }[self.origin]

    def text(self) -> str:
        """Write the report: frames as transformers' detector has them, then the answer."""
        lines = []
        if self.frames:
            lines += [
                f"\nDetected inf/nan during batch_number={self.when.batch}",
                f"Last {len(self.frames)} forward frames:",
                HEADING,
                *map(str, self.frames),
                "",
            ]
        lines += [f"distdiag: {self.sentence}", *_of_tally(self.tally), *self.hints]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Write for a file of frames."""
        fields: dict[str, Any] = {"kind": "detection", "sentence": self.sentence}
        fields |= {**asdict(self.when), "rank": self.rank, "host": self.host}
        fields |= {"module": self.place.module, "class": self.place.kind, "tensor": self.tensor, "origin": self.origin}
        fields |= {"made_by": self.made_by.module, "made_by_class": self.made_by.kind}
        fields |= {"other_ranks": list(self.other_ranks), "hints": list(self.hints)}
        if self.tally is None:
            return {**fields, "tally": None}
        return {**fields, "tally": {**asdict(self.tally), "abs_max": finite_or_text(self.tally.abs_max)}}


def taken_for_mask(masks: Sequence[Line]) -> str:
    """Name the first output of a module that has -inf, which may be a mask, or log(0); empty if there is none."""
    line = next((mask for mask in masks if mask.phase == "output"), None)
    return "" if line is None else f"-inf in `{line.label}` of {_place(line)}, as in masks or from log(0)"


def from_frames(bad: Line, frames: Sequence[Frame], masks: Sequence[Line], when: When) -> Detection:
    """Describe what the first line that went wrong means, from the frames that lead up to it."""
    frame, parent = bad.frame, bad.frame.parent
    origin, made = HERE, frame
    if bad.phase in ("weight", "buffer"):
        origin = WEIGHTS
    elif bad.phase == "input":
        origin, made = (GIVEN, frame) if parent is None else (BETWEEN, parent)
    reading = bad.what
    tensor = reading.source if isinstance(reading, Reading) and reading.unchanged() else None
    return Detection(
        when=when,
        place=Place(frame.name, frame.kind),
        tensor=bad.label,
        origin=origin,
        made_by=Place(made.name, made.kind),
        tally=None if tensor is None else extrema.tally(tensor),
        hints=tuple(_hints(bad, frames, masks)),
        number=max(frame.number, 0),
        seen=_went_in(bad) if origin == HERE else "",
        frames=tuple(frames),
    )


def _went_in(bad: Line) -> str:
    """Return a hint where what went in was not all finite, and was taken for a mask."""
    masks = [f"`{line.label}`" for line in bad.frame.lines if line.phase == "input" and _is_bad(line)]
    return f"Inputs were finite except for -inf in {', '.join(masks)}, as in masks" if masks else ""


def _is_bad(line: Line) -> bool:
    return isinstance(line.what, Reading) and line.what.is_bad


def diverges(losses: Sequence[float]) -> list[str]:
    """Return a hint where the last losses grew, the oldest first."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 3 or finite[-1] < _LOSS_GREW * abs(finite[0]):
        return []
    shown = ", ".join(f"{loss:.3g}" for loss in losses)
    return [f"The loss was growing ({shown}): lower the learning rate, use warm-up, or clip the gradients."]


def _in_float32(bad: Line) -> list[str]:
    """Write what lets a module that overflows under autocast run without it; its weights are in float32 there."""
    weights = [line.what for line in bad.frame.lines if line.phase == "weight" and isinstance(line.what, Reading)]
    what = bad.what
    if not isinstance(what, Reading) or what.dtype is not torch.float16 or bad.phase != "output" or what.source is None:
        return []
    if any(weight.dtype is torch.float16 for weight in weights):
        return []
    return [in_float32(bad.frame.name, what.source.device.type)]


def in_float32(name: str, device: str) -> str:
    """Write what lets a module run without autocast."""
    module = f"model.get_submodule({name!r})" if name else "model"
    return (
        f"In float32, without autocast: m = {module}; "
        "m.register_forward_pre_hook(lambda m, a: tuple(x.float() if x.is_floating_point() else x for x in a)); "
        f'm.forward = torch.autocast("{device}", enabled=False)(m.forward)'
    )


def _hints(bad: Line, frames: Sequence[Frame], masks: Sequence[Line]) -> list[str]:
    hints = []
    if bad.phase == "output":
        rows = [mask for mask in masks if _has_masked_row(mask.what)]
        hints += [
            f"A whole row of the mask `{mask.label}` of {_place(mask)} is -inf: its softmax is nan."
            for mask in rows[-1:]
        ]
    lines = [line for frame in frames for line in frame.lines if line is not bad and isinstance(line.what, Reading)]
    near = max(lines, key=_share, default=None)
    if near is not None and _share(near) >= NEAR:
        hints.append(f"Before it: {_near_limit(near.what)}, `{near.label}` of {_place(near)}. {_MEND}")
    return hints + _in_float32(bad)


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


def _of_tally(tally: Tally | None) -> list[str]:
    if tally is None:
        return []
    at = "" if tally.first is None else f", first at [{', '.join(map(str, tally.first))}]"
    shape = ", ".join(map(str, tally.shape))
    most = "" if math.isnan(tally.abs_max) else f"; largest finite value {tally.abs_max:.2e}"
    lines = [f"{tally.dtype} of shape [{shape}], {tally.of:,} numbers{at}{most}."]
    if tally.zeros + tally.subnormals >= tally.of / 1000 > 0:
        lines.append(
            f"{100 * tally.zeros / tally.of:.1f}% are zero, {100 * tally.subnormals / tally.of:.1f}% subnormal."
        )
    return lines


def _place(line: Line) -> Place:
    return Place(line.frame.name, line.frame.kind)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


SCHEMA = "distdiag-frames/1"


class ReportWriter:
    """Prints, and keeps frames in a file of JSON lines; the file is made when there is something to keep."""

    def __init__(self, path: str, model: str) -> None:
        self._path, self._model = path, model
        self._begun = False

    def frames(self, heading: str, batch: int, frames: Iterable[Frame]) -> None:
        """Print and keep the frames of a batch that is traced."""
        frames = list(frames)
        _print("\n".join([*([heading] if heading else []), *map(str, frames)]))
        self._keep([frame.to_json(batch) for frame in frames])

    def detection(self, found: Detection, *, show: bool) -> None:
        """Keep what was found, and print it if it is for this rank to do so."""
        self._keep([*(frame.to_json(found.when.batch) for frame in found.frames), found.to_json()])
        if show:
            _print(found.text())

    def note(self, text: str) -> None:
        """Print something that is no fault."""
        printflock(f"distdiag: {text}", file=sys.stderr, prefix=ranks.count() > 1)

    def _keep(self, records: list[dict[str, Any]]) -> None:
        if not self._path:
            return
        rank = own_rank()
        path = self._path.replace("{rank}", str(rank or 0))
        if not self._begun:
            head = {"kind": "head", "schema": SCHEMA, "model": self._model, "rank": rank, "host": host_name()}
            records = [head, *records]
        try:
            private_files.make_folder(os.path.dirname(path))
            flags = os.O_WRONLY | (os.O_APPEND if self._begun else 0)
            with open(private_files.open_file(path, flags), "w", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in records))
        except OSError as error:  # the job is what matters
            self._path = ""
            self.note(f"the frames are not saved: {error}")
        self._begun = True


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it: what was found counts all the same
        printflock(text, prefix=ranks.count() > 1)
