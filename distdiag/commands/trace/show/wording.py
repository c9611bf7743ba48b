"""Format ranks, last lines and how each rank ended. Pure."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from distdiag.commands.trace.show.classify import COMM, latest_helper
from distdiag.diagnosis.wording import format_age, format_members
from distdiag.knowledge.frames import library_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.show.classify import Member
    from distdiag.commands.trace.show.collect import Line


def spot(line: Line) -> str:
    """Format a place in the code: `load_batch train.py:26`; a library's file with its path below site-packages."""
    file = os.path.basename(line.file) if line.kind == "user" else library_path(line.file) or line.file
    return f"`{line.function}` {file}:{line.line}"


def who(members: Sequence[Member]) -> str:
    """Format members: "rank 2 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])", "pid 812 (node07)"."""
    return format_members([(member.rank, member.process.pid, member.host) for member in members])


def briefly(members: Sequence[Member]) -> str:
    """Format members without hosts: "ranks 0-1,3"."""
    return format_members([(at.rank, at.process.pid if at.rank is None else None, "") for at in members])


def does(member: Member) -> str:
    """Format a member's last line: its place, its source, how long ago; and the worker that it waits for."""
    place, line = member.place, member.place.line
    if line is None:
        return "without a recorded line"
    inside = f", inside {spot(place.library)}" if place.library is not None and place.user is not None else ""
    latest = latest_helper(member)
    worker = "" if latest is None else f"; its worker, pid {latest[0].pid}, is at {spot(latest[1])}{_source(latest[1])}"
    return f"at {spot(line)}{_source(place.user)}{inside}{_since(member)}{worker}"


def waits(member: Member) -> str:
    """Format where a waiting member is: "in `all_reduce` called from `train_step train.py:25`"."""
    place = member.place
    if place.line is None:
        return "at an unknown location"
    name = f"in `{place.operation}` called from " if place.operation and place.kind == COMM else "at "
    return f"{name}{spot(place.line)}{_since(member)}"


def _source(line: Line | None) -> str:
    return f" (`{shortened(line.source)}`)" if line is not None and line.source else ""


def _since(member: Member) -> str:
    age_s = member.process.age_s
    return f", for {format_age(age_s)}" if member.process.state == "running" and age_s and age_s >= 1 else ""


def state_of(member: Member) -> str:
    """Format a process's state: "running, last line 35 s ago", "killed or crashed, last line at 14:02:11.300"."""
    process = member.process
    if process.state == "running":
        return f"running, last line {format_age(process.age_s)} ago" if process.age_s is not None else "running"
    newest = max((thread.last[-1].at_s for thread in process.threads if thread.last), default=0.0)
    return f"{end_of(process.state, process.error)}, " + (
        f"last line at {clock(newest)}" if newest else "no line recorded"
    )


def end_of(state: str, error: str) -> str:
    """Format how a process ended: "finished", "raised ValueError: no", "killed or crashed"."""
    ends = {"raised": f"raised {shortened(error.partition(chr(10))[0], 70)}", "ended": "finished"}
    return ends.get(state, "killed or crashed")


def clock(at_s: float) -> str:
    """Format the time of day, as the local clock has it."""
    return time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s % 1 * 1000):03d}"


def shortened(source: str, room: int = 60) -> str:
    """Cut a line of source."""
    return source if len(source) <= room else source[: room - 3] + "..."
