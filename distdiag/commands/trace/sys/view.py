"""The report of trace sys as text: the call each process is in, the calls by time, and the places."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold_ranks
from distdiag.diagnosis.wording import format_duration, listed
from distdiag.output import Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.trace.sys.types import TracedThread, TraceSys
    from distdiag.facts.strace.types import Count

_ROWS, _CALLS, _PLACES = 40, 10, 6


def trace_sys_view(data: TraceSys) -> Iterator[RenderableType]:
    """Render the main threads, and the totals of all threads."""
    if not data.threads:
        return
    mains = [row for row in data.threads if row.main]
    yield _processes(mains[:_ROWS])
    if len(mains) > _ROWS:
        yield f"({len(mains) - _ROWS} more processes: --json)"
    yield from _calls(data.threads)
    yield from _places(data.threads)
    kept = list(dict.fromkeys(row.log.path for row in data.threads if row.log is not None and row.log.path))
    if kept:
        yield ""
        yield Wrapped(f"logs: {listed(kept)}", margin=0, hang=2)


def _processes(rows: Sequence[TracedThread]) -> RenderableType:
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
            str(sum(call.errors for call in row.log.calls) if row.log is not None else 0),
            format_duration(row.blocked_s) if row.blocked_s is not None else "-",
            row.call or "-" if row.state == "blocked" else "-",
            row.on if row.on and row.state == "blocked" else _doing(row),
            style="bold" if row.kind in ("stopped", "storage", "file") and row.state == "blocked" else "",
        )
    return table


def _doing(row: TracedThread) -> str:
    if row.state != "runs":
        return row.state
    return "running" if row.n_calls else "computing: no system call"


def _calls(rows: Sequence[TracedThread]) -> Iterator[RenderableType]:
    sums: dict[str, list[Count]] = defaultdict(list)
    owners: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        for call in row.log.calls if row.log is not None else ():
            sums[call.name].append(call)
            owners[call.name].update([row.rank] if row.rank is not None else [])
    if not sums:
        return
    ranks = len({row.rank for row in rows if row.rank is not None}) > 1
    numbers = (Column(name, justify="right") for name in ("count", "errors", "time", "slowest"))
    table = plain_table(Column("call"), *numbers, *([Column("ranks")] if ranks else []))
    ordered = sorted(sums.items(), key=lambda item: (-_time_s(item[1]), -_count(item[1])))
    for name, calls in ordered[:_CALLS]:
        errors = str(sum(call.errors for call in calls))
        folded = [fold_ranks(owners[name])] if ranks else []
        table.add_row(name, str(_count(calls)), errors, *_times(calls), *folded)
    yield ""
    yield "system calls that returned; times are summed over all threads, waiting included"
    yield table


def _places(rows: Sequence[TracedThread]) -> Iterator[RenderableType]:
    sums: dict[str, list[Count]] = defaultdict(list)
    for place in (place for row in rows if row.log is not None for place in row.log.places):
        if place.name.startswith("/"):
            sums[place.name].append(place)
    if not sums:
        return
    numbers = (Column(name, justify="right") for name in ("calls", "of >= 10 ms", "time", "slowest"))
    table = plain_table(Column("directory", overflow="fold"), *numbers)
    for where, places in sorted(sums.items(), key=lambda item: -_time_s(item[1]))[:_PLACES]:
        table.add_row(where, str(_count(places)), str(sum(place.slow for place in places)), *_times(places))
    yield ""
    yield "files, by directory"
    yield table


def _count(rows: Sequence[Count]) -> int:
    return sum(row.count for row in rows)


def _time_s(rows: Sequence[Count]) -> float:
    return sum(row.time_s for row in rows)


def _times(rows: Sequence[Count]) -> tuple[str, str]:
    return format_duration(_time_s(rows)), format_duration(max(row.slowest_s for row in rows))
