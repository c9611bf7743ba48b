"""Files of frames: their lines, as msgspec checks them, and what is kept of each while it streams by.

The files are untrusted: each length is bounded, a line that is none is counted, and nothing in them is run.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import BinaryIO

FORMAT = "distdiag-frames/"
SCHEMA = f"{FORMAT}1"
LIMITS = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
    "float8_e5m2": 57344.0,
    "float8_e4m3fn": 448.0,
    "float8_e5m2fnuz": 57344.0,
    "float8_e4m3fnuz": 240.0,
}
"""The largest number of each dtype, as torch.finfo has it; torch is not imported here."""
NEAR = 0.5
"""From this share of it on a tensor is worth a word, as for the detector: twice more overflows."""
INPUT = "input"
"""Names the largest input of a module, where others go by their labels."""
MOST_ROWS = 1_000_000
"""Outputs that are kept of all files together: some 400 MB."""
_MOST_NAMES = 200_000
_MOST_LINE_BYTES = 1 << 24
_MOST_DETECTIONS = 1000
_MOST_NOT_FINITE = 16
_NEWS_EVERY_BYTES = 1 << 25
_KINDS = ("head", "frame", "detection")
_START = b'{"kind": "head", "schema": "distdiag-frames/'
_HINT = 'give the files that DebugUnderflowOverflow(model, save="frames-{rank}.jsonl") wrote'
_RENAMED = {"class_": "class"}

_Name = Annotated[str, msgspec.Meta(max_length=1000)]
_Sentence = Annotated[str, msgspec.Meta(max_length=4000)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Magnitude = Annotated[float, msgspec.Meta(ge=0)] | Literal["inf", "nan"] | None
_Shape = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]


# The lines of a file


class Line(msgspec.Struct):
    """One tensor, or (`text`) what stands in its place. `abs_min` is None where it is not known."""

    label: _Name
    phase: _Name
    dtype: _Name = ""
    shape: _Shape | None = None
    abs_min: _Magnitude = None
    abs_max: _Magnitude = None
    not_finite: Literal["", "nan", "inf", "-inf", "inf,-inf"] = ""
    text: _Name = ""


class Head(msgspec.Struct, tag_field="kind", tag="head"):
    """The first line: whose frames these are; `rank` is None where there is one process."""

    schema: _Name
    model: _Name = ""
    rank: _Count | None = None
    host: _Name = ""


class Frame(msgspec.Struct, tag_field="kind", tag="frame", rename=_RENAMED):
    """One call of one module; `module` is empty for the model itself. `number` counts the calls of a forward."""

    batch: _Count
    number: _Count
    module: _Name
    class_: _Name
    lines: list[Line]


class Tally(msgspec.Struct):
    """What was counted in a tensor that went wrong."""

    shape: _Shape = ()
    dtype: _Name = ""
    of: _Count = 0
    nan: _Count = 0
    inf: _Count = 0
    minus_inf: _Count = 0
    zeros: _Count = 0
    subnormals: _Count = 0
    first: _Shape | None = None
    abs_max: _Magnitude = None


class Became(msgspec.Struct, rename=_RENAMED):
    """Where -inf, which may have been meant, became nan or inf: `what` that is."""

    module: _Name = ""
    class_: _Name = ""
    tensor: _Name = ""
    what: _Name = ""


class Detection(msgspec.Struct, tag_field="kind", tag="detection", rename=_RENAMED):
    """What the detector said. `origin`: where it was made, see the detector; `made_by` the module whose code did."""

    sentence: _Sentence
    batch: _Count
    path: _Name = ""
    step: _Count = 0
    unit: _Name = "forward"
    rank: _Count | None = None
    host: _Name = ""
    module: _Name = ""
    class_: _Name = ""
    tensor: _Name = ""
    origin: _Name = ""
    made_by: _Name = ""
    made_by_class: _Name = ""
    operation: _Name = ""
    became: Became | None = None
    fix: _Sentence = ""
    other_ranks: Annotated[list[_Count], msgspec.Meta(max_length=100_000)] = []
    hints: Annotated[list[_Sentence], msgspec.Meta(max_length=16)] = []
    tally: Tally | None = None


class _Kind(msgspec.Struct):
    """What is read of a line whose kind is none of these: of a later writer, or none of ours."""

    kind: _Name


_DECODER = msgspec.json.Decoder(Head | Frame | Detection)
_NO_OUTPUT = Line("output", "output", text="nothing")


_Names = tuple[str, str, str]
_About = tuple[str, tuple[int, ...] | None, str]
_Value = float | str | None


# What is kept of them; the structs are in the report, too, as --json prints them


class ForwardId(msgspec.Struct):
    """Which forward: `forward` is 0 but where a batch is a step of several."""

    path: str
    rank: int | None
    batch: int
    forward: int = 0


class Given(NamedTuple):
    """The input of floats with the greatest finite magnitude; `size` counts its numbers, -1 where unknown."""

    least: float | str | None
    most: float
    size: int
    dtype: str

    @property
    def share(self) -> float:
        """How much of what its dtype can hold that is."""
        return self.most / LIMITS.get(self.dtype, math.inf)


class Row(msgspec.Struct, frozen=True, gc=False, rename=_RENAMED):
    """One output of a module, or (`text`) what stands in its place.

    `abs_max` is "nan", "inf", "-inf" or "inf,-inf" if there is one in it.

    `share_of_limit`: how much of what its dtype can hold the greatest magnitude is, 0 where that says nothing.
    `growth`: times the greatest input of floats; None where that says nothing.
    """

    of: ForwardId
    number: int
    module: str
    class_: str
    tensor: str
    dtype: str
    shape: tuple[int, ...] | None
    text: str
    abs_min: float | str | None
    abs_max: float | str | None
    share_of_limit: float
    growth: float | None

    @property
    def most(self) -> float | None:
        """The greatest magnitude, if it is known and finite."""
        return self.abs_max if isinstance(self.abs_max, float) else None

    @property
    def is_bad(self) -> bool:
        """Whether there is nan or inf in it."""
        return isinstance(self.abs_max, str)


class At(msgspec.Struct, frozen=True, rename=_RENAMED):
    """Where a number is: in an output of a module or, where what made it is no module, in its input (INPUT)."""

    module: str
    class_: str
    tensor: str
    number: int
    abs_max: float | str
    dtype: str

    @property
    def most(self) -> float:
        """The magnitude."""
        return float(self.abs_max)

    @property
    def share(self) -> float:
        """How much of what its dtype can hold that is."""
        return self.most / LIMITS.get(self.dtype, math.inf)


class Call(NamedTuple):
    """One frame: a call of a module, what it was given (None without floats) and all that it gave back."""

    number: int
    given: Given | None
    rows: tuple[Row, ...]

    @property
    def module(self) -> str:
        """Its name; empty for the model itself."""
        return self.rows[0].module

    @property
    def share(self) -> float:
        """The greatest share of a limit of what it gave back, or was given."""
        given = 0.0 if self.given is None else self.given.share
        return max(given, *(row.share_of_limit for row in self.rows))

    def output(self, row: Row) -> At:
        """Return where an output of it is."""
        return At(row.module, row.class_, row.tensor, self.number, row.most or 0.0, row.dtype)

    def input(self, given: Given) -> At:
        """Return where its input is."""
        return At(self.module, self.rows[0].class_, INPUT, self.number, given.most, given.dtype)


@dataclass
class Forward:
    """One forward of the model: a batch, or with gradient accumulation one of several of a step.

    `not_finite` has the first tensors of it that hold nan or inf, of any phase: weight, buffer, input, output.
    """

    id: ForwardId
    calls: list[Call] = field(default_factory=list)
    not_finite: list[At] = field(default_factory=list)

    def peak(self) -> float:
        """Return the greatest share of a dtype's limit."""
        return max((call.share for call in self.calls), default=0.0)

    def near(self) -> list[At]:
        """Return what is near its limit: outputs, and inputs that are no module's output."""
        found = [call.output(row) for call in self.calls for row in call.rows if row.share_of_limit >= NEAR]
        known = {at.abs_max for at in found}
        given = [(call, call.given) for call in self.calls if call.given is not None and call.given.share >= NEAR]
        return found + [call.input(each) for call, each in given if each.most not in known]

    def extend(self, other: Forward) -> None:
        """Add the frames of another that come after the last one here."""
        last = self.calls[-1].number
        other.id.forward = self.id.forward
        self.calls += [call for call in other.calls if call.number > last]
        self.not_finite = [*self.not_finite, *(at for at in other.not_finite if at.number > last)][:_MOST_NOT_FINITE]

    def holds(self, other: Forward) -> bool:
        """Return whether all frames of another forward are here, too, with the same numbers."""
        own = {call.number: call for call in self.calls}
        return all(call.number in own and _numbers(own[call.number]) == _numbers(call) for call in other.calls)


