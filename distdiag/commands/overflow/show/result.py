"""The answer of overflow show, as --json prints it. Magnitudes that JSON has no number for are "inf" and "nan".

Structs and not dataclasses: a key is called "class", and there may be tens of thousands of rows.
"""

from __future__ import annotations

import msgspec  # noqa: TID253 - imported lazily, with the diagnosis

Magnitude = float | str | None
_RENAMED = {"class_": "class"}


class FileRead(msgspec.Struct, frozen=True):
    """What was read; `truncated` within a line, `torn` lines that are none, `left_out` frames without room."""

    path: str
    rank: int | None
    host: str
    model: str
    batches: tuple[int, ...]
    frames: int
    truncated: bool
    torn: int
    left_out: int


class Found(msgspec.Struct, frozen=True, rename=_RENAMED):
    """What the detector said. `origin`: where it was made, see the detector; `made_by` the module whose code did."""

    path: str
    sentence: str
    rank: int | None
    host: str
    batch: int
    step: int
    unit: str
    module: str
    class_: str
    tensor: str
    origin: str
    made_by: str
    made_by_class: str
    other_ranks: tuple[int, ...]
    hints: tuple[str, ...]
    counts: dict[str, int]
    """How many are nan, inf, minus_inf, zeros and subnormals, `of` how many; empty where they were not counted."""


class Of(msgspec.Struct, frozen=True):
    """Which forward: `forward` is 0 but where a batch is a step of several."""

    path: str
    rank: int | None
    batch: int
    forward: int


class At(msgspec.Struct, frozen=True, rename=_RENAMED):
    """A tensor on a way; `tensor` is "input" where what made it is no module."""

    module: str
    class_: str
    tensor: str
    number: int
    abs_max: float


class Growth(msgspec.Struct, frozen=True):
    """How the greatest number of a forward came about: through modules, from the first to the last of `through`."""

    of: Of
    factor: float
    share_of_limit: float
    dtype: str
    through: tuple[At, ...]


class Row(msgspec.Struct, frozen=True, rename=_RENAMED):
    """One output of a module. `growth`: times the greatest input of floats; None where that says nothing."""

    of: Of
    number: int
    module: str
    class_: str
    tensor: str
    dtype: str
    shape: tuple[int, ...] | None
    text: str
    abs_min: Magnitude
    abs_max: Magnitude
    share_of_limit: float
    growth: float | None


class Part(msgspec.Struct, frozen=True):
    """Where two sides part: `what` is kind, not-finite, dtype, shape or numbers. `given_*`: what went in, abs max."""

    what: str
    a: Row
    b: Row
    ratio: float | None
    given_a: float | None
    given_b: float | None


class Call(msgspec.Struct, frozen=True, rename=_RENAMED):
    """A call of a module that one side alone has."""

    module: str
    class_: str
    number: int


class Divergence(msgspec.Struct, frozen=True):
    """Two forwards beside each other. `first` is None if they do not part; `in_numbers` is the first but for shapes."""

    a: Of
    b: Of
    factor: float
    compared: int
    first: Part | None
    in_numbers: Part | None
    only_a: tuple[Call, ...]
    only_b: tuple[Call, ...]


class OverflowShow(msgspec.Struct, frozen=True):
    """All of it. `rows` are those that matter, of the forward the answer is about; with --all every one of each."""

    files: tuple[FileRead, ...]
    detections: tuple[Found, ...]
    growth: tuple[Growth, ...]
    divergence: Divergence | None
    rows: tuple[Row, ...]
