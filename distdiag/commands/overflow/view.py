"""The end of a watched job, for people: the frames were printed by the job itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.deliver import plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.overflow.model import Overflow
    from distdiag.report import Report


def overflow_view(report: Report[Overflow]) -> Iterator[RenderableType]:
    """One row for each model of each process."""
    if not report.data.processes:
        return
    table = plain_table(
        Column("rank", justify="right"), Column("host", overflow="fold"), Column("pid", justify="right")
    )
    table.add_column("model", overflow="fold")
    for title in ("forwards", "steps", "found"):
        table.add_column(title, justify="right")
    for one in report.data.processes:
        for model in one.models:
            rank = "-" if one.rank is None else str(one.rank)
            counts = (model.batches, model.steps, model.found)
            table.add_row(rank, one.host, str(one.pid), model.model, *[f"{count:,}" for count in counts])
    yield table
