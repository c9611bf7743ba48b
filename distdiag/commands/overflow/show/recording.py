"""Frame files, read as a stream and reduced to the lines needed.

Files are untrusted: each length is bounded, malformed lines are counted, nothing is executed.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.training.overflow.report import SCHEMA, Detection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

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
"""A share of it worth a remark, as for the detector: twice as much overflows."""
INPUT = "input"
"""The label of a module's largest input."""
MOST_ROWS = 1_000_000
"""Limit on rows kept of all files together: some 400 MB."""
_MOST_LINE_BYTES = 1 << 24
_MOST_DETECTIONS = 1000
_NEWS_EVERY_BYTES = 1 << 25
_HINT = 'give the files that DebugUnderflowOverflow(model, save="frames-{rank}.jsonl") wrote'
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_Name = Annotated[str, msgspec.Meta(max_length=1000)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Magnitude = Annotated[float, msgspec.Meta(ge=0)] | Literal["inf", "nan"] | None
_Shape = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]


class Line(msgspec.Struct):
    """One tensor, or a `text` in its place. `abs_min` is None where it is not known."""

    label: _Name
    phase: _Name
    dtype: _Name = ""
    shape: _Shape | None = None
    abs_min: _Magnitude = None
    abs_max: _Magnitude = None
    not_finite: Literal["", "nan", "inf", "-inf", "inf,-inf"] = ""
    text: _Name = ""


class Head(msgspec.Struct):
    """The first line; `rank` is None for a single process."""

    schema: _Name
    model: _Name = ""
    rank: _Count | None = None
    host: _Name = ""


class Frame(msgspec.Struct, rename={"class_": "class"}):
    """One call of one module; `module` is empty for the model itself. `number` counts the calls of a forward."""

    batch: _Count
    number: _Count
    module: _Name
    class_: _Name
    lines: list[Line]


_KIND, _HEAD = b'{"kind": "', b'{"kind": "head",'
_DECODERS: dict[bytes, msgspec.json.Decoder[Head | Frame | Detection]] = {
    _HEAD: msgspec.json.Decoder(Head),
    b'{"kind": "frame"': msgspec.json.Decoder(Frame),
    b'{"kind": "detect': msgspec.json.Decoder(Detection),
}
"""By the first 16 bytes of a line, as the detector writes it."""
_NO_OUTPUT = Line("output", "output", text="nothing")


# The structs below are part of the report that --json prints.


class ForwardId(msgspec.Struct):
    """Which forward."""

    path: str
    rank: int | None
    batch: int


class Row(msgspec.Struct, frozen=True, gc=False, rename={"class_": "class"}):
    """One output of a module, its largest input (`tensor` is INPUT), or a `text` in its place.

    `abs_max` is "nan", "inf", "-inf" or "inf,-inf" if not finite. `share_of_limit`: the largest magnitude over the
    dtype's maximum; 0 for masks and if unknown. `growth`: over the largest floating-point input; None if unknown.
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
    growth: float | None = None

    @property
    def most(self) -> float | None:
        """The largest magnitude; None if unknown or not finite."""
        return self.abs_max if isinstance(self.abs_max, float) else None

    @property
    def size(self) -> float:
        """The largest magnitude; 0 if unknown or not finite."""
        return self.most or 0.0

    @property
    def is_bad(self) -> bool:
        """Whether it has nan or inf."""
        return isinstance(self.abs_max, str)

    @property
    def numbers(self) -> tuple[object, ...]:
        """The identity of a tensor passed on: its extrema, element count and dtype."""
        return self.abs_min, self.abs_max, None if self.shape is None else math.prod(self.shape), self.dtype


class Call(NamedTuple):
    """One frame: the largest floating-point input of a module, if any, and its outputs."""

    number: int
    given: Row | None
    rows: tuple[Row, ...]

    @property
    def module(self) -> str:
        """The module's name; empty for the model itself."""
        return self.rows[0].module

    @property
    def share(self) -> float:
        """The largest share of a limit of its outputs and inputs."""
        return max(row.share_of_limit for row in (*self.rows, *([self.given] if self.given else [])))


@dataclass
class Forward:
    """One forward of the model, a batch.

    `bad` is its first tensor with nan or inf, of any phase: weight, buffer, input, output.
    """

    id: ForwardId
    calls: list[Call] = field(default_factory=list)
    bad: Row | None = None

    def peak(self) -> float:
        """Return the largest share of a dtype's limit."""
        return max((call.share for call in self.calls), default=0.0)

    def near(self) -> list[Row]:
        """Return the outputs near their limit, and such inputs that no module produced."""
        found = [row for call in self.calls for row in call.rows if row.share_of_limit >= NEAR]
        known = {row.abs_max for row in found}
        given = (call.given for call in self.calls if call.given is not None)
        return found + [row for row in given if row.share_of_limit >= NEAR and row.abs_max not in known]


