"""The report of trace sys as text: the call each process is in, the calls by time, and the places."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold_ranks
from distdiag.commands.trace.sys.wording import format_duration
from distdiag.output import Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.trace.sys.types import ThreadRow, TraceSys

_ROWS, _THREADS, _CALLS, _PLACES = 40, 12, 10, 6


def trace_sys_view(data: TraceSys) -> Iterator[RenderableType]:
    """Render the main threads, the other busy threads, and the totals."""
    if not data.threads:
        return
    mains = [row for row in data.threads if row.main]
    yield _processes(mains[:_ROWS])
    if len(mains) > _ROWS:
        yield f"({len(mains) - _ROWS} more processes: --json)"
    yield from _threads([row for row in data.threads if not row.main])
    yield from _calls(data.threads)
    yield from _places(data.threads)
    kept = [log.path for log in data.logs if log.path]
    if kept and len(kept) <= _PLACES:
        yield ""
        yield from (Wrapped(f"log: {path}", margin=0, hang=2) for path in kept)
    elif kept:
        yield ""
        yield Wrapped(f"{len(kept)} logs: {kept[0]} ...", margin=0, hang=2)


def _processes(rows: Sequence[ThreadRow]) -> RenderableType:
    hosts, jobs = len({row.host for row in rows}) > 1, len({row.job for row in rows}) > 1
    table = plain_table(
        *([Column("job", overflow="fold")] if jobs else []),
        Column("rank", justify="right", no_wrap=True),
        *([Column("host", overflow="fold")] if hosts else []),
        Column("pid", justify="right", no_wrap=True),
        Column("calls", justify="right", no_wrap=True),
        Column("errors", justify="right", no_wrap=True),
        Column("blocked", justify="right", no_wrap=True),
        Column("in", overflow="fold"),
        Column("on", overflow="fold", ratio=1),
    )
    for row in rows:
        table.add_row(
            *([row.job or "-"] if jobs else []),
            "-" if row.rank is None else str(row.rank),
            *([row.host or "-"] if hosts else []),
            str(row.pid if row.pid is not None else row.tid or "-"),
            str(row.n_calls),
            str(sum(call.errors for call in row.calls)),
            _since(row),
            _call(row),
            row.on if row.on and row.state == "blocked" else _doing(row),
            style="bold" if row.kind in ("stopped", "storage", "file") and row.state == "blocked" else "",
        )
    return table


def _since(row: ThreadRow) -> str:
    return format_duration(row.last.blocked_s) if row.last is not None and row.last.blocked_s is not None else "-"


def _call(row: ThreadRow) -> str:
    return row.last.call if row.last is not None and row.state == "blocked" else "-"


def _doing(row: ThreadRow) -> str:
    if row.state != "runs":
        return row.state
    return "running" if row.n_calls else "computing: no system call"


def _threads(rows: Sequence[ThreadRow]) -> Iterator[RenderableType]:
    """Render a line for each of the other threads with the most calls; idle threads are only counted."""
    busy = sorted((row for row in rows if row.n_calls), key=lambda row: -row.n_calls)[:_THREADS]
    if not busy:
        return
    yield ""
    idle, jobs = len(rows) - len(busy), len({row.job for row in rows}) > 1
    yield "other threads" + (f" ({idle} more made fewer calls or none)" if idle else "")
    for row in busy:
        whose = f"rank {row.rank}" if row.rank is not None else f"pid {row.pid}" if row.pid is not None else row.host
        in_ = f"; in {_call(row)}: {row.on}" if row.state == "blocked" and row.on else f"; {_doing(row)}"
        whose = f"job {row.job}, {whose}" if jobs and row.job else whose
        name = f"{row.tid} ({row.comm})" if row.comm else f"{row.tid}"
        yield Wrapped(f"{whose}: thread {name}: {row.n_calls} calls{in_}", margin=2, hang=6)


def _calls(rows: Sequence[ThreadRow]) -> Iterator[RenderableType]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    owners: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        for call in row.calls:
            total = sums[call.name]
            total[0] += call.count
            total[1] += call.errors
            total[2] += call.time_s
            total[3] = max(total[3], call.slowest_s)
            owners[call.name].update([row.rank] if row.rank is not None else [])
    if not sums:
        return
    ranks = len({row.rank for row in rows if row.rank is not None}) > 1
    table = plain_table(
        Column("call"),
        *(Column(name, justify="right") for name in ("count", "errors", "time", "slowest")),
        *([Column("ranks")] if ranks else []),
    )
    ordered = sorted(sums.items(), key=lambda item: (-item[1][2], -item[1][0]))
    for name, (count, errors, time_s, slowest_s) in ordered[:_CALLS]:
        times = (format_duration(time_s), format_duration(slowest_s))
        table.add_row(name, f"{count:.0f}", f"{errors:.0f}", *times, *([fold_ranks(owners[name])] if ranks else []))
    yield ""
    yield "system calls that returned; times are summed over all threads, waiting included"
    yield table
    if len(ordered) > _CALLS:
        yield f"({len(ordered) - _CALLS} more calls: --json)"


def _places(rows: Sequence[ThreadRow]) -> Iterator[RenderableType]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for row in rows:
        for place in (place for place in row.places if place.where.startswith("/")):
            total = sums[place.where]
            total[0] += place.count
            total[1] += place.slow
            total[2] += place.time_s
            total[3] = max(total[3], place.slowest_s)
    if not sums:
        return
    table = plain_table(
        Column("directory", overflow="fold"),
        *(Column(name, justify="right") for name in ("calls", "of >= 10 ms", "time", "slowest")),
    )
    for where, (count, slow, time_s, slowest_s) in sorted(sums.items(), key=lambda item: -item[1][2])[:_PLACES]:
        table.add_row(where, f"{count:.0f}", f"{slow:.0f}", format_duration(time_s), format_duration(slowest_s))
    yield ""
    yield "files, by directory"
    yield table
