"""The report of trace fds as text: how many of each kind first, then each descriptor, equal ones folded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold_ranks
from distdiag.deliver import Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.trace.fds.result import DescriptorRow, ProcessRow, TraceFds

_NUMBERED = ("pipe", "socket", "anon")
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_FDS = 24
"""Letters of a list of numbers."""


def trace_fds_view(data: TraceFds) -> Iterator[RenderableType]:
    """Give a table for each process."""
    for number, row in enumerate(data.processes):
        if number:
            yield ""
        yield Wrapped(_title(row), margin=0)
        if not row.descriptors:
            continue
        yield Wrapped(", ".join(f"{count} {kind}" for kind, count in row.counts.items()), margin=2)
        yield _table(row)


def _title(row: ProcessRow) -> str:
    who = f"{'helper of ' if row.role == 'helper' else ''}rank {row.rank}, " if row.rank is not None else ""
    limit = f" of {row.limit}" if row.limit else ""
    told = f"{len(row.descriptors)}{limit} descriptors" if not row.unread else "not read"
    return f"{who}pid {row.pid} on {row.host} ({row.command}): {told}"


def _table(row: ProcessRow) -> RenderableType:
    table = plain_table(
        Column("fd", justify="right", overflow="fold"),
        Column("mode", no_wrap=True),
        Column("kind", no_wrap=True),
        Column("target", overflow="fold"),
        Column("other end", overflow="fold"),
    )
    for group in _folded(row.descriptors):
        first = group[0]
        times = f"{len(group)} x " if len(group) > 1 else ""
        table.add_row(_fds(group), first.mode or "-", first.kind, times + _target(group), first.who or "-")
    return table


def _folded(rows: Sequence[DescriptorRow]) -> list[list[DescriptorRow]]:
    """Put together what says the same: all pipes of its own, all eventfds, all connections to the same process."""
    groups: dict[tuple[object, ...], list[DescriptorRow]] = {}
    for row in rows:
        # A connection whose other end is known says no more by its addresses.
        target = row.target.partition(" ")[0] if row.kind == "socket" and row.who else _plain(row)
        groups.setdefault((row.kind, row.mode, target, row.who, row.state, row.deleted), []).append(row)
    return list(groups.values())


def _plain(row: DescriptorRow) -> str:
    if row.kind == "shm":  # each tensor that workers share has one
        return re.sub(r"\d[\d_]*", "*", row.target)
    return re.sub(r":\[\d+\]$", "", row.target) if row.kind in _NUMBERED else row.target


def _target(group: Sequence[DescriptorRow]) -> str:
    row, count = group[0], len(group)
    target = _plain(row) if count > 1 or row.kind == "pipe" else row.target
    facts = [row.state] if row.state else []
    sizes = {one.target: one.size_bytes for one in group if one.size_bytes is not None}
    facts += [_size(sum(sizes.values())) + (" together" if len(sizes) > 1 else "")] if sizes else []
    facts += ["deleted"] if row.deleted else []
    facts += ["its file system does not answer"] if row.silent else []
    more = ", ..." if count > 1 and row.kind == "socket" and row.who else ""
    return f"{target}{more}" + (f" ({', '.join(facts)})" if facts else "")


def _fds(group: Sequence[DescriptorRow]) -> str:
    text = fold_ranks(row.fd for row in group)
    return text if len(text) <= _FDS else text[: text.rfind(",", 0, _FDS - 4)] + ",..."


def _size(size: int) -> str:
    unit = next(((factor, name) for factor, name in _UNITS if size >= factor), None)
    return f"{size / unit[0]:.1f} {unit[1]}" if unit else f"{size} B"
