"""Frames in little room: what is kept of a file while it streams by, some 80 bytes for each output of a module."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.overflow.show.records import Detection

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
"""The greatest number of each dtype, as torch.finfo has it; torch is not imported here."""
NEAR = 0.5
"""From this share of it on a tensor is worth a word, as for the detector: twice more overflows."""
_MOST_ODD = 16
_UNKNOWN = -1.0
"""Stands for a magnitude that is not known, or of what is no tensor: an array has no None."""
_DTYPES = tuple(LIMITS)
INPUT = "input"
"""Names the greatest input of a module, where others go by their labels."""


class Place(NamedTuple):
    """An output of a module, by the names that are the same in each batch."""

    module: str
    kind: str
    tensor: str


class Spec(NamedTuple):
    """What a tensor is like; `text` is what stands in the place of one.

    `limit` is the greatest number of its dtype, infinity where that is not known, or none.
    """

    dtype: str
    shape: tuple[int, ...] | None
    text: str
    limit: float

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...] | None = None, text: str = "") -> Spec:
        """Make one, with the limit of its dtype."""
        return cls(dtype, shape, text, LIMITS.get(dtype, math.inf))


class Row(NamedTuple):
    """One output. `least` and `most` are magnitudes, None where unknown; both are nan if there is one in it."""

    place: Place
    spec: Spec
    least: float | None
    most: float | None

    @property
    def is_bad(self) -> bool:
        """Whether there is nan or inf in it."""
        return self.most is not None and not math.isfinite(self.most)

    @property
    def share(self) -> float:
        """How much of what its dtype can hold its greatest magnitude is; 0 where that says nothing."""
        # Masks are made of the dtype's own least number.
        most, limit = self.most, self.spec.limit
        return 0.0 if most is None or not math.isfinite(most) or most == limit else most / limit


class Given(NamedTuple):
    """The input of floats with the greatest finite magnitude; `size` counts its numbers, -1 where unknown."""

    least: float | None
    most: float
    size: int
    dtype: str

    @property
    def share(self) -> float:
        """How much of what its dtype can hold that is."""
        return self.most / LIMITS.get(self.dtype, math.inf)


class Near(NamedTuple):
    """A tensor near the limit of its dtype."""

    share: float
    most: float
    dtype: str
    module: str
    kind: str
    tensor: str


class Call(NamedTuple):
    """One frame: a call of a module, what it was given (None without floats) and all that it gave back."""

    number: int
    given: Given | None
    rows: tuple[Row, ...]

    @property
    def module(self) -> str:
        """Its name; empty for the model itself."""
        return self.rows[0].place.module

    @property
    def kind(self) -> str:
        """Its class."""
        return self.rows[0].place.kind

    @property
    def top(self) -> Row | None:
        """Its output with the greatest finite magnitude, nearest to its limit; masks aside."""
        floats = [row for row in self.rows if row.share > 0]
        return max(floats, key=lambda row: row.share, default=None)

    def growth(self, row: Row) -> float | None:
        """How many times greater an output is than the greatest input; None where one of them is no such number."""
        if self.given is None or not self.given.most or row.most is None or row.is_bad or row.share == 0:
            return None
        times = row.most / self.given.most
        return times if math.isfinite(times) else None


class Odd(NamedTuple):
    """A tensor that holds nan or inf, of any phase: weight, buffer, input, output."""

    number: int
    module: str
    kind: str
    tensor: str
    phase: str
    what: str


class Forward:
    """One forward of the model: a batch, or with gradient accumulation the `turn`-th (from 0) of a step.

    `peak` is the greatest share of a dtype's limit, `near` finds rows from NEAR on, `odd` has the first bad tensors.
    """

    def __init__(self, batch: int, turn: int) -> None:
        self.batch, self.turn = batch, turn
        self.numbers = array("q")
        self.peak = 0.0
        self.odd: list[Odd] = []
        self._begins = array("q")
        self._given = array("d")
        self._places: list[Place] = []
        self._specs: list[Spec] = []
        self._ends = array("d")
        self._near, self._near_given = array("q"), array("q")

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def rows(self) -> int:
        """How many outputs there are."""
        return len(self._places)

    @property
    def modules(self) -> dict[str, None]:
        """The names of the modules, in the order in which they first came."""
        return dict.fromkeys(place.module for place in self._places)

    def add(self, call: Call) -> None:
        """Keep a frame."""
        self._begins.append(len(self._places))
        self._add_given(call.given)
        for row in call.rows:
            share = row.share
            if share >= NEAR:
                self._near.append(len(self._places))
            if share > self.peak:
                self.peak = share
            self._places.append(row.place)
            self._specs.append(row.spec)
            self._ends.extend((_packed(row.least), _packed(row.most)))
        self.numbers.append(call.number)  # the last of all: what Ctrl-C left half done is no frame

    def _add_given(self, given: Given | None) -> None:
        if given is None:
            self._given.extend((_UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN))
            return
        if given.share >= NEAR:
            self._near_given.append(len(self.numbers))
        self.peak = max(self.peak, given.share)
        dtype = _DTYPES.index(given.dtype) if given.dtype in LIMITS else _UNKNOWN
        self._given.extend((_packed(given.least), given.most, given.size, dtype))

    def add_odd(self, odd: Odd) -> None:
        """Remember a tensor that holds nan or inf; the first ones only."""
        if len(self.odd) < _MOST_ODD:
            self.odd.append(odd)

    def holds(self, other: Forward) -> bool:
        """Tell whether all frames of another forward are here, too, with the same numbers."""
        own = dict(zip(self.numbers, range(len(self)), strict=True))
        return all(
            number in own and self._call(own[number]) == other._call(index)
            for index, number in enumerate(other.numbers)
        )

    def extend(self, other: Forward) -> None:
        """Take over the frames of another that come after the last one here."""
        last = self.numbers[-1]
        for call in other.calls():
            if call.number > last:
                self.add(call)
        for odd in other.odd:
            if odd.number > last:
                self.add_odd(odd)

    def near(self) -> list[Near]:
        """Give what is near its limit: outputs, and inputs that are no module's output."""
        rows = [self._row(at) for at in self._near]
        found = [Near(row.share, row.most or 0.0, row.spec.dtype, *row.place) for row in rows]
        known = {one.most for one in found}
        for call in map(self._call, (index for index in self._near_given if index < len(self.numbers))):
            if call.given is not None and call.given.most not in known:
                given = call.given
                found.append(Near(given.share, given.most, given.dtype, call.module, call.kind, INPUT))
        return found

    def calls(self) -> list[Call]:
        """Give all frames, in order."""
        return [self._call(index) for index in range(len(self))]

    def _call(self, index: int) -> Call:
        least, most, size, dtype = self._given[4 * index : 4 * index + 4]
        name = _DTYPES[int(dtype)] if dtype >= 0 else ""
        given = None if most == _UNKNOWN else Given(_unpacked(least), most, int(size), name)
        end = self._begins[index + 1] if index + 1 < len(self._begins) else len(self._places)
        return Call(self.numbers[index], given, tuple(map(self._row, range(self._begins[index], end))))

    def _row(self, at: int) -> Row:
        least, most = self._ends[2 * at : 2 * at + 2]
        return Row(self._places[at], self._specs[at], _unpacked(least), _unpacked(most))


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
        kept = dict.fromkeys(forward.batch for forward in self.forwards)
        return tuple(kept) if not self.passed else tuple(sorted({*kept, *self.passed}))

    @property
    def frames(self) -> int:
        """How many frames are kept."""
        return sum(map(len, self.forwards))


class Side(NamedTuple):
    """One forward, and whose it is: a column where several stand beside each other."""

    recording: Recording
    forward: Forward


def sides(recordings: Sequence[Recording]) -> Iterator[Side]:
    """List all forwards of all recordings."""
    for recording in recordings:
        for forward in recording.forwards:
            yield Side(recording, forward)


def _packed(value: float | None) -> float:
    return _UNKNOWN if value is None else value


def _unpacked(value: float) -> float | None:
    return None if value == _UNKNOWN else value
