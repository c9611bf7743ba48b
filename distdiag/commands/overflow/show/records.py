"""The lines of a file of frames, as msgspec checks them while it decodes. The file is untrusted: all is bounded."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

FORMAT = "distdiag-frames/"
SCHEMA = f"{FORMAT}1"
_RENAMED = {"class_": "class"}

Name = Annotated[str, msgspec.Meta(max_length=1000)]
_Sentence = Annotated[str, msgspec.Meta(max_length=4000)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Magnitude = Annotated[float, msgspec.Meta(ge=0)] | Literal["inf", "nan"] | None
_Shape = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]


class Line(msgspec.Struct):
    """One tensor, or (`text`) what stands in its place. `abs_min` is None where it is not known."""

    label: Name
    phase: Name
    dtype: Name = ""
    shape: _Shape | None = None
    abs_min: _Magnitude = None
    abs_max: _Magnitude = None
    text: Name = ""


class Head(msgspec.Struct, tag_field="kind", tag="head"):
    """The first line: whose frames these are; `rank` is None where there is one process."""

    schema: Name
    model: Name = ""
    rank: _Count | None = None
    host: Name = ""


class Frame(msgspec.Struct, tag_field="kind", tag="frame", rename=_RENAMED):
    """One call of one module; `module` is empty for the model itself. `number` counts the calls of a forward."""

    batch: _Count
    number: _Count
    module: Name
    class_: Name
    lines: list[Line]


class Tally(msgspec.Struct):
    """What was counted in a tensor that went wrong."""

    shape: _Shape = ()
    dtype: Name = ""
    of: _Count = 0
    nan: _Count = 0
    inf: _Count = 0
    minus_inf: _Count = 0
    zeros: _Count = 0
    subnormals: _Count = 0
    first: _Shape | None = None
    abs_max: _Magnitude = None


class Detection(msgspec.Struct, tag_field="kind", tag="detection", rename=_RENAMED):
    """What was found."""

    sentence: _Sentence
    batch: _Count
    step: _Count = 0
    unit: Name = "forward"
    rank: _Count | None = None
    host: Name = ""
    module: Name = ""
    class_: Name = ""
    tensor: Name = ""
    origin: Name = ""
    made_by: Name = ""
    made_by_class: Name = ""
    other_ranks: Annotated[list[_Count], msgspec.Meta(max_length=100_000)] = []
    hints: Annotated[list[_Sentence], msgspec.Meta(max_length=16)] = []
    tally: Tally | None = None


class Kind(msgspec.Struct):
    """What is told of a line whose kind is none of these: of a later writer, or none of ours."""

    kind: Name