@dataclass(kw_only=True)
class Recording:
    """What one rank kept, or of a file several were put into one after the other, one of them.

    `torn` are lines that could not be read, the first of them `first_torn` (from 1); `left_out` frames had no room.
    `passed` are batches that were not asked for.
    """

    path: str
    model: str
    rank: int | None
    host: str
    forwards: list[Forward] = field(default_factory=list)
    detections: list[Detection] = field(default_factory=list)
    truncated: bool = False
    torn: int = 0
    first_torn: int = 0
    left_out: int = 0
    passed: set[int] = field(default_factory=set)

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches that there are frames of, in the file."""
        kept = dict.fromkeys(forward.id.batch for forward in self.forwards)
        return tuple(kept) if not self.passed else tuple(sorted({*kept, *self.passed}))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written into it."""
        return not (self.forwards or self.passed or self.detections or self.truncated)

    @property
    def frames(self) -> int:
        """How many frames are kept."""
        return sum(len(forward.calls) for forward in self.forwards)


# Reading


class NotFrames(Exception):
    """A file that is none of ours, or of a later distdiag; `hint` says what to do."""

    def __init__(self, path: str, why: str, hint: str = _HINT) -> None:
        super().__init__(f"{path}: {why}")
        self.hint = hint


class Reader:
    """Reads one file after the other into `recordings`; what was read stays there, whatever happens then.

    Of `batches`, if there are any, frames are kept, and of no others.
    """

    def __init__(
        self, news: Callable[[str], None], batches: Collection[int] = (), *, most_rows: int = MOST_ROWS
    ) -> None:
        self.recordings: list[Recording] = []
        self._news = news
        self._batches = batches
        self._room = most_rows
        self._names: dict[_Names, _Names] = {}
        self._about: dict[_About, _About] = {}

    def read(self, path: str) -> None:
        """Read a file, or a pipe.

        Raises:
            NotFrames: and why.
            OSError: it cannot be read.
        """
        growing: _Growing | None = None
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            try:
                for number, line, done in _lines(file):
                    if done:
                        self._news(f"reading {path}: {done / 1e6:.0f}{f' of {size / 1e6:.0f}' if size else ''} MB")
                    growing = self._take(path, growing, line, number)
            finally:
                if growing is not None:
                    growing.close()
        if growing is None:  # nothing was written into it, or no whole line
            self.recordings.append(Recording(path=path, model="", rank=None, host="", truncated=size > 0))

    def _take(self, path: str, growing: _Growing | None, line: bytes, number: int) -> _Growing | None:
        try:
            record = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _unreadable(path, growing, line, number)
        if isinstance(record, Head):
            if growing is not None:
                growing.close()
            _check_schema(path, record.schema)
            self.recordings.append(Recording(path=path, model=record.model, rank=record.rank, host=record.host))
            return _Growing(self.recordings[-1])
        if growing is None:
            raise NotFrames(path, "its first line is not a header: was the start of the file cut off?")
        if isinstance(record, Detection):
            growing.add_detection(record)
        else:
            self._keep(growing, record)
        return growing

    def _keep(self, growing: _Growing, frame: Frame) -> None:
        if self._batches and frame.batch not in self._batches:
            if len(growing.recording.passed) < _MOST_NAMES:
                growing.recording.passed.add(frame.batch)
            return
        call = self._call(growing.forward_of(frame), frame)
        if len(call.rows) > self._room or len(self._names) + len(self._about) > _MOST_NAMES:
            self._room = 0  # what is kept is the beginning, without holes
            growing.recording.left_out += 1
            return
        self._room -= len(call.rows)
        growing.add_frame(frame, call)

    def _call(self, of: ForwardId, frame: Frame) -> Call:
        """Return what is kept of a frame; there is a row also where a module gave nothing back."""
        given = None
        for line in frame.lines:
            if line.phase == "input":
                given = _greater(given, line)
        lines = [line for line in frame.lines if line.phase == "output"] or [_NO_OUTPUT]
        return Call(frame.number, given, tuple(self._row(of, frame, line, given) for line in lines))

    def _row(self, of: ForwardId, frame: Frame, line: Line, given: Given | None) -> Row:
        # Names are the same in each batch, and kept once.
        names, about = (frame.module, frame.class_, line.label), (line.dtype, line.shape, line.text)
        names, about = self._names.setdefault(names, names), self._about.setdefault(about, about)
        return row_of(of, frame.number, names, about, (line.abs_min, line.not_finite or line.abs_max), given)


