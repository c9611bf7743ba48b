"""The report of pyspy-all as text: ranks by stack, outliers and small groups first, library frames folded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold_ranks_within
from distdiag.diagnosis.stack_wording import samples_in_words
from distdiag.diagnosis.wording import named, shorten_hosts
from distdiag.fold import by_key
from distdiag.knowledge.frames import is_native, library_path
from distdiag.output import Whole, Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.pyspy_all.types import FrameRow, Group, ProcessRow, PySpyAll, Request
    from distdiag.report import Report

_GROUPS = 12
_PIDS = 8
_MUCH = 60
_LONG = 80
"""Maximum length of a function's name: C++ templates fill a page."""
_NATIVE = 6
"""Innermost C frames to show."""
_LINES = 10
"""Frames of a stack to show."""
_FEW_ROWS = 8
"""Processes with individual rows; with more, rows with the same text are merged."""
_CELL = 20
"""Maximum length of ranks in a cell of a table."""


def pyspy_all_view(report: Report[PySpyAll], request: Request) -> Iterator[RenderableType]:
    """Render each job with its groups, then the processes that need a note."""
    data = report.data
    for job in data.jobs:
        yield _line(f"{job.title()}; {samples_in_words(data.samples, data.interval_s)}")
        groups = [group for group in data.groups if group.job == job.job]
        yield from _groups(groups, verbose=request.verbose)
        yield ""
    yield from _special(data.processes, all_ranks=request.verbose)
    if request.threads == "all":
        yield from _all_threads(data.processes, verbose=request.verbose)


def _groups(groups: Sequence[Group], *, verbose: bool) -> Iterator[RenderableType]:
    for group in groups if verbose else groups[:_GROUPS]:
        yield ""
        yield _line(head(group, verbose=verbose), style="bold" if group.outlier else "")
        yield from (_frame("    " + line) for line in stack_lines(group.frames, verbose=verbose))
    if len(groups) > _GROUPS and not verbose:
        rest = groups[_GROUPS:]
        yield ""
        yield _line(f"... and {len(rest)} more groups, {sum(group.count for group in rest)} ranks (-v shows all)")


def head(group: Group, *, verbose: bool = False) -> str:
    """Format a group's heading: ranks, count, activity, and outlier mark."""
    moving = movement(group.class_, group.moving, group.outlier)
    counters = "".join(f", {name} {value}" for name, value in group.counters.items())
    mark = f"  <- {group.outlier}" if group.outlier else ""
    return f"{members(group, verbose=verbose)}: {group.class_}{moving}{counters}{mark}"


def movement(class_: str, moving: bool | None, outlier: str = "") -> str:
    """Format whether a group moved between the samples; a rank may compute on one line for long."""
    if class_ in ("exited", "no process", "stopped", "unreadable") or moving is None:
        return ""
    if moving:
        return ", moving"
    waits = class_ in ("communication wait", "GPU wait") or outlier == "stuck"
    return ", no progress" if waits else ", same line in each sample"


def members(group: Group, *, verbose: bool = False) -> str:
    """Format the members of a group with the count."""
    if group.ranks and len(group.ranks) == group.count:
        text = named(group.ranks, _MUCH if not verbose else 10**9)
        return text if group.count == 1 or "ranks (" in text else f"{text} ({group.count})"
    more = f" and {len(group.pids) - _PIDS} more" if len(group.pids) > _PIDS else ""
    text = f"pid{'s' if group.count > 1 else ''} {', '.join(map(str, group.pids[:_PIDS]))}{more}"
    return text + (f" ({group.count})" if group.count > 1 else "")


def stack_lines(frames: Sequence[FrameRow], *, verbose: bool) -> Iterator[str]:
    """Format a stack, innermost first; runs of library frames are folded, except the innermost frame."""
    skipped = shown = 0
    for number, frame in enumerate(frames):
        if shown == _LINES and not verbose and len(frames) - number > 1:
            yield f"... and {len(frames) - number} more frames (-v shows all)"
            return
        if verbose or frame.user or number == 0 or (is_native(frame.file) and number < _NATIVE):
            if skipped:
                yield f"... {skipped} library frame{'s' if skipped > 1 else ''}"
            skipped = 0
            shown += 1
            yield frame_line(frame, verbose=verbose)
        else:
            skipped += 1
    if skipped:
        yield f"... {skipped} library frame{'s' if skipped > 1 else ''}"


def frame_line(frame: FrameRow, *, verbose: bool) -> str:
    """Format one frame: `train_step train.py:25`."""
    file = frame.file if verbose else short(frame)
    function = frame.function if verbose or len(frame.function) <= _LONG else frame.function[: _LONG - 3] + "..."
    return f"{function} {file}" + (f":{frame.line}" if frame.line else "")


def short(frame: FrameRow) -> str:
    """Shorten a path: below site-packages for libraries, the last part for the user's own."""
    if frame.user:
        return os.path.basename(frame.file)
    return library_path(frame.file) or frame.file


def _special(processes: Sequence[ProcessRow], *, all_ranks: bool) -> Iterator[RenderableType]:
    rows = [each for each in processes if each.role == "rank" and (all_ranks or each.status != "ok")]
    if not rows:
        return
    table = plain_table(
        Column("rank", justify="right", overflow="fold"),
        Column("host", overflow="fold"),
        Column("pid", justify="right", no_wrap=True),
        Column("state", no_wrap=True),
        Column("class", overflow="fold"),
        Column("note", overflow="fold"),
    )
    for group in _alike(rows, all_ranks=all_ranks):
        first, pids = group[0], [process.pid for process in group if process.pid is not None]
        ranks = [process.rank for process in group if process.rank is not None]
        table.add_row(
            fold_ranks_within(ranks, _CELL) if ranks else "-",
            shorten_hosts(process.host for process in group),
            "-" if not pids else str(pids[0]) if len(pids) == 1 else f"{pids[0]}, ...",
            first.state or "-",
            first.class_ or "-",
            first.reason or "-",
        )
    yield table
    yield ""


def _alike(rows: Sequence[ProcessRow], *, all_ranks: bool) -> Iterator[list[ProcessRow]]:
    """Merge ranks with the same text if too many for individual rows."""
    if all_ranks or len(rows) <= _FEW_ROWS:
        yield from ([process] for process in rows)
        return
    yield from by_key(((each.state, each.class_, each.reason), each) for each in rows).values()


def _all_threads(processes: Sequence[ProcessRow], *, verbose: bool) -> Iterator[RenderableType]:
    """Show the threads other than the main threads; equal stacks fold."""
    folded = by_key(
        (
            (thread.name, thread.class_, thread.frames),
            f"rank {process.rank}" if process.rank is not None else f"pid {process.pid}",
        )
        for process in processes
        for thread in process.threads[1:]
    )
    for (name, class_, frames), owners in folded.items():
        more = f" and {len(owners) - _PIDS} more" if len(owners) > _PIDS else ""
        yield _line(f"thread {name!r} of {', '.join(owners[:_PIDS])}{more}" + (f": {class_}" if class_ else ""))
        yield from (_frame("    " + line) for line in stack_lines(frames, verbose=verbose))
        yield ""


def _line(text: str, style: str = "") -> Wrapped:
    return Wrapped(text, margin=0, hang=2, style=style)


def _frame(text: str) -> Whole:
    """Format a frame on one line, however long: a wrapped frame neither pastes nor greps."""
    return Whole(text)
