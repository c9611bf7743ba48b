"""Which forwards and which rows are shown: those that matter, where there are too many. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from distdiag.commands.overflow.show.growth import chain_of
from distdiag.commands.overflow.show.kept import NEAR, Side, sides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.commands.overflow.show.growth import Chain
    from distdiag.commands.overflow.show.kept import Call, Recording, Row
    from distdiag.commands.overflow.show.model import Request

_FEW_ROWS = 24
_STEEPEST = 6
_STEEP = 2.0
_NEAREST = 8
_BAD = 3
_CHAINS = 32
MOST_ROWS = 100_000
"""With --all; of larger files --batch and --module choose."""


class Line(NamedTuple):
    """One output in the table, or (`call` is None) how many were left out before the next, and their numbers."""

    call: Call | None
    row: Row | None
    skipped: int = 0
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Chosen:
    """What was asked for, of all that was read. `main` is the forward that the answer is about.

    `chains` are of the forwards with the greatest numbers, in the order of the file, where a module fits.
    """

    recordings: tuple[Recording, ...]
    sides: tuple[Side, ...]
    main: Side | None
    chains: tuple[tuple[Side, Chain], ...]

    def chain(self, side: Side | None) -> Chain | None:
        """Give the chain of a forward."""
        return next((chain for one, chain in self.chains if one is side), None)


def choose(request: Request, recordings: Sequence[Recording]) -> Chosen:
    """Choose forwards by --batch, and the one the answer is about: of the detection, else the nearest to a limit."""
    ordered = sorted(recordings, key=lambda one: (one.rank is None, one.rank or 0))
    found = tuple(one for one in sides(ordered) if not request.batches or one.forward.batch in request.batches)
    highest = sorted(found, key=lambda one: -one.forward.peak)[:_CHAINS]
    detected = [side for side in found if _is_of_detection(side)]
    wanted = {id(side) for side in (*highest, *detected[:1])}
    chains = [(side, chain_of(side.forward.calls())) for side in found if id(side) in wanted]
    fits = wants(request)
    return Chosen(
        recordings=tuple(ordered),
        sides=found,
        main=next(iter((*detected, *highest)), None),
        chains=tuple((side, chain) for side, chain in chains if chain is not None and fits(chain.end.call.module)),
    )


def wants(request: Request) -> Callable[[str], bool]:
    """Give a test of names by --module."""
    pattern = request.module
    return lambda name: not pattern or fnmatchcase(name, pattern)


def _is_of_detection(side: Side) -> bool:
    return any(one.batch == side.forward.batch for one in side.recording.detections)


def table_of(request: Request, side: Side, chain: Chain | None) -> list[Line]:
    """Choose the rows of one forward; what is left out between them is counted."""
    fits = wants(request)
    pairs = [(call, row) for call in side.forward.calls() if fits(call.module) for row in call.rows]
    if request.everything or len(pairs) <= _FEW_ROWS:
        return [Line(call, row) for call, row in pairs]
    kept = _that_matter(pairs, chain)
    kept |= {at + 1 for at in kept if at + 2 in kept}  # instead of a line that says that one is left out
    lines: list[Line] = []
    skipped: list[Row] = []
    for at, (call, row) in enumerate(pairs):
        if at in kept:
            lines += _gap(skipped)
            lines.append(Line(call, row))
            skipped = []
        else:
            skipped.append(row)
    return lines + _gap(skipped)


def _gap(skipped: Sequence[Row]) -> list[Line]:
    if not skipped:
        return []
    known = [row.most for row in skipped if row.most is not None and not row.is_bad]
    return [Line(None, None, len(skipped), min(known, default=None), max(known, default=None))]


def _that_matter(pairs: Sequence[tuple[Call, Row]], chain: Chain | None) -> set[int]:
    """Number the rows near a limit, the steepest, the first that are not finite, and those the numbers grew through."""
    growth = {at: grown for at, (call, row) in enumerate(pairs) if (grown := call.growth(row)) and grown >= _STEEP}
    near = [at for at, (_, row) in enumerate(pairs) if row.share >= NEAR]
    through = {(point.call.number, point.tensor) for point in chain.points} if chain is not None else set()
    bad = [at for at, (_, row) in enumerate(pairs) if row.is_bad]
    return {
        0,
        len(pairs) - 1,
        *sorted(growth, key=lambda at: -growth[at])[:_STEEPEST],
        *sorted(near, key=lambda at: -pairs[at][1].share)[:_NEAREST],
        *bad[:_BAD],
        *[at for at, (call, row) in enumerate(pairs) if (call.number, row.place.tensor) in through][:_FEW_ROWS],
    }


def columns(chosen: Sequence[Side], room: int) -> list[Side]:
    """Choose so many forwards as there is room for: the first and the last, that of a detection, those between."""
    if len(chosen) <= room:
        return list(chosen)
    wanted = [0, len(chosen) - 1]
    wanted += [at for at, side in enumerate(chosen) if _is_of_detection(side)][:1]
    wanted += [max(range(len(chosen)), key=lambda at: chosen[at].forward.peak)]
    wanted += [round(step * (len(chosen) - 1) / (room - 1)) for step in range(room)]
    return [chosen[at] for at in sorted(list(dict.fromkeys(wanted))[:room])]
