"""Terminal view of allreduce-bench, with the columns of nccl-tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from distdiag.commands.allreduce_bench.findings import micros, number, short
from distdiag.launch.view import log_lines, rank_table, run_lines
from distdiag.output import Wide, host_table, plain_table
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.allreduce_bench.types import Bench, SizeResult
    from distdiag.report import Report


def bench_view(report: Report[Bench]) -> Iterator[RenderableType]:
    """Yield unusable hosts, the table of ranks if one failed, then the rows."""
    data = report.data
    yield from host_table(data.hosts)
    if not data.ranks:
        if data.verdict is not None and not report.findings:  # of a table, already known to the user
            yield Text("\n".join(data.verdict.lines))
        return
    if any(finding.where.ranks and finding.level is Level.FAIL for finding in report.findings):
        yield rank_table(data)
        yield ""
    if data.results:
        yield Wide(_rows(data))
    if data.compared:
        yield ""
        yield Wide(_beside(data))
    yield Text("\n".join(["", *run_lines(data), *_how(data), *log_lines(data)]))
    if data.verdict is not None:
        yield Text("\n".join(["", *data.verdict.lines]))


def _rows(data: Bench) -> Table:
    titles = ("p50\nus", "mean\nus", "p99\nus", "algbw\nGB/s", "busbw\nGB/s", "#wrong")
    table = Table(
        *(_number(title) for title in ("size", "count")),
        *(Column(title, no_wrap=True) for title in ("type", "op")),
        *(_number(title) for title in titles),
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for row in data.results:
        table.add_row(*_cells(row))
    return table


def _number(title: str) -> Column:
    return Column(title, justify="right", no_wrap=True)


def _cells(row: SizeResult) -> list[str | Text]:
    head: list[str | Text] = [short(row.size_bytes), str(row.count), row.dtype, row.op]
    if row.time_s is None or row.algbw_bytes_per_s is None or row.busbw_bytes_per_s is None:
        return [*head, *["-"] * 5, "N/A"]
    wrong = "N/A" if row.wrong is None else Text(str(row.wrong), style="bold red" if row.wrong else "")
    return [
        *head,
        *(micros(seconds) for seconds in (row.time_s.p50, row.time_s.mean, row.time_s.p99)),
        number(row.algbw_bytes_per_s),
        number(row.busbw_bytes_per_s),
        wrong,
    ]


def _beside(data: Bench) -> Table:
    numbers = (_number(title) for title in ("size", "before us", "now us", "ratio", "limit"))
    table = plain_table(Column("op", no_wrap=True), *numbers, Column("", no_wrap=True))
    for row in data.compared:
        table.add_row(
            row.op,
            short(row.size_bytes),
            micros(row.earlier_p50_s),
            micros(row.p50_s),
            f"{row.ratio:.2f}",
            f"{1 + row.band:.2f}",
            Text("slower", style="bold red") if row.slower else "",
        )
    return table


def _how(data: Bench) -> Iterator[str]:
    iterations = sorted({row.iterations for row in data.results if row.time_s is not None})
    if iterations:
        often = f"{iterations[0]}" if len(iterations) == 1 else f"{iterations[0]} to {iterations[-1]}"
        plural = "" if often == "1" else "s"
        yield f"{often} iteration{plural} per row, each timed on its slowest rank; bandwidth from {data.stat}"
        yield "algbw and busbw in GB/s (1e9 bytes), as nccl-tests defines them"
