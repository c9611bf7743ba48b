"""The report of pyspy-all as text: who stands where, the odd and the few first, library frames folded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.table import Column
from rich.text import Text

from distdiag.cluster.hosts import fold
from distdiag.commands.pyspy_all.tree import call_tree
from distdiag.commands.pyspy_all.words import looks, named
from distdiag.deliver import Whole, plain_table
from distdiag.knowledge.frames import is_native, library_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.pyspy_all.model import Request
    from distdiag.commands.pyspy_all.result import FrameRow, Group, ProcessRow, PySpyAll
    from distdiag.report import Report

_GROUPS = 12
_PIDS = 8
_MUCH = 110
_LONG = 80
"""Letters of a function's name: C++ templates go on for a page."""
_NATIVE = 6
"""Innermost C frames to show."""
_LINES = 10
"""Frames of a stack to show."""


def pyspy_all_view(report: Report[PySpyAll], request: Request) -> Iterator[RenderableType]:
    """Give the jobs, then for each its groups or its call tree, then the processes that are special."""
    data = report.data
    for job in data.jobs:
        of = f" of {job.world_size}" if job.world_size is not None else ""
        what = "rank" if (job.world_size or job.ranks) == 1 else "ranks"
        name = f"job {job.job} ({job.launcher})" if job.job else job.launcher
        hosts = f" on {fold(job.hosts)}" if any(job.hosts) else ""
        yield _line(f"{name}: {job.ranks}{of} {what}{hosts}; {looks(data.samples, data.interval_s)}")
        groups = [group for group in data.groups if group.job == job.job]
        if request.tree:
            yield from (_frame(line) for line in call_tree(groups, verbose=request.verbose))
        else:
            yield from _groups(groups, verbose=request.verbose)
        yield ""
    yield from _special(data.processes, everybody=request.verbose, helpers=request.helpers)
    if request.threads == "all":
        yield from _all_threads(data.processes, verbose=request.verbose)


def _groups(groups: Sequence[Group], *, verbose: bool) -> Iterator[RenderableType]:
    for group in groups if verbose else groups[:_GROUPS]:
        yield ""
        yield _line(head(group, verbose=verbose), style="bold" if group.odd else "")
        yield from (_frame("    " + line) for line in stack_lines(group.frames, verbose=verbose))
    if len(groups) > _GROUPS and not verbose:
        rest = groups[_GROUPS:]
        yield ""
        yield _line(f"... and {len(rest)} groups more, {sum(one.count for one in rest)} ranks (-v shows all)")


def head(group: Group, *, verbose: bool = False) -> str:
    """Title a group: its ranks, how many, what they do, and whether they are the odd ones."""
    moving = {True: ", moving", False: ", not moving", None: ""}[group.moving]
    if group.class_ in ("exited", "stopped", "unreadable"):
        moving = ""
    counters = "".join(f", {name} {value}" for name, value in group.counters.items())
    odd = "  <- odd" if group.odd else ""
    return f"{members(group, verbose=verbose)}: {group.class_}{moving}{counters}{odd}"


def members(group: Group, *, verbose: bool = False) -> str:
    """Name the members of a group, and how many they are."""
    if group.ranks and len(group.ranks) == group.count:
        text = named(group.ranks, _MUCH if not verbose else 10**9)
        return text if group.count == 1 or "ranks (" in text else f"{text} ({group.count})"
    more = f" and {len(group.pids) - _PIDS} more" if len(group.pids) > _PIDS else ""
    text = f"pid{'s' if group.count > 1 else ''} {', '.join(map(str, group.pids[:_PIDS]))}{more}"
    return text + (f" ({group.count})" if group.count > 1 else "")


def stack_lines(frames: Sequence[FrameRow], *, verbose: bool) -> Iterator[str]:
    """Write a stack, innermost first; runs of library frames become one line, but the innermost one always shows."""
    skipped = shown = 0
    for number, frame in enumerate(frames):
        if shown == _LINES and not verbose and len(frames) - number > 1:
            yield f"... and {len(frames) - number} frames more (-v shows all)"
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
    """Write one frame: `train_step train.py:25`."""
    file = frame.file if verbose else short(frame)
    function = frame.function if verbose or len(frame.function) <= _LONG else frame.function[: _LONG - 3] + "..."
    return f"{function} {file}" + (f":{frame.line}" if frame.line else "")


def short(frame: FrameRow) -> str:
    """Shorten a path: below site-packages for libraries, the last part for the user's own."""
    if frame.user:
        return os.path.basename(frame.file)
    return library_path(frame.file) or frame.file


def _special(processes: Sequence[ProcessRow], *, everybody: bool, helpers: bool) -> Iterator[RenderableType]:
    rows = [
        one
        for one in processes
        if (one.role == "helper" and helpers) or (one.role == "rank" and (everybody or one.status != "ok"))
    ]
    if not rows:
        return
    table = plain_table(
        Column("rank", justify="right", no_wrap=True),
        Column("host", overflow="fold"),
        Column("pid", justify="right", no_wrap=True),
        Column("state", no_wrap=True),
        Column("doing", overflow="fold"),
        Column("remark", overflow="fold"),
    )
    for one in rows:
        rank = "-" if one.rank is None else str(one.rank)
        role = f"{one.role} of " if one.role == "helper" else ""
        table.add_row(
            f"{role}{rank}",
            one.host,
            "-" if one.pid is None else str(one.pid),
            one.state or "-",
            one.class_ or "-",
            one.reason or "-",
        )
    yield table
    yield ""


def _all_threads(processes: Sequence[ProcessRow], *, verbose: bool) -> Iterator[RenderableType]:
    """Show the threads beside the main ones; equal ones fold."""
    folded: dict[tuple[str, str, tuple[FrameRow, ...]], list[str]] = {}
    for one in processes:
        for thread in one.threads[1:]:
            name = f"rank {one.rank}" if one.rank is not None else f"pid {one.pid}"
            folded.setdefault((thread.name, thread.class_, thread.frames), []).append(name)
    for (name, class_, frames), owners in folded.items():
        more = f" and {len(owners) - _PIDS} more" if len(owners) > _PIDS else ""
        yield _line(f"thread {name!r} of {', '.join(owners[:_PIDS])}{more}" + (f": {class_}" if class_ else ""))
        yield from (_frame("    " + line) for line in stack_lines(frames, verbose=verbose))
        yield ""


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, overflow="fold")


def _frame(text: str) -> Whole:
    """Write a frame on one line, however long: broken ones neither paste nor grep."""
    return Whole(text)
