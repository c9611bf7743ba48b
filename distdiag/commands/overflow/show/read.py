"""Reads files of frames, line by line: what is needed of a frame is kept, and the rest let go."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - this module is only imported when there is a file to read

from distdiag.commands.overflow.show.kept import LIMITS, Call, Forward, Given, Odd, Place, Recording, Row, Spec
from distdiag.commands.overflow.show.records import FORMAT, SCHEMA, Detection, Frame, Head, Kind, Line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import BinaryIO

MOST_ROWS = 4_000_000
"""Outputs that are kept of all files together: some 400 MB."""
_MOST_NAMES = 200_000
_MOST_LINE_BYTES = 1 << 24
_MOST_DETECTIONS = 1000
_TELL_EVERY_BYTES = 1 << 25
_KINDS = ("head", "frame", "detection")
_START = b'{"kind": "head", "schema": "distdiag-frames/'
_DECODER = msgspec.json.Decoder(Head | Frame | Detection)
_NOTHING = Line("output", "output", text="nothing")
_HINT = 'name what DebugUnderflowOverflow(model, save="frames-{rank}.jsonl") wrote'


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
        self, tell: Callable[[str], None], batches: Collection[int] = (), *, most_rows: int = MOST_ROWS
    ) -> None:
        self.recordings: list[Recording] = []
        self._tell = tell
        self._batches = batches
        self._room = most_rows
        self._places: dict[tuple[str, str, str], Place] = {}
        self._specs: dict[tuple[str, tuple[int, ...] | None, str], Spec] = {}

    def read(self, path: str) -> None:
        """Read a file, or a pipe.

        Raises:
            NotFrames: and why.
            OSError: it cannot be read.
        """
        own: _Own | None = None
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            try:
                for number, line, done in _lines(file):
                    if done:
                        self._tell(f"reading {path}: {done / 1e6:.0f}{f' of {size / 1e6:.0f}' if size else ''} MB")
                    own = self._take(path, own, line, number)
            finally:
                if own is not None:
                    own.close()
        if own is None:  # nothing was written into it, or no whole line
            self.recordings.append(Recording(path=path, model="", rank=None, host="", truncated=size > 0))

    def _take(self, path: str, own: _Own | None, line: bytes, number: int) -> _Own | None:
        try:
            record = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _unreadable(path, own, line, number)
        if isinstance(record, Head):
            if own is not None:
                own.close()
            _check_schema(path, record.schema)
            self.recordings.append(Recording(path=path, model=record.model, rank=record.rank, host=record.host))
            return _Own(self.recordings[-1])
        if own is None:
            raise NotFrames(path, "its first line does not say what it is: was its beginning cut off?")
        if isinstance(record, Detection):
            own.detection(record)
        else:
            self._keep(own, record)
        return own

    def _keep(self, own: _Own, frame: Frame) -> None:
        if self._batches and frame.batch not in self._batches:
            if len(own.recording.passed) < _MOST_NAMES:
                own.recording.passed.add(frame.batch)
            return
        call = self._call(frame)
        if len(call.rows) > self._room or len(self._places) + len(self._specs) > _MOST_NAMES:
            self._room = 0  # what is kept is the beginning, without holes
            own.recording.left_out += 1
            return
        self._room -= len(call.rows)
        own.frame(frame, call)

    def _call(self, frame: Frame) -> Call:
        """Take of a frame what is kept; there is a row also where a module gave nothing back."""
        given = None
        rows = []
        for line in frame.lines:
            if line.phase == "output":
                rows.append(self._row(frame, line))
            elif line.phase == "input":
                given = _greater(given, line)
        return Call(frame.number, given, tuple(rows) or (self._row(frame, _NOTHING),))

    def _row(self, frame: Frame, line: Line) -> Row:
        # Names are the same in each batch, and kept once.
        names, about = (frame.module, frame.class_, line.label), (line.dtype, line.shape, line.text)
        place, spec = self._places.get(names), self._specs.get(about)
        if place is None:
            place = self._places[names] = Place(*names)
        if spec is None:
            spec = self._specs[about] = Spec.of(*about)
        return Row(place, spec, _number(line.abs_min), _number(line.abs_max))


class _Own:
    """The recording that is being read, and the forward that its frames belong to now."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._forward: Forward | None = None
        self._of_batch: dict[int, list[Forward]] = {}

    def frame(self, frame: Frame, call: Call) -> None:
        """Take the next frame; one that is not later in the same forward begins another."""
        forward = self._forward
        if forward is None or frame.batch != forward.batch or frame.number <= forward.numbers[-1]:
            self.close()
            forward = self._forward = Forward(frame.batch, 0)
        forward.add(call)
        for line in frame.lines:
            if line.abs_max in ("inf", "nan"):
                what = str(line.abs_max)
                forward.add_odd(Odd(frame.number, frame.module, frame.class_, line.label, line.phase, what))

    def detection(self, found: Detection) -> None:
        """Take a detection; the frames before it are those that lead there."""
        if len(self.recording.detections) < _MOST_DETECTIONS:
            self.recording.detections.append(found)
        if self._forward is not None and self._forward.batch == found.batch:
            self._close_repeated(self._forward, found)
        self.close()

    def close(self) -> None:
        """End the forward."""
        forward, self._forward = self._forward, None
        if forward is not None:
            earlier = self._of_batch.setdefault(forward.batch, [])
            forward.turn = len(earlier)
            earlier.append(forward)
            self.recording.forwards.append(forward)

    def _close_repeated(self, forward: Forward, found: Detection) -> None:
        """Drop frames that were kept already: those of a batch that is traced, and in which something was found."""
        for earlier in self._of_batch.get(forward.batch, ()):
            # A batch is one forward, which was only run again, unless it is a step of several.
            if found.unit == "forward" or earlier.holds(forward):
                earlier.extend(forward)
                self._forward = None
                return


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    """Yield each line with its number from 1; and now and then, else 0, how many bytes were read."""
    number = done = told = 0
    while line := file.readline(_MOST_LINE_BYTES):
        number += 1
        done += len(line)
        if len(line) == _MOST_LINE_BYTES and not line.endswith(b"\n"):
            while (more := file.readline(_MOST_LINE_BYTES)) and not more.endswith(b"\n"):
                done += len(more)
            line = b"too long\n"
        news = done - told >= _TELL_EVERY_BYTES
        told = done if news else told
        if line.strip():
            yield number, line, done if news else 0


