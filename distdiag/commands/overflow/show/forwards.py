"""Which numbers of a forward grew. Pure."""

from __future__ import annotations

import shlex
import sys
from bisect import bisect_left, bisect_right
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.commands.overflow.show.recording import INPUT, ForwardId, Row
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.show.recording import Call, Forward

COMMAND = "overflow show"
FEW = 24
"""Rows shown at once; of more rows only the important ones."""
MOST_ROWS = 100_000
"""Limit with --all; --batch and --module select from larger files."""
_REACHED = 0.9
"""A module within this share of the maximum reached it; later modules pass it on."""
_FELL = 2.0
"""Inputs larger than their output by this factor end the path: a norm, for instance, shrank the values."""
_LEVEL = 1.25
"""Values within this factor of the smallest do not grow yet."""
_NEARBY = 8
"""Distance in frames up to which an equal maximum alone, without minimum, identifies a tensor."""


@record(kw_only=True)
class Request:
    """Command-line options. `module`: name pattern, empty for all; `batches`: empty for all.

    `everything`: every row of every batch.
    """

    program: str = "distdiag"
    paths: tuple[str, ...]
    module: str = ""
    batches: tuple[int, ...] = ()
    everything: bool = False

    def again(self, *words: str) -> str:
        """Write the command on the same files with other options."""
        return f"{self.program} {COMMAND} {shlex.join([*self.paths, *words])}"

    def fits(self, module: str) -> bool:
        """Return whether --module selects a module."""
        return not self.module or fnmatchcase(module, self.module)


class Names:
    """Names of forwards among each other: "rank 1", "batch 3", "rank 1, batch 3"; without distinct ranks the files'."""

    def __init__(self, among: Sequence[ForwardId]) -> None:
        sources = {(each.path, each.rank) for each in among}
        self._are_several = len(sources) > 1
        self._have_ranks = len({rank for _, rank in sources if rank is not None}) == len(sources)
        self._has_many_batches = len({each.batch for each in among}) > 1

    def of(self, forward: ForwardId) -> str:
        """Return the name of a forward."""
        source = f"rank {forward.rank}" if self._have_ranks else forward.path
        parts = [source] if self._are_several else []
        return ", ".join([*parts, f"batch {forward.batch}"] if self._has_many_batches or not parts else parts)

    def within(self, forward: ForwardId) -> str:
        """Return where: "in batch 3", "on rank 1 in batch 3"."""
        name = self.of(forward)
        return "on " + name.replace(", ", " in ", 1) if name.startswith("rank ") else f"in {name}"


class Growth(msgspec.Struct, frozen=True):
    """The path of a forward's largest value, growing along `through`.

    `factor`: the last divided by the first; `share_of_limit`: of the maximum of its `dtype`.
    """

    of: ForwardId
    factor: float
    share_of_limit: float
    dtype: str
    through: tuple[Row, ...]


def growth_of(forward: Forward) -> Growth | None:
    """Trace the value nearest to its dtype's limit back to its small origin; None without floats.

    An earlier output with the same largest and smallest magnitude and element count is an input's source. Without one,
    the parent module's code computed the input from the parent's own input.
    """
    reached = _REACHED * forward.peak()
    if not reached:
        return None
    flow = _Dataflow(forward.calls)
    path = flow.back(*flow.first_to_reach(reached))
    row, least = path[0], min(row.size for row in path)
    start = next(at for at, row in enumerate(path) if row.size <= _LEVEL * least)
    factor = min(row.size / path[start].size, sys.float_info.max)
    return Growth(forward.id, factor, row.share_of_limit, row.dtype, tuple(path[start::-1]))


class _Dataflow:
    """The frames of a forward, indexed to follow tensors back."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._called: dict[str, list[int]] = {}
        self._made: dict[tuple[object, ...], list[tuple[int, Row]]] = {}
        for index, call in enumerate(calls):
            self._called.setdefault(call.module, []).append(index)
            for row in call.rows:
                if row.most is not None:
                    self._made.setdefault(row.numbers, []).append((index, row))

    def first_to_reach(self, share: float) -> tuple[int, Row]:
        """Return the first tensor that reaches a share of the limit, which one must: an output or a new input."""
        for at, call in enumerate(self._calls):
            is_new = call.given is not None and self._maker(call.given, self._begin(at)) is None
            for row in (*([call.given] if call.given and is_new else []), *call.rows):
                if row.share_of_limit >= share:
                    return at, row
        raise ValueError("no value reaches this share of the limit")

    def back(self, index: int, row: Row) -> list[Row]:
        """Return the path of a tensor to its source, itself first; it ends at larger values or at outside input."""
        path, least = [row], row.size
        at = self._around(index) if row.tensor == INPUT else index
        while at is not None:
            given = self._calls[at].given
            if given is None or not 0 < given.size <= _FELL * least:
                break
            least = min(least, given.size)
            made = self._maker(given, self._begin(at))
            path.append(made[1] if made else given)
            at = made[0] if made else self._around(at)
        return path

    def _maker(self, given: Row, before: int) -> tuple[int, Row] | None:
        """Find the last output before a frame that equals this input."""
        made = self._made.get(given.numbers, [])
        last = bisect_left(made, before, key=lambda maker: maker[0]) - 1
        if last < 0 or (given.abs_min is None and before - made[last][0] > _NEARBY):
            return None
        return made[last]

    def _begin(self, index: int) -> int:
        """Return the first of the frames called from this frame, which precede it."""
        name = self._calls[index].module
        below = f"{name}." if name else ""
        begin = index
        while begin > 0 and self._calls[begin - 1].module.startswith(below) and self._calls[begin - 1].module:
            begin -= 1
        return begin

    def _around(self, index: int) -> int | None:
        """Return the caller of a frame; None if it was not kept."""
        name = self._calls[index].module
        while name:
            name = name.rpartition(".")[0]
            called = self._called.get(name, [])
            after = bisect_right(called, index)
            if after < len(called):
                return called[after]
        return None
