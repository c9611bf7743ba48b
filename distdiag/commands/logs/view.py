"""The logs read and each rank's end, folded; with --timeline all events in order."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold_ranks_within
from distdiag.diagnosis.wording import counted, format_size
from distdiag.fold import by_key
from distdiag.output import Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from distdiag.diagnosis.job_logs.types import Logs
    from distdiag.report import Report

_RANKS, _TIMELINE, _WHAT = 40, 200, 160


def logs_view(report: Report[Logs], *, timeline: bool) -> Iterator[RenderableType]:
    """Draw the sources unless it is one complete file, and a row per kind of end, cause first."""
    data = report.data
    if not _is_plain(data):
        yield Wrapped(_sources(data), margin=0)
        yield ""
    if data.ranks:
        yield _ends(data, report.findings[0].where.ranks if report.findings else ())
    if timeline:
        yield ""
        for line in _timeline(data):
            yield Wrapped(line, margin=0, hang=4)


def _ends(data: Logs, first: Sequence[int]) -> Table:
    table = plain_table(
        Column("ranks", overflow="fold"),
        Column("role", no_wrap=True),
        Column("exit", no_wrap=True),
        Column("reports", overflow="fold"),
    )
    groups = by_key(((end.role, end.exit, _shape(end.what)), end.rank) for end in data.ranks)
    what = {_shape(end.what): end.what for end in reversed(data.ranks)}

    def order(group: tuple[tuple[str, str, str], list[int]]) -> tuple[bool, bool]:
        return not set(group[1]) & {*first}, group[0][0] != "cause"

    for (role, exit_, shape), ranks in sorted(groups.items(), key=order):
        reports = _cut(_short(what[shape])) or "no error"
        table.add_row(fold_ranks_within(ranks, _RANKS), role or "-", exit_ or "-", reports)
    return table


def _short(text: str) -> str:
    """Strip torch's source location and advice from a message."""
    text = re.sub(r"^\[[EWIF]\d{4} [^\]]*\] ", "", text)
    text = re.sub(r"\[\S*/[\w.-]+\.(?:cc|cpp|h|cu):\d+\] ", "", text)
    return text.partition(". This is typically caused by")[0]


def _cut(text: str) -> str:
    return text if len(text) <= _WHAT else text[:_WHAT].rpartition(" ")[0] + " ..."


def _shape(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)


def _is_plain(data: Logs) -> bool:
    """Return whether a single complete file was read."""
    (*others, source) = data.sources or (None,)
    is_whole = source is not None and not (source.error or source.cut or source.joined or others)
    return is_whole and not data.dropped


def _sources(data: Logs) -> str:
    read = [source for source in data.sources if not source.error]
    size = sum(source.bytes for source in data.sources)
    forms = sorted({form for source in data.sources for form in source.forms})
    joined = sum(source.joined for source in data.sources)
    lines = sum(source.lines for source in data.sources)
    text = f"{len(read)} of {counted(len(data.sources), 'file')} read, {counted(lines, 'line')}, {format_size(size)}"
    text += f"; prefixes of {', '.join(forms)}" if forms else ""
    text += f"; {joined} torn lines put together" if joined else ""
    return text + (f"; {data.dropped} repeated events left out" if data.dropped else "")


def _timeline(data: Logs) -> Iterator[str]:
    """Yield all failures by generation, then by time if all have one, else by file and line."""
    timed = all(failure.at is not None for failure in data.failures)
    ordered = sorted(
        data.failures,
        key=lambda failure: (
            failure.generation,
            failure.at if timed and failure.at else 0.0,
            failure.file,
            failure.line,
        ),
    )
    if not timed and len(data.sources) > 1:
        yield "order: by file and line; not every line has a time, so files are not merged"
    for failure in ordered[:_TIMELINE]:
        clock = f"{_clock(failure.at):12}  " if any(failure.at is not None for failure in ordered) else ""
        who = f"rank {failure.rank}" if failure.rank is not None else "-"
        place = f"{failure.file}:{failure.line}" if len(data.sources) > 1 else f"line {failure.line}"
        yield f"{clock}{who:9} {failure.role:12} {place}  {_cut(_short(failure.what))}"


def _clock(at: float | None) -> str:
    if at is None:
        return "--:--:--"
    return f"{int(at // 3600 % 24):02}:{int(at // 60 % 60):02}:{at % 60:06.3f}"[:12]
