"""The forwards that the answer is about, their names in it, and the rows of them that are shown. Pure."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from distdiag.commands.overflow.show.growth import growth_of
from distdiag.commands.overflow.show.recording import NEAR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.show.growth import Growth
    from distdiag.commands.overflow.show.recording import Forward, ForwardId, Recording, Row
    from distdiag.training.overflow.report import Detection

COMMAND = "overflow show"
FEW = 24
"""Rows that are shown at once; of more only those that matter."""
MOST_ROWS = 100_000
"""With --all; of larger files --batch and --module choose."""
_NEAREST = 8
_BAD = 3
_MOST_GROWTH = 32


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options. `module`: a pattern of names, empty for all; `batches`: empty for all.

    `factor`: numbers of two sides that differ by more than this diverge. `everything`: every row, of every batch.
    """

    program: str = "distdiag"
    paths: tuple[str, ...]
    module: str = ""
    batches: tuple[int, ...] = ()
    factor: float = 2.0
    everything: bool = False

    def again(self, *words: str) -> str:
        """Write the command on the same files with other options."""
        return f"{self.program} {COMMAND} {shlex.join([*self.paths, *words])}"

    def fits(self, module: str) -> bool:
        """Return whether --module selects a module."""
        return not self.module or fnmatchcase(module, self.module)


class Names:
    """Names of forwards among each other: "rank 1", "batch 3", "rank 1, batch 3", "batch 3, forward 2"."""

    def __init__(self, among: Sequence[ForwardId]) -> None:
        self._sources = list(dict.fromkeys((each.path, each.rank) for each in among))
        self._many_batches = len({each.batch for each in among}) > 1
        self._many_turns = {each.batch for each in among if each.forward}

    def of(self, forward: ForwardId) -> str:
        """Return the name of a forward."""
        parts = [_name_of_source((forward.path, forward.rank), self._sources)] if len(self._sources) > 1 else []
        if self._many_batches or not parts:
            parts.append(f"batch {forward.batch}")
        if forward.batch in self._many_turns:
            parts.append(f"forward {forward.forward}")
        return ", ".join(parts)

    def within(self, forward: ForwardId) -> str:
        """Return where: "in batch 3", "on rank 1 in batch 3"."""
        name = self.of(forward)
        return "on " + name.replace(", ", " in ", 1) if name.startswith("rank ") else f"in {name}"


def _name_of_source(source: tuple[str, int | None], among: Sequence[tuple[str, int | None]]) -> str:
    """Name a recording, by path and rank, among others: by its rank if no other has that, else by its file."""
    path, rank = source
    if rank is not None and [other for _, other in among].count(rank) == 1:
        return f"rank {rank}"
    name = os.path.basename(path)
    return name if [os.path.basename(other) for other, _ in among].count(name) == 1 else path


@dataclass(frozen=True)
class Selection:
    """The selected forwards. `main`: the one that the answer is about; `detections`: the earliest first, each once.

    `growth` is that of the forwards with the greatest numbers, in the order of the file, where --module fits.
    """

    request: Request
    recordings: tuple[Recording, ...]
    owned: tuple[tuple[Recording, Forward], ...]
    main: Forward | None
    growth: tuple[Growth, ...]
    names: Names
    detections: tuple[tuple[Recording, Detection], ...] = ()

    @property
    def forwards(self) -> list[Forward]:
        """The selected forwards of all recordings."""
        return [forward for _, forward in self.owned]

    def of(self, recording: Recording) -> list[Forward]:
        """Return the selected forwards of a recording."""
        return [forward for owner, forward in self.owned if owner is recording]

    def growth_of(self, forward: Forward | None) -> Growth | None:
        """Return the path of a forward's greatest number."""
        return next((growth for growth in self.growth if forward is not None and growth.of is forward.id), None)

    def name_of(self, recording: Recording) -> str:
        """Name a recording among the others."""
        return _name_of_source((recording.path, recording.rank), [(each.path, each.rank) for each in self.recordings])

    def rows(self) -> list[Row]:
        """Return the rows to show."""
        shown = self.forwards if self.request.everything else [self.main] if self.main else []
        rows: list[Row] = []
        for forward in shown:
            if len(rows) < MOST_ROWS:
                rows += rows_that_matter(self.request, forward, self.growth_of(forward))
        return rows[:MOST_ROWS]


def select(request: Request, recordings: Sequence[Recording]) -> Selection:
    """Choose forwards by --batch, and the main one: of the detection, else the nearest to a limit."""
    ordered = sorted(recordings, key=lambda recording: (recording.rank is None, recording.rank or 0))
    every = [(recording, forward) for recording in ordered for forward in recording.forwards]
    owned = [pair for pair in every if not request.batches or pair[1].id.batch in request.batches]
    forwards = [forward for _, forward in owned]
    highest = sorted(forwards, key=lambda forward: -forward.peak())[:_MOST_GROWTH]
    detections = _distinct(ordered)
    found = [(id(recording), each.batch) for recording, each in detections]
    detected = [forward for key in found for recording, forward in owned if (id(recording), forward.id.batch) == key]
    wanted = {id(forward) for forward in (*highest, *detected[:1])}
    growth = (growth_of(forward) for forward in forwards if id(forward) in wanted)
    return Selection(
        request=request,
        recordings=tuple(ordered),
        owned=tuple(owned),
        main=next(iter((*detected, *highest)), None),
        growth=tuple(each for each in growth if each is not None and request.fits(each.through[-1].module)),
        names=Names([forward.id for forward in forwards]),
        detections=tuple(detections),
    )


def _distinct(recordings: Sequence[Recording]) -> list[tuple[Recording, Detection]]:
    """List the detections, the earliest first; one that several ranks kept is taken from the rank it names."""
    found: dict[tuple[object, ...], tuple[Recording, Detection]] = {}
    for recording in recordings:
        for each in recording.detections:
            key = (each.sentence, *(() if each.rank is not None else (recording.path, recording.rank)))
            if key not in found or recording.rank == each.rank:
                found[key] = (recording, each)
    return sorted(found.values(), key=lambda pair: (pair[1].step, pair[1].batch))


def rows_that_matter(request: Request, forward: Forward, growth: Growth | None) -> list[Row]:
    """Choose the rows of one forward to show, all of them if they are few, or asked for.

    They are those on the path of growth, the first that are not finite, those nearest to a limit, and both ends.
    """
    rows = [row for call in forward.calls if request.fits(call.module) for row in call.rows]
    if request.everything or len(rows) <= FEW:
        return rows
    path = growth.through if growth is not None else ()
    through = {(row.number, row.tensor) for row in path}
    near = sorted((row for row in rows if row.share_of_limit >= NEAR), key=lambda row: -row.share_of_limit)
    grew = [row for row in rows if path and path[0].number <= row.number <= path[-1].number]
    if len(grew) > FEW:
        grew = [row for row in grew if (row.number, row.tensor) in through]
    bad = [row for row in rows if row.is_bad]
    kept = {id(row) for row in (rows[0], rows[-1], *grew[:FEW], *bad[:_BAD], *near[:_NEAREST])}
    return [row for row in rows if id(row) in kept]