class _Growing:
    """The recording that is being read, and the forward that its frames belong to now."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._forward: Forward | None = None
        self._of_batch: dict[int, list[Forward]] = {}

    def forward_of(self, frame: Frame) -> ForwardId:
        """Return the forward that a frame belongs to; one that is not later in the same forward begins another."""
        if (
            self._forward is None
            or frame.batch != self._forward.id.batch
            or (self._forward.calls and frame.number <= self._forward.calls[-1].number)
        ):
            self.close()
            self._forward = Forward(ForwardId(self.recording.path, self.recording.rank, frame.batch))
        return self._forward.id

    def add_frame(self, frame: Frame, call: Call) -> None:
        """Add the next frame of this forward."""
        assert self._forward is not None
        for line in frame.lines:
            if line.abs_max in ("inf", "nan") and len(self._forward.not_finite) < _MOST_NOT_FINITE:
                what = line.not_finite or str(line.abs_max)
                at = At(frame.module, frame.class_, line.label, frame.number, what, line.dtype)
                self._forward.not_finite.append(at)
        self._forward.calls.append(call)

    def add_detection(self, found: Detection) -> None:
        """Add a detection; the frames before it are those that lead there."""
        found.path = self.recording.path
        if len(self.recording.detections) < _MOST_DETECTIONS:
            self.recording.detections.append(found)
        if self._forward is not None and self._forward.id.batch == found.batch:
            self._drop_repeated(self._forward, found)
        self.close()

    def close(self) -> None:
        """End the forward."""
        forward, self._forward = self._forward, None
        if forward is not None and forward.calls:
            earlier = self._of_batch.setdefault(forward.id.batch, [])
            forward.id.forward = len(earlier)
            earlier.append(forward)
            self.recording.forwards.append(forward)

    def _drop_repeated(self, forward: Forward, found: Detection) -> None:
        """Drop frames that were kept already: those of a batch that is traced, and in which something was found."""
        for earlier in self._of_batch.get(forward.id.batch, ()):
            # A batch is one forward, which was only run again, unless it is a step of several.
            if found.unit == "forward" or earlier.holds(forward):
                earlier.extend(forward)
                self._forward = None
                return


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    """Yield each line with its number from 1; and now and then, else 0, how many bytes were read."""
    number = done = reported = 0
    while line := file.readline(_MOST_LINE_BYTES):
        number += 1
        done += len(line)
        if len(line) == _MOST_LINE_BYTES and not line.endswith(b"\n"):
            while (more := file.readline(_MOST_LINE_BYTES)) and not more.endswith(b"\n"):
                done += len(more)
            line = b"too long\n"
        is_news = done - reported >= _NEWS_EVERY_BYTES
        reported = done if is_news else reported
        if line.strip():
            yield number, line, done if is_news else 0


def _unreadable(path: str, growing: _Growing | None, line: bytes, number: int) -> _Growing | None:
    """Pass over a line, and remember why. Raises NotFrames."""
    whole = line.endswith(b"\n")
    if growing is None:
        if not whole and _START.startswith(line[: len(_START)]):
            return None
        raise NotFrames(path, "not a frame file")
    recording = growing.recording
    if not whole:
        recording.truncated = True
    elif not _is_of_later_kind(line):
        recording.torn += 1
        recording.first_torn = recording.first_torn or number
    return growing


def _is_of_later_kind(line: bytes) -> bool:
    try:
        return msgspec.json.decode(line, type=_Kind).kind not in _KINDS
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _check_schema(path: str, schema: str) -> None:
    if schema == SCHEMA:
        return
    if schema.startswith(FORMAT):
        raise NotFrames(
            path, f"written by a newer distdiag ({schema}; this version reads {SCHEMA})", "upgrade distdiag here"
        )
    raise NotFrames(path, f"not a frame file, but {schema[:60]!r}")


def _greater(given: Given | None, line: Line) -> Given | None:
    """Choose the input of floats with the greatest finite magnitude; token ids and masks are none."""
    most = line.abs_max
    # Text are "inf" and "nan"; masks are made of the dtype's own least number.
    if most is None or isinstance(most, str) or not line.dtype.startswith(("float", "bfloat")):
        return given
    if most == LIMITS.get(line.dtype) or (given is not None and most <= given.most):
        return given
    size = -1 if line.shape is None else math.prod(line.shape)
    return Given(line.abs_min, most, size, sys.intern(line.dtype))


def row_of(
    of: ForwardId, number: int, names: _Names, about: _About, extrema: tuple[_Value, _Value], given: Given | None
) -> Row:
    """Return an output, with what its magnitudes mean."""
    dtype, shape, text = about
    most, limit = extrema[1], LIMITS.get(dtype, math.inf)
    # Masks are made of the dtype's own least number.
    share = 0.0 if most is None or isinstance(most, str) or most == limit else most / limit
    growth = None
    if share and given is not None and given.most and isinstance(most, float):
        growth = most / given.most
    return Row(of, number, *names, dtype, shape, text, *extrema, share, _finite(growth))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _numbers(call: Call) -> tuple[object, ...]:
    """Return all of a call but whose it is."""
    return call.given, [msgspec.structs.astuple(row)[1:] for row in call.rows]
