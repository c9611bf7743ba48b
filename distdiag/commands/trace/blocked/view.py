"""The report of trace blocked as text: one row per wait, equal rows folded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column
from rich.text import Text

from distdiag.cluster.hosts import fold_ranks_within
from distdiag.diagnosis.wait_reasons import Kind
from distdiag.diagnosis.wording import lasting, shorten_hosts
from distdiag.output import Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.trace.blocked.types import ThreadRow, TraceBlocked

_COMMS = 3
_ROOM = 24
"""Characters that the ranks of a row may take."""


def trace_blocked_view(data: TraceBlocked) -> Iterator[RenderableType]:
    """Render a table for each job, and a table of the processes without a job."""
    for number, job in enumerate(data.jobs):
        if number:
            yield ""
        if job.world_size is not None or job.ranks > 1:
            yield Wrapped(job.title(), margin=0, hang=2)
        yield from _table([row for row in data.threads if row.job == job.job])
    rest = [row for row in data.threads if row.job not in {job.job for job in data.jobs}]
    if rest:
        yield from _table(rest)
    if data.helpers:
        what = (
            "1 helper that no process waits for is"
            if data.helpers == 1
            else f"{data.helpers} helpers that no process waits for are"
        )
        yield Text(f"({what} not shown)", overflow="fold")


def _table(rows: Sequence[ThreadRow]) -> Iterator[RenderableType]:
    hosts = len({row.host for row in rows}) > 1
    table = plain_table(
        Column("rank", justify="right", no_wrap=True),
        *([Column("host", overflow="fold")] if hosts else []),
        Column("pid", justify="right", overflow="fold"),
        Column("state", no_wrap=True),
        Column("for", justify="right", no_wrap=True),
        Column("call", overflow="fold"),
        Column("on", overflow="fold"),
    )
    for group in _folded([row for row in rows if row.tid == row.pid]):
        first = group[0]
        table.add_row(
            _ranks(group),
            *([_hosts(group)] if hosts else []),
            _pids(group),
            first.state,
            _since(group),
            first.last.call or "-",
            _on(group),
            style="bold" if first.kind in (Kind.STOPPED, Kind.STORAGE, Kind.KERNEL) else "",
        )
    yield table
    yield from _other_threads([row for row in rows if row.tid != row.pid])


def _other_threads(rows: Sequence[ThreadRow]) -> Iterator[RenderableType]:
    """Render one line per thread other than main threads, below its process: a table would leave no room."""
    owner = None
    for group in _folded(rows):
        first = group[0]
        if (first.host, first.pid) != owner:
            owner = (first.host, first.pid)
            rank = f"rank {first.rank}, " if first.rank is not None and first.role == "rank" else ""
            yield ""
            yield Text(f"other threads of {rank}pid {first.pid} on {first.host}", overflow="fold")
        since = _since(group)
        waits = f" ({first.state}, {since})" if since != "-" else f" ({first.state})"
        call = f"{first.last.call}: " if first.last.call else ""
        yield Wrapped(f"{_thread(group)}  {call}{_on(group)}{waits}", margin=4, hang=8)


def _on(group: Sequence[ThreadRow]) -> str:
    return group[0].on + (f", and {len(group) - 1} more like this" if len({row.on for row in group}) > 1 else "")


def _folded(rows: Sequence[ThreadRow]) -> list[list[ThreadRow]]:
    """Group equal rows: main threads of several ranks, or other threads of one process."""
    groups: dict[tuple[object, ...], list[ThreadRow]] = {}
    for row in rows:
        is_main = row.tid == row.pid
        about = row.role if is_main else (row.host, row.pid)
        # Each connection has its own addresses; only the other end identifies the wait.
        on = row.on.partition(" = ")[2] or row.on if row.kind is not Kind.SLEEP else ""
        groups.setdefault((is_main, about, row.state, row.kind, row.last.call, on), []).append(row)
    return sorted(groups.values(), key=lambda group: _place(group[0]))


def _place(row: ThreadRow) -> tuple[bool, int, bool, str, int, int]:
    return row.rank is None, row.rank or 0, row.role != "rank", row.host, row.pid, row.tid != row.pid


def _ranks(group: Sequence[ThreadRow]) -> str:
    ranks = {row.rank for row in group if row.rank is not None}
    helper = "+" if group[0].role == "helper" else ""
    return helper + (fold_ranks_within(ranks, _ROOM) if ranks else "-")


def _hosts(group: Sequence[ThreadRow]) -> str:
    return shorten_hosts(row.host for row in group)


def _pids(group: Sequence[ThreadRow]) -> str:
    pids = list(dict.fromkeys(row.pid for row in group))
    return str(pids[0]) if len(pids) == 1 else f"{pids[0]}, ..."


def _thread(group: Sequence[ThreadRow]) -> str:
    if len(group) == 1:
        return f"{group[0].tid} {group[0].comm}"
    names = list(dict.fromkeys(row.comm for row in group))
    more = ", ..." if len(names) > _COMMS else ""
    return f"{len(group)} threads ({', '.join(names[:_COMMS])}{more})"


def _since(group: Sequence[ThreadRow]) -> str:
    known = [row.last.blocked_s for row in group if row.last.blocked_s is not None]
    if not known:
        return "-"
    least, most = lasting(min(known)), lasting(max(known))
    return most if least == most else f"{least.removesuffix(' s')}-{most}"