def _unreadable(path: str, own: _Own | None, line: bytes, number: int) -> _Own | None:
    """Pass over a line, and remember why. Raises NotFrames."""
    whole = line.endswith(b"\n")
    if own is None:
        if not whole and _START.startswith(line[: len(_START)]):
            return None
        raise NotFrames(path, "this is no file of frames")
    if not whole:
        own.recording.truncated = True
    elif not _is_of_later_kind(line):
        own.recording.torn += 1
        own.recording.first_torn = own.recording.first_torn or number
    return own


def _is_of_later_kind(line: bytes) -> bool:
    try:
        return msgspec.json.decode(line, type=Kind).kind not in _KINDS
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _check_schema(path: str, schema: str) -> None:
    if schema == SCHEMA:
        return
    if schema.startswith(FORMAT):
        raise NotFrames(
            path, f"it was written by a later distdiag: {schema}, and {SCHEMA} is known here", "update distdiag here"
        )
    raise NotFrames(path, f"this is no file of frames, but {schema[:60]!r}")


def _greater(given: Given | None, line: Line) -> Given | None:
    """Choose the input of floats with the greatest finite magnitude; token ids and masks are none."""
    most = line.abs_max
    # Text are "inf" and "nan"; masks are made of the dtype's own least number.
    if most is None or isinstance(most, str) or not line.dtype.startswith(("float", "bfloat")):
        return given
    if most == LIMITS.get(line.dtype) or (given is not None and most <= given.most):
        return given
    return Given(_number(line.abs_min), most, -1 if line.shape is None else math.prod(line.shape), line.dtype)


def _number(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, str) else value
