"""trace show as text: the ranks by place, the outliers first; last lines; matches counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.trace.show.classify import Outcome, by_place, classify_run, find_runs, newest
from distdiag.commands.trace.show.wording import clock, shortened, spot, state_of, who
from distdiag.diagnosis.wording import counted
from distdiag.output import Whole, Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.trace.show.classify import Member, Run, RunVerdict
    from distdiag.commands.trace.show.collect import NodeLines, Process, Thread
    from distdiag.commands.trace.show.types import Request

_MARKS = {Outcome.STUCK: "stuck", Outcome.LEFT_FIRST: "exited first"}
"""Marks of outliers, where it is not the outcome itself."""
_FEW, _MOST = 4, 12
"""Places of which the last lines are shown too; places to show."""
_SOURCE = 30
"""Characters of a line's source: the row fits into 80 columns where the place is short."""


def trace_show_view(request: Request, nodes: Sequence[NodeLines]) -> Iterator[RenderableType]:
    """Render every selected run: its places and the last lines, or the matches."""
    runs = find_runs(nodes)
    shown = runs if request.all_runs else newest(runs)
    for run in shown:
        number = len(run.members)
        size = f"{number} of {run.world_size} ranks" if run.world_size else counted(number, "process", "processes")
        yield ""
        yield Wrapped(f"{run.name}: {size}, started at {clock(run.began_s)}", margin=0, hang=2, style="bold")
        if request.count:
            yield from _counts(request, run)
        else:
            yield from _places(request, classify_run(run))
    if len(runs) > len(shown):
        yield ""
        yield f"{counted(len(runs) - len(shown), 'older run')} not shown (--all)"


def _places(request: Request, verdict: RunVerdict) -> Iterator[RenderableType]:
    outliers = set(verdict.outliers)
    groups = sorted(by_place(verdict.run.members), key=lambda group: group[0] not in outliers)
    for group in groups if request.verbose else groups[:_MOST]:
        first = group[0]
        mark = f"  <- {_MARKS.get(verdict.outcome, verdict.outcome)}" if first in outliers else ""
        yield Wrapped(f"{who(group)}: {state_of(first)}{mark}", margin=2, hang=2)
        yield from map(Whole, _place(first))
        if request.last > 1 and (request.verbose or first in outliers or len(groups) <= _FEW):
            for member in group if request.verbose else group[:1]:
                yield from map(Whole, _last_lines(request, member))
    rest = [] if request.verbose else groups[_MOST:]
    if rest:
        ranks = sum(map(len, rest))
        yield f"  ... and {counted(len(rest), 'more place')}, {counted(ranks, 'rank')} (-v shows all)"


def _place(member: Member) -> Iterator[str]:
    user, library = member.place.user, member.place.library
    if user is None and library is None:
        yield "    no line recorded"
    if user is not None:
        notes = ["a call in it returned"] * user.returned + ["the file has changed since"] * user.changed
        yield f"    {spot(user)}" + (f" ({'; '.join(notes)})" if notes else "")
        if user.source:
            yield f"      {user.source}"
    if library is not None:
        yield f"    inside {spot(library)}"


def _last_lines(request: Request, member: Member) -> Iterator[str]:
    for process in member.processes if request.verbose else (member.process,):
        for thread in process.threads:
            if thread.main or request.verbose:
                lines = thread.last[-request.last :]
                yield f"      the last {counted(len(lines), 'line')}{_name(member, process, thread)}"
                for line in lines:
                    text = "(a call in it returned)" if line.returned else shortened(line.source, _SOURCE)
                    yield f"        {clock(line.at_s)}  {spot(line):<26}  {text}".rstrip()


def _name(member: Member, process: Process, thread: Thread) -> str:
    if thread.main and process is member.process:
        return ""
    helper = f" of its child, pid {process.pid}" if process is not member.process else ""
    return f" in thread {thread.name} ({thread.tid}){helper}:"


def _counts(request: Request, run: Run) -> Iterator[RenderableType]:
    """Count matches per process, and report overwritten earlier lines, which the counts miss."""
    from rich.table import Column

    numbers = [Column(title, justify="right") for title in ("times", "of lines recorded")]
    table = plain_table(Column("rank"), Column("pid"), Column("host"), *numbers)
    full = []
    for member in run.members:
        for process in member.processes:
            if any(thread.kept >= process.lines for thread in process.threads):
                full.append(process.lines)
            table.add_row(
                "-" if member.rank is None else str(member.rank),
                f"{process.pid}{'' if process is member.process else ' (its child)'}",
                member.host,
                f"{sum(thread.count for thread in process.threads):,}",
                f"{sum(thread.kept for thread in process.threads):,}",
            )
    yield table
    if full:
        text = (
            f"In {counted(len(full), 'process', 'processes')}, a thread executed more than the last {max(full):,} "
            "lines, which were recorded: earlier lines are not counted. To record more: "
            f"{request.program} trace py --lines N."
        )
        yield Wrapped(text, margin=0, hang=2)
