"""trace show as text: the ranks by place, the outliers first; last lines; matches of a pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.trace.show.classify import Outcome, by_place, classify_run, find_runs, newest
from distdiag.commands.trace.show.wording import clock, shortened, spot, state_of, who
from distdiag.diagnosis.wording import counted
from distdiag.output import Whole, Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.trace.show.classify import Member, Position, Run, RunVerdict
    from distdiag.commands.trace.show.collect import Line, NodeLines, Process, Thread
    from distdiag.commands.trace.show.types import Request

_MARKS = {
    Outcome.STUCK: "stuck",
    Outcome.STRAGGLER: "straggler",
    Outcome.GONE: "exited",
    Outcome.LEFT_FIRST: "exited first",
    Outcome.ELSEWHERE: "elsewhere",
}
_FEW, _MOST = 4, 12
"""Places of which the last lines are shown too; places to show."""
_SOURCE = 30
"""Characters of a line's source: the row fits into 80 columns where the place is short."""


def trace_show_view(request: Request, nodes: Sequence[NodeLines]) -> Iterator[RenderableType]:
    """Render every selected run: its places, the last lines, the matches."""
    runs = find_runs(nodes)
    shown = runs if request.all_runs else newest(runs)
    for run in shown:
        yield from _run(request, classify_run(run))
    if len(runs) > len(shown):
        yield ""
        older = len(runs) - len(shown)
        yield f"{older} older run{'s' * (older > 1)} not shown (--all)"


def _run(request: Request, verdict: RunVerdict) -> Iterator[RenderableType]:
    run = verdict.run
    number = len(run.members)
    size = f"{number} of {run.world_size} ranks" if run.world_size else f"{number} process{'' if number == 1 else 'es'}"
    yield ""
    yield Wrapped(f"{run.name}: {size}, started at {clock(run.began_s)}", margin=0, hang=2, style="bold")
    if request.count:
        yield _counts(run)
        yield from _gone(request, run)
    if request.grep:
        yield from map(Whole, _matches(run))
    if not (request.count or request.grep):
        yield from _places(request, verdict)


def _places(request: Request, verdict: RunVerdict) -> Iterator[RenderableType]:
    outliers = set(map(id, verdict.outliers))
    groups = sorted(by_place(verdict.positions), key=lambda group: id(group[0]) not in outliers)
    for group in groups if request.verbose else groups[:_MOST]:
        first = group[0]
        mark = f"  <- {_MARKS[verdict.outcome]}" if id(first) in outliers else ""
        yield Wrapped(f"{who(group)}: {state_of(first)}{mark}", margin=2, hang=2)
        if first.line is None:
            yield "    no line recorded"
        if first.user is not None:
            yield Whole(f"    {spot(first.user)}{_notes(first.user)}")
            if first.user.source:
                yield Whole(f"      {first.user.source}")
        if first.library is not None:
            yield Whole(f"    inside {spot(first.library)}")
        if request.verbose or id(first) in outliers or len(groups) <= _FEW:
            yield from _last_lines(request, group[:1] if not request.verbose else group)
    rest = [] if request.verbose else groups[_MOST:]
    if rest:
        ranks = sum(map(len, rest))
        yield f"  ... and {counted(len(rest), 'more place')}, {counted(ranks, 'rank')} (-v shows all)"


def _notes(line: Line) -> str:
    parts = ["a call in it returned"] if line.returned else []
    if line.changed:
        parts.append("the file has changed since")
    return f" ({'; '.join(parts)})" if parts else ""


def _last_lines(request: Request, group: Sequence[Position]) -> Iterator[RenderableType]:
    if request.last < 2:
        return
    for position in group:
        member = position.member
        for process in (member.process, *(member.helpers if request.verbose else ())):
            for thread in process.threads:
                if thread.main or request.verbose:
                    yield from map(Whole, _thread(member, process, thread, request.last))


def _thread(member: Member, process: Process, thread: Thread, last: int) -> Iterator[str]:
    name = "" if thread.main and process is member.process else f" {_name(member, process, thread)}:"
    lines = thread.last[-last:]
    yield f"      the last {len(lines)} line{'' if len(lines) == 1 else 's'}{name}"
    for line in lines:
        text = "(a call in it returned)" if line.returned else shortened(line.source, _SOURCE)
        yield f"        {clock(line.at_s)}  {spot(line):<26}  {text}".rstrip()


def _name(member: Member, process: Process, thread: Thread) -> str:
    helper = f" of its child, pid {process.pid}" if process is not member.process else ""
    return f"in thread {thread.name} ({thread.tid}){helper}"


def _counts(run: Run) -> RenderableType:
    from rich.table import Column

    table = plain_table(
        Column("rank"),
        Column("pid"),
        Column("host"),
        Column("times", justify="right"),
        Column("of lines recorded", justify="right"),
    )
    for member in run.members:
        for process in (member.process, *member.helpers):
            table.add_row(
                "-" if member.rank is None else str(member.rank),
                f"{process.pid}{'' if process is member.process else ' (its child)'}",
                member.host,
                f"{sum(thread.count for thread in process.threads):,}",
                f"{sum(thread.kept for thread in process.threads):,}",
            )
    return table


def _gone(request: Request, run: Run) -> Iterator[RenderableType]:
    """Report processes with overwritten earlier lines, which the counts miss."""
    full = [
        process.lines
        for member in run.members
        for process in (member.process, *member.helpers)
        if any(thread.kept >= process.lines for thread in process.threads)
    ]
    if full:
        text = (
            f"In {len(full)} process{'es' * (len(full) > 1)}, a thread executed more than the last {max(full):,} "
            "lines, which were recorded: earlier lines are not counted. To record more: "
            f"{request.program} trace py --lines N."
        )
        yield Wrapped(text, margin=0, hang=2)


def _matches(run: Run) -> Iterator[str]:
    found = [
        (line.at_s, member, process, line)
        for member in run.members
        for process in (member.process, *member.helpers)
        for thread in process.threads
        for line in thread.matches
    ]
    if not found:
        yield "  no recorded line matches"
    for _, member, process, line in sorted(found, key=lambda item: item[0]):
        rank = f"rank {member.rank}" if member.rank is not None else f"pid {process.pid}"
        yield f"  {clock(line.at_s)}  {rank:<8}  {spot(line)}  {line.source}".rstrip()
