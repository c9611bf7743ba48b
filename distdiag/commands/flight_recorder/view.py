"""The ranks of a report as a table: ranks at the same place share a row."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold_ranks_within
from distdiag.output import plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.diagnosis.flight_recorder.types import CallRow, FlightRecorder, RankRow


_ROOM = 24
"""Maximum length of the ranks in a row."""


def flight_recorder_view(data: FlightRecorder, *, verbose: bool) -> Iterator[RenderableType]:
    """Draw the ranks by place, with stuck ranks marked."""
    groups: dict[tuple[object, ...], list[RankRow]] = {}
    for row in data.ranks:
        key = (
            (row.rank,)
            if verbose
            else (row.accused, row.status, name(row.waiting or row.last), site(row.waiting or row.last))
        )
        groups.setdefault(key, []).append(row)
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
        table.add_row(
            fold_ranks_within((row.rank for row in rows), _ROOM),
            mark,
            first.status,
            name(call) or "-",
            site(call) or "-",
        )
    yield table


def name(call: CallRow | None) -> str:
    """Format a call: "all_reduce #5 of default_pg"."""
    if call is None:
        return ""
    if call.number is not None:
        return f"{call.operation} #{call.number} of {call.group}"
    peer = call.target if call.operation == "send" else call.source
    to = "to" if call.operation == "send" else "from"
    return f"{call.operation} {to} rank {peer}" if peer is not None else call.operation


def site(call: CallRow | None) -> str:
    """Format the calling line: "train (job.py:25)"."""
    return f"{call.function} ({os.path.basename(call.file)}:{call.line})" if call is not None and call.file else ""
