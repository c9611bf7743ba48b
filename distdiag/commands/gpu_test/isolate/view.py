"""`gpu-test --isolate` for people: the matrix of pairs where it fits, else the pairs that are not well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from distdiag.cluster.hosts import name_ranks
from distdiag.commands.gpu_test.isolate.types import PairStatus
from distdiag.diagnosis.wording import format_size
from distdiag.launch.view import log_lines, rank_table, run_lines
from distdiag.output import host_table, plain_table
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.gpu_test.isolate.types import Isolated, PairResult
    from distdiag.report import Report

_WIDEST = 10
_MOST = 16
_WORDS = {PairStatus.FAILED: "failed", PairStatus.SKIPPED: ".", PairStatus.WRONG: "wrong"}
_SIGNS = {PairStatus.SLOW: ("!", "bold red"), PairStatus.UNSURE: ("?", "yellow")}


def isolate_view(report: Report[Isolated]) -> Iterator[RenderableType]:
    """The hosts that could not be used, the ranks where one failed, then the pairs."""
    data = report.data
    yield from host_table(data.hosts)
    if not data.ranks:
        return
    if data.classification is None and any(finding.level is Level.FAIL for finding in report.findings):
        yield rank_table(data)
        yield ""
    if data.pairs:
        yield _matrix(data) if data.world_size <= _WIDEST else _worst(data)
    yield Text("\n".join(["", *run_lines(data), *_how(data), *log_lines(data)]))


def _matrix(data: Isolated) -> Table:
    ranks = [rank.rank for rank in data.ranks]
    of = {(pair.a, pair.b): pair for pair in data.pairs}
    table = plain_table(
        Column("GB/s", justify="right", no_wrap=True),
        *(Column(f"rank {rank}" if rank == 0 else str(rank), justify="right", no_wrap=True) for rank in ranks),
    )
    for a in ranks:
        cells = [of.get((min(a, b), max(a, b))) if a != b else None for b in ranks]
        table.add_row(f"rank {a}", *(_cell(pair) for pair in cells))
    return table


def _cell(pair: PairResult | None) -> Text:
    if pair is None:
        return Text("")
    if pair.busbw_bytes_per_s is None or pair.status in _WORDS:
        return Text(_WORDS.get(pair.status, "."), style="" if pair.status is PairStatus.SKIPPED else "bold red")
    # A sign besides the colour, which may not be there.
    sign, style = _SIGNS.get(pair.status, (" ", ""))
    return Text(f"{pair.busbw_bytes_per_s / 1e9:.2f}{sign}", style=style)


def _worst(data: Isolated) -> Table:
    table = plain_table(
        Column("ranks", no_wrap=True),
        Column("hosts", overflow="fold"),
        Column("GB/s", justify="right"),
        Column("status"),
    )
    host_of = {rank.rank: rank.host for rank in data.ranks}
    bad = [pair for pair in data.pairs if pair.status not in (PairStatus.OK, PairStatus.SKIPPED)]
    good = sorted(pair.busbw_bytes_per_s or 0 for pair in data.pairs if pair.status is PairStatus.OK)
    for pair in sorted(bad, key=lambda result: result.busbw_bytes_per_s or 0)[:_MOST]:
        speed = "-" if pair.busbw_bytes_per_s is None else f"{pair.busbw_bytes_per_s / 1e9:.2f}"
        hosts = " ".join(dict.fromkeys((host_of[pair.a], host_of[pair.b])))
        table.add_row(f"{pair.a}-{pair.b}", hosts, speed, pair.status)
    if len(bad) > _MOST:
        table.add_row("...", f"{len(bad) - _MOST} more", "", "")
    if good:
        table.add_row("others", "", f"{good[0] / 1e9:.2f}-{good[-1] / 1e9:.2f}", f"ok ({len(good)} pairs)")
    return table


def _how(data: Isolated) -> Iterator[str]:
    if data.pairs:
        yield f"all_reduce of {format_size(data.size_bytes)} between two ranks at a time, every element checked"
    if data.left_out:
        are = "computes" if len(data.left_out) == 1 else "compute"
        yield f"not paired: {name_ranks(data.left_out)}, which {are} wrongly or slowly"
    if any(pair.status is PairStatus.SLOW for pair in data.pairs):
        uniform = data.classification is not None and data.classification.kind == "uniformly-slow"
        yield "! below --expect" if uniform else "! slow: measured again alone, each time next to a good pair"
    if any(pair.status is PairStatus.UNSURE for pair in data.pairs):
        yield "? looks slow, but so did good pairs: not enough to decide"
