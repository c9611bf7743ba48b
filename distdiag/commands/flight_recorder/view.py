"""The ranks of a report as a table: ranks at the same place share a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold_ranks_within
from distdiag.fold import by_key
from distdiag.output import plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.diagnosis.flight_recorder.types import FlightRecorder


_ROOM = 24
"""Maximum length of the ranks in a row."""


def flight_recorder_view(data: FlightRecorder, *, verbose: bool) -> Iterator[RenderableType]:
    """Draw the ranks by place, with stuck ranks marked."""
    shown = [(row, row.waiting or row.last) for row in data.ranks]
    groups = by_key(
        ((row.rank,) if verbose else (row.accused, row.status, call and call.name, call and call.site), row)
        for row, call in shown
    )
    if not data.ranks:
        return
    table = plain_table(
        Column("ranks", overflow="fold"),
        Column("", no_wrap=True),
        Column("state", no_wrap=True),
        Column("current or last call", overflow="fold"),
        Column("called at", overflow="fold"),
    )
    for rows in sorted(groups.values(), key=lambda rows: (not rows[0].accused, rows[0].rank)):
        first = rows[0]
        call = first.waiting or first.last
        mark = "" if not first.accused else "<- suspect" if first.status.endswith("dump") else "<- stuck"
        name, site = (call.name, call.site) if call is not None else ("", "")
        ranks = fold_ranks_within((row.rank for row in rows), _ROOM)
        table.add_row(ranks, mark, first.status, name or "-", site or "-")
    yield table
