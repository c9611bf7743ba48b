"""Format ranks, last lines and how each rank ended. Pure."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from distdiag.commands.trace.show.classify import COMM, latest_helper
from distdiag.diagnosis.wording import format_members
from distdiag.knowledge.frames import library_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.show.classify import Position
    from distdiag.commands.trace.show.collect import Line

_SHORT = 60


def spot(line: Line) -> str:
    """Format a place in the code: `load_batch train.py:26`; a library's file with its path below site-packages."""
    file = os.path.basename(line.file) if line.kind == "user" else library_path(line.file) or line.file
    return f"`{line.function}` {file}:{line.line}"


def who(positions: Sequence[Position]) -> str:
    """Format members: "rank 2 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])", "pid 812 (node07)"."""
    return format_members([(of.member.rank, of.member.process.pid, of.member.host) for of in positions])


def briefly(positions: Sequence[Position]) -> str:
    """Format members without hosts: "ranks 0-1,3"."""
    return format_members(
        [(of.member.rank, None if of.member.rank is not None else of.member.process.pid, "") for of in positions]
    )


def does(position: Position) -> str:
    """Format a member's last line: its place, its source, how long ago; and the worker that it waits for."""
    line = position.line
    if line is None:
        return "without a recorded line"
    inside = f", inside {spot(position.library)}" if position.library is not None and position.user is not None else ""
    latest = latest_helper(position)
    worker = "" if latest is None else f"; its worker, pid {latest[0].pid}, is at {spot(latest[1])}{_source(latest[1])}"
    return f"at {spot(line)}{_source(position.user)}{inside}{_since(position)}{worker}"


def waits(position: Position) -> str:
    """Format where a waiting member is: "in `all_reduce` called from `train_step train.py:25`"."""
    if position.line is None:
        return "at an unknown location"
    name = f"in `{position.operation}` called from " if position.operation and position.kind == COMM else "at "
    return f"{name}{spot(position.line)}{_since(position)}"


def _source(line: Line | None) -> str:
    return f" (`{shortened(line.source)}`)" if line is not None and line.source else ""


def _since(position: Position) -> str:
    age_s = position.member.process.age_s
    return f", for {seconds(age_s)}" if position.state == "running" and age_s is not None and age_s >= 1 else ""


def state_of(position: Position) -> str:
    """Format a process's state: "running, last line 35 s ago", "killed or crashed, last line at 14:02:11.300"."""
    process = position.member.process
    if process.state == "running":
        return f"running, last line {seconds(process.age_s)} ago" if process.age_s is not None else "running"
    newest = max((thread.last[-1].at_s for thread in process.threads if thread.last), default=0.0)
    return f"{end_of(position)}, {f'last line at {clock(newest)}' if newest else 'no line recorded'}"


def end_of(position: Position) -> str:
    """Format how its process ended: "finished", "raised ValueError: no", "killed or crashed"."""
    if position.state == "raised":
        return f"raised {shortened(position.member.process.error.splitlines()[0], 70)}"
    return "finished" if position.state == "ended" else "killed or crashed"


def seconds(value: float) -> str:
    """Format a time: "0.4 s", "35 s", "12 min", "3.1 h"."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def clock(at_s: float) -> str:
    """Format the time of day, as the local clock has it."""
    return time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s % 1 * 1000):03d}"


def shortened(source: str, room: int = _SHORT) -> str:
    """Cut a line of source."""
    return source if len(source) <= room else source[: room - 3] + "..."
