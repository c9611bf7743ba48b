"""The end of a watched job, for people: the frames were printed by the job itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.output import plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.overflow.types import Overflow
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
    for process in report.data.processes:
        for model in process.models:
            rank = "-" if process.rank is None else str(process.rank)
            counts = (model.batches, model.steps, model.began)
            table.add_row(rank, process.host, str(process.pid), model.model, *[f"{count:,}" for count in counts])
    yield table