@dataclass(kw_only=True)
class Recording:
    """The frames of one rank.

    `torn`: number of unreadable lines; `left_out`: frames beyond the limit; `passed`: batches not requested.
    """

    path: str
    model: str = ""
    rank: int | None = None
    host: str = ""
    forwards: list[Forward] = field(default_factory=list)
    detections: list[Detection] = field(default_factory=list)
    truncated: bool = False
    torn: int = 0
    left_out: int = 0
    passed: set[int] = field(default_factory=set)

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches with frames in the file."""
        return tuple(sorted({forward.id.batch for forward in self.forwards} | self.passed))

    @property
    def is_empty(self) -> bool:
        """Whether the file has no records."""
        return not (self.forwards or self.passed or self.detections or self.truncated)

    @property
    def frames(self) -> int:
        """The number of frames kept."""
        return sum(len(forward.calls) for forward in self.forwards)

    def forward_of(self, frame: Frame) -> Forward:
        """Return the forward of a frame."""
        if not self.forwards or self.forwards[-1].id.batch != frame.batch:
            self.forwards.append(Forward(ForwardId(self.path, self.rank, frame.batch)))
        return self.forwards[-1]


class NotFrames(Exception):
    """Not a frame file, or one of a later version; `hint`: the fix."""

    def __init__(self, path: str, why: str, hint: str = _HINT) -> None:
        super().__init__(f"{path}: {why}")
        self.hint = hint


class Reader:
    """Reads files one by one into `recordings`, which keep partial data after an error.

    `batches`: keep only their frames, if any are given.
    """

    def __init__(
        self, news: Callable[[str], None], batches: Collection[int] = (), *, most_rows: int = MOST_ROWS
    ) -> None:
        self.recordings: list[Recording] = []
        self._news, self._batches, self._room = news, batches, most_rows
        self._shapes: dict[tuple[int, ...] | None, tuple[int, ...] | None] = {}

    def read(self, path: str) -> None:
        """Read a file or pipe.

        Raises:
            NotFrames: it is not a frame file.
            OSError: it cannot be read.
        """
        recording: Recording | None = None
        done = 0
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while line := file.readline(_MOST_LINE_BYTES):
                before, done = done, done + len(line)
                if before // _NEWS_EVERY_BYTES < done // _NEWS_EVERY_BYTES:
                    self._news(f"reading {path}: {done / 1e6:.0f}{f' of {size / 1e6:.0f}' if size else ''} MB")
                if line.strip():
                    recording = self._take(path, recording, line)
        if recording is None:  # empty, or no complete line
            self.recordings.append(Recording(path=path, truncated=size > 0))

    def _take(self, path: str, recording: Recording | None, line: bytes) -> Recording | None:
        decoder, record = _DECODERS.get(line[:16]), None
        if decoder is not None:
            with contextlib.suppress(*_MALFORMED):
                record = decoder.decode(line)
        if isinstance(record, Head):
            self.recordings.append(_begun(path, record))
            return self.recordings[-1]
        if recording is None:
            _check_beginning(path, line, record)
        elif isinstance(record, Frame):
            self._keep(recording, record)
        elif isinstance(record, Detection):
            room = _MOST_DETECTIONS - len(recording.detections)
            recording.detections += [record][:room]
        elif not line.endswith(b"\n"):
            recording.truncated = True
        elif decoder is not None or not line.startswith(_KIND):  # else of a later kind
            recording.torn += 1
        return recording

    def _keep(self, recording: Recording, frame: Frame) -> None:
        if self._batches and frame.batch not in self._batches:
            recording.passed.add(frame.batch)
            return
        outputs = [line for line in frame.lines if line.phase == "output"] or [_NO_OUTPUT]
        if len(outputs) > self._room:
            self._room = 0  # the beginning is kept, without holes
            recording.left_out += 1
            return
        self._room -= len(outputs)
        self._share_texts(frame)
        forward = recording.forward_of(frame)
        forward.calls.append(call_of(forward.id, frame, outputs))
        bad = next((line for line in frame.lines if line.abs_max in ("inf", "nan")), None)
        if forward.bad is None and bad is not None:
            forward.bad = _row(forward.id, frame, bad)

    def _share_texts(self, frame: Frame) -> None:
        """Share equal names and shapes between batches."""
        frame.module, frame.class_ = sys.intern(frame.module), sys.intern(frame.class_)
        for line in frame.lines:
            line.label, line.dtype = sys.intern(line.label), sys.intern(line.dtype)
            line.shape = self._shapes.setdefault(line.shape, line.shape)


def _begun(path: str, head: Head) -> Recording:
    if head.schema != SCHEMA:
        raise NotFrames(path, f"of format {head.schema[:60]}; this version reads {SCHEMA}", "upgrade distdiag here")
    return Recording(path=path, model=head.model, rank=head.rank, host=head.host)


def _check_beginning(path: str, line: bytes, record: object) -> None:
    """Accept a truncated header. Raises NotFrames for any other line before the header."""
    if record is not None:
        raise NotFrames(path, "its first line is not a header: was the start of the file cut off?")
    if line.endswith(b"\n") or not line.startswith(_HEAD[: len(line)]):
        raise NotFrames(path, "not a frame file")


def call_of(of: ForwardId, frame: Frame, outputs: list[Line]) -> Call:
    """Reduce a frame to its outputs and largest floating-point input."""
    # Masks are filled with the dtype's minimum; token ids are not floats.
    given = [
        _row(of, frame, line, INPUT)
        for line in frame.lines
        if line.phase == "input" and line.dtype.startswith(("float", "bfloat")) and isinstance(line.abs_max, float)
        if line.abs_max != LIMITS.get(line.dtype)
    ]
    largest = max(given, key=lambda row: row.size, default=None)
    return Call(frame.number, largest, tuple(_row(of, frame, line, given=largest) for line in outputs))


def _row(of: ForwardId, frame: Frame, line: Line, label: str = "", given: Row | None = None) -> Row:
    most, limit = line.not_finite or line.abs_max, LIMITS.get(line.dtype, math.inf)
    share = most / limit if isinstance(most, float) and most != limit else 0.0
    growth = most / given.size if share and isinstance(most, float) and given is not None and given.size else math.inf
    names = (frame.module, frame.class_, label or line.label, line.dtype, line.shape, line.text)
    return Row(of, frame.number, *names, line.abs_min, most, share, growth if math.isfinite(growth) else None)
