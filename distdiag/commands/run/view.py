"""The end of the job, a line per group of ranks, and the folder of its output."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold_ranks_within, fold_within
from distdiag.commands.run.types import status_text
from distdiag.diagnosis.wording import counted, format_duration
from distdiag.output import Whole, Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from distdiag.commands.run.types import RankRun, Run

_ROOM = 100
"""Maximum length of a list of ranks or hosts; longer ones are counted."""


def run_view(data: Run, program: str) -> Iterator[RenderableType]:
    """Draw the job's end, its ranks folded by exit, and the folder."""
    status = "still running" if data.status is None else status_text(data.status)
    restarts = f", {counted(data.generations - 1, 'restart')}" if data.generations > 1 else ""
    yield Wrapped(f"{counted(data.world, 'rank')}, {format_duration(data.took_s)}, {status}{restarts}", margin=0)
    if data.ranks:
        yield ""
        yield _ranks(data)
    if data.folder:
        yield ""
        host = f"/output.{data.hosts[0]}" if len(data.hosts) == 1 else ""
        yield Whole(f"output of each rank: {data.folder}{host}")
        yield Whole(f"read again: {program} run --from {data.folder}")
        if os.path.basename(os.path.dirname(data.folder)).startswith("distdiag-run-"):  # without --save
            yield Whole("it is a temporary folder: --save DIR keeps it elsewhere")


def _ranks(data: Run) -> Table:
    """Draw a row for the first failures, then one for each other kind of exit, in order."""
    several = data.generations > 1
    columns = [Column("ranks", overflow="fold"), Column("hosts", overflow="fold")]
    columns += [Column("start", no_wrap=True)] if several else []
    columns += [Column("ended with", no_wrap=True), Column("at", justify="right", no_wrap=True)]
    table = plain_table(*columns)
    began = min((rank.generation for rank in data.ranks if rank.rank in data.first), default=0)
    groups: dict[tuple[int, bool, str], list[RankRun]] = {}
    for rank in sorted(data.ranks, key=lambda rank: rank.ended_s or 1e18):
        is_first = rank.rank in data.first and rank.generation == began and rank.status != 0
        groups.setdefault((rank.generation, not is_first, _end(rank)), []).append(rank)
    for (generation, is_later, end), ranks in sorted(groups.items(), key=lambda group: group[0][:2]):
        ends = [rank.ended_s for rank in ranks if rank.ended_s is not None]
        row = [
            fold_ranks_within((rank.rank for rank in ranks), _ROOM),
            fold_within(sorted({rank.host for rank in ranks}), _ROOM),
        ]
        row += [f"restart {generation}" if generation else "first"] if several else []
        table.add_row(*row, end + ("" if is_later else "  <- failed first"), _times(ends))
    return table


def _times(ends: list[float]) -> str:
    if not ends:
        return ""
    first, last = f"{ends[0]:.2f}", f"{ends[-1]:.2f}"
    return f"{first} s" if first == last else f"{first}-{last} s"


def _end(rank: RankRun) -> str:
    if rank.ended_s is None:
        return "not ended"
    end = status_text(rank.status)
    return f"{end}, out of memory" if rank.oom else end
