"""Frames: what one call of one module was given and gave back, as lines of numbers.

The lines are those of transformers' DebugUnderflowOverflow (abs min, abs max, what it is), so that what is written
about those applies to these.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from distdiag.training.overflow import numbers

if TYPE_CHECKING:
    from torch import Tensor

HEADING = "abs min  abs max  metadata"
_MARGIN = " " * 17
_UNKNOWN = "?"
NEAR = 0.5
"""From this share of a dtype's greatest number on, a tensor is worth a word: twice more overflows."""


class Reading:
    """What is known of one tensor, as it was at one moment; frames that show the same tensor share it.

    `source` is the tensor and `numbers` what is read of it, until they are let go of. `least` and `greatest` are known
    when they have been fetched from the device.
    """

    __slots__ = ("dtype", "exact", "greatest", "least", "numbers", "shape", "source", "version")

    def __init__(self, source: Tensor, found: Tensor, version: int) -> None:
        self.source: Tensor | None = source
        self.dtype, self.shape = source.dtype, (found if source.is_nested else source).shape
        self.numbers: Tensor | None = found
        self.version = version
        self.least = self.greatest = math.nan
        self.exact: float | None = None

    @property
    def is_bad(self) -> bool:
        """Whether there is nan or inf in it."""
        return numbers.is_bad(self.least, self.greatest)

    @property
    def abs_max(self) -> float:
        """The greatest magnitude."""
        return numbers.abs_max(self.least, self.greatest)

    def abs_min(self) -> float | None:
        """Give the smallest magnitude; None if the numbers have changed since, or are gone."""
        if self.exact is None:
            self.exact = numbers.abs_min_of_ends(self.least, self.greatest)
            if self.exact is None and self.numbers is not None and self.unchanged():
                self.exact = numbers.abs_min(self.numbers)
        return self.exact

    def unchanged(self) -> bool:
        """Tell whether the numbers are still there, and are those that were read."""
        return self.source is not None and version_of(self.source) == self.version

    def release(self) -> None:
        """Let go of the tensor."""
        self.numbers = self.source = None

    @property
    def share_of_limit(self) -> float:
        """How much of what its dtype can hold the greatest magnitude is; 0 where that says nothing."""
        if not self.dtype.is_floating_point or not math.isfinite(self.abs_max):
            return 0.0
        most = numbers.limit(self.dtype)
        # Masks are made of the dtype's own least number.
        return 0.0 if self.abs_max == most else self.abs_max / most


class Line(NamedTuple):
    """One tensor of a frame, or what stands in its place: None, not a tensor, empty, meta, fake, unread.

    `order` counts the lines of a forward as they came; `phase`: weight, buffer, input or output.
    """

    frame: Frame
    order: int
    phase: str
    label: str
    what: Reading | str

    def text(self) -> str:
        """Write it: `3.18e-04 6.27e+04 output`."""
        if isinstance(self.what, str):
            return f"{self.what:>17} {self.label}"
        least = self.what.abs_min()
        shown = f"{_UNKNOWN:>8}" if least is None else f"{least:8.2e}"
        return f"{shown} {self.what.abs_max:8.2e} {self.label}"


class Frame:
    """One call of one module; `parent` is the call that it was made in, `number` counts the frames of a forward."""

    __slots__ = ("kind", "name", "number", "parent", "raw")

    def __init__(self, name: str, kind: str, parent: Frame | None) -> None:
        self.name, self.kind, self.parent = name, kind, parent
        self.raw: list[tuple[int, str, str, Reading | str]] = []
        """The lines, as cheaply as they can be kept: order, phase, label, what."""
        self.number = -1

    @property
    def lines(self) -> list[Line]:
        """What was read of it."""
        return [Line(self, *one) for one in self.raw]

    def __str__(self) -> str:
        return "\n".join([f"{_MARGIN} {self.name} {self.kind}", *[line.text() for line in self.lines]])

    def to_json(self, batch: int) -> dict[str, Any]:
        """Write for a file of frames; numbers that JSON lacks become "inf" and "nan", an unknown one null."""
        lines = [_line_to_json(line) for line in self.lines]
        return {"kind": "frame", "batch": batch, "number": self.number, "module": self.name, "class": self.kind} | {
            "lines": lines
        }


def _line_to_json(line: Line) -> dict[str, Any]:
    told: dict[str, Any] = {"label": line.label, "phase": line.phase}
    what = line.what
    if isinstance(what, str):
        return {**told, "text": what}
    told |= {"dtype": str(what.dtype)[len("torch.") :], "shape": list(what.shape)}
    return {**told, "abs_min": finite_or_text(what.abs_min()), "abs_max": finite_or_text(what.abs_max)}


def finite_or_text(value: float | None) -> float | str | None:
    """Write a number for JSON, which has no infinity and no nan."""
    return value if value is None or math.isfinite(value) else str(value)


def batch_head(number: int) -> str:
    """Write what stands before the first frame of a batch that is traced."""
    return f"\n\n{_MARGIN} *** Starting batch number={number} ***\n{HEADING}"


def version_of(tensor: Tensor) -> int:
    """Give the count of changes in place; -1 where torch does not keep it (inference tensors)."""
    try:
        return tensor._version
    except RuntimeError:
        return -1
