"""How a rank and its last line are put into words. Pure."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.commands.trace.show.standing import COMM
from distdiag.knowledge.frames import library_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.show.collect import Line, Process
    from distdiag.commands.trace.show.result import Stand

_SHORT = 60


def spot(line: Line) -> str:
    """Write a place in the code: `load_batch train.py:26`; a library's file with its path below site-packages."""
    file = os.path.basename(line.file) if line.kind == "user" else library_path(line.file) or line.file
    return f"`{line.function}` {file}:{line.line}"


def who(stands: Sequence[Stand]) -> str:
    """Name members: "rank 2 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])", "pid 812 (node07)"."""
    ranks = [one.member.rank for one in stands if one.member.rank is not None]
    pids = [one.member.process.pid for one in stands]
    hosts = fold(dict.fromkeys(one.member.host for one in stands))
    if len(ranks) < len(stands):
        return f"pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids[:4]))} ({hosts})"
    return f"{name_ranks(ranks)} ({hosts}{f', pid {pids[0]}' if len(pids) == 1 else ''})"


def does(one: Stand) -> str:
    """Say what a member's last line is: its place, what stands there, and for how long."""
    line = one.user or one.library
    if line is None:
        return "without a line of its own yet"
    source = f" (`{shortened(one.source)}`)" if one.source else ""
    return f"at {spot(line)}{source}{_inside(one)}{_since(one)}{_worker(one)}"


def _worker(one: Stand) -> str:
    helper = late_helper(one)
    line = last_of(helper) if helper is not None else None
    if helper is None or line is None:
        return ""
    source = f" (`{shortened(line.source)}`)" if line.source else ""
    return f"; its worker, pid {helper.pid}, is at {spot(line)}{source}"


def late_helper(one: Stand) -> Process | None:
    """Find, for a rank that waits for data, the process of its own that has not executed a line for the longest."""
    alive = [helper for helper in one.member.helpers if helper.state != "ended" and helper.age_s is not None]
    # Servers of multiprocessing, which fork workers or tidy up after them, have one line only.
    helpers = [helper for helper in alive if (line := last_of(helper)) is not None and line.file != "<string>"]
    if one.kind != "data loading" or not helpers:
        return None
    return max(helpers, key=lambda helper: helper.age_s or 0.0)


def last_of(process: Process) -> Line | None:
    """Give the last line of a process's main thread."""
    return next((thread.last[-1] for thread in process.threads if thread.main and thread.last), None)


def waits(one: Stand) -> str:
    """Say where a waiting member is: "in `all_reduce` called from `train_step train.py:25`"."""
    line = one.user or one.library
    if line is None:
        return "at an unknown place"
    name = f"in `{one.operation}` called from " if one.operation and one.kind == COMM else "at "
    return f"{name}{spot(line)}{_since(one)}"


def _inside(one: Stand) -> str:
    return f", inside {spot(one.library)}" if one.library is not None and one.user is not None else ""


def _since(one: Stand) -> str:
    process = one.member.process
    if process.state == "running" and process.age_s is not None and process.age_s >= 1:
        return f", for {seconds(process.age_s)}"
    return ""


def state_of(one: Stand) -> str:
    """Say how its process fares: "running, last line 35 s ago", "died; last line at 14:02:11.3"."""
    process = one.member.process
    newest = max((thread.last[-1].at_s for thread in process.threads if thread.last), default=0.0)
    at = f"last line at {clock(newest)}" if newest else "no line"
    if process.state == "running":
        return f"running, last line {seconds(process.age_s)} ago" if process.age_s is not None else "running"
    return f"{end_of(one)}, {at}"


def end_of(one: Stand) -> str:
    """Say how its process ended: "came to its end", "ended by ValueError: no", "killed or crashed"."""
    process = one.member.process
    if process.state == "raised":
        return f"ended by {shortened(process.error.splitlines()[0], 70)}"
    return "came to its end" if process.state == "ended" else "killed or crashed"


def seconds(value: float) -> str:
    """Write a time: "0.4 s", "35 s", "12 min", "3.1 h"."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def clock(at_s: float) -> str:
    """Write the time of day, as the local clock has it."""
    return time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s % 1 * 1000):03d}"


def shortened(source: str, room: int = _SHORT) -> str:
    """Cut a line of source."""
    return source if len(source) <= room else source[: room - 3] + "..."
