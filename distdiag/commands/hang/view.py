"""The report of hang as text: job, sources, and stacks of the ranks at fault."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.diagnosis.stuck.types import Stand, StuckKind
from distdiag.diagnosis.wording import counted, named
from distdiag.fold import by_key
from distdiag.output import Whole, Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.hang.types import Hang, HangRank, Request
    from distdiag.report import Report

_LINES = 6
_SHOWN = 4
_LONG = 300


def hang_view(report: Report[Hang], request: Request) -> Iterator[RenderableType]:
    """Draw the job with its ranks folded by activity, stuck ones first with stacks, and the sources."""
    data = report.data
    for number, job in enumerate(data.jobs):
        yield Wrapped(job.title(), margin=0, hang=2)
        yield ""
        yield from _ranks([row for row in data.processes if row.job == job.job], verbose=request.verbose)
        if number == 0 and data.sources:
            yield from _sources(data, verbose=request.verbose)
    if len(data.jobs) > 1:
        yield f"{len(data.jobs)} jobs were found. To diagnose one, with its log and flight recorder:"
        for name in [job.job for job in data.jobs if job.job][:_LINES]:
            yield Whole(f"    {request.program} hang --job {shlex.quote(name)}")
        yield ""


def _ranks(rows: Sequence[HangRank], *, verbose: bool) -> Iterator[RenderableType]:
    groups = by_key(((row.stuck, row.doing, row.frames), row) for row in rows)
    ordered = sorted(groups.items(), key=lambda item: (not item[0][0], len(item[1])))
    for (stuck, doing, frames), members in ordered if verbose else ordered[:_SHOWN]:
        mark = f"  <- {stuck}" if stuck else ""
        head = f"{_names(members)}: {doing}{_since(members)}{mark}"
        yield Wrapped(head, margin=0, hang=2, style="bold" if stuck else "")
        yield from (Whole(f"    {line}") for line in (frames if verbose else list(_folded(frames))[:_LINES]))
        yield ""
    rest = ordered[_SHOWN:]
    if rest and not verbose:
        yield f"... and {sum(len(members) for _, members in rest)} ranks elsewhere (-v shows all)"
        yield ""


def _folded(frames: Sequence[str]) -> Iterator[str]:
    """Yield the innermost frame and the user's own; library frames in between fold into one line."""
    skipped = 0
    for number, frame in enumerate(frames):
        is_users = " (/" in frame
        if number and not is_users:
            skipped += 1
            continue
        if skipped:
            yield f"... {counted(skipped, 'library frame')}"
        skipped = 0
        yield frame
    if skipped:
        yield f"... {counted(skipped, 'library frame')}"


def _names(members: Sequence[HangRank]) -> str:
    ranks = [row.rank for row in members if row.rank is not None]
    if len(ranks) == len(members):
        return named(ranks, 110)
    return "pid " + ", ".join(str(row.pid) for row in members[:8])


def _since(members: Iterable[HangRank]) -> str:
    known = [row.since_s for row in members if row.since_s is not None]
    return f", {max(known):.0f} s" if known and max(known) >= 1 else ""


def _sources(data: Hang, *, verbose: bool) -> Iterator[RenderableType]:
    """Draw the claim of each source; for a decided verdict, whose evidence has these, only the undecided sources."""
    silent = [row for row in data.sources if row.stand in (Stand.CANNOT_TELL, Stand.NOT_AVAILABLE)]
    if data.class_name is not StuckKind.UNKNOWN and not verbose:
        if silent:
            yield Wrapped(f"no verdict from: {', '.join(row.source for row in silent)} (-v: why)", margin=0)
            yield ""
        return
    table = plain_table(
        Column("source", no_wrap=True), Column("verdict", no_wrap=True), Column("finding", overflow="fold")
    )
    for row in data.sources:
        says = row.says if len(row.says) <= _LONG else row.says[: _LONG - 3] + "..."
        table.add_row(row.source, row.stand, says + (f" ({row.hint})" if row.hint else ""))
    yield table
    yield ""
