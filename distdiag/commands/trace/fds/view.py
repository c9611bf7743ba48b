"""trace fds as text: a table for each process, equal descriptors folded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold_ranks
from distdiag.output import Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.trace.fds.diagnose import DescriptorRow, ProcessRow, TraceFds

_NUMBERED = ("pipe", "socket", "anon")
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_FDS = 24
"""Characters of a list of numbers."""


def trace_fds_view(data: TraceFds) -> Iterator[RenderableType]:
    """Render a table for each process: the number of each kind, then each descriptor, equal rows folded."""
    several = len({row.job for row in data.processes}) > 1
    for number, row in enumerate(data.processes):
        if number:
            yield ""
        of = f"job {row.job}, " if several and row.job else ""
        yield Wrapped(f"{of}{_title(row)}", margin=0)
        if not row.descriptors:
            continue
        yield Wrapped(", ".join(_counted(count, kind) for kind, count in row.counts.items()), margin=2)
        yield _table(row)


def _counted(count: int, kind: str) -> str:
    plural = "s" if count > 1 and kind not in ("anon", "shm") else ""
    return f"{count} {kind}{plural}"


def _title(row: ProcessRow) -> str:
    who = f"{'helper of ' if row.role == 'helper' else ''}rank {row.rank}, " if row.rank is not None else ""
    limit = f" of {row.limit}" if row.limit else ""
    count = f"{len(row.descriptors)}{limit} descriptors" if not row.unread else "not read"
    return f"{who}pid {row.pid} on {row.host} ({row.command}): {count}"


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
        table.add_row(_fds(group), first.mode or "-", first.kind, times + _shown_target(group), first.who or "-")
    return table


def _folded(rows: Sequence[DescriptorRow]) -> list[list[DescriptorRow]]:
    """Group equal descriptors: all own pipes, all eventfds, all connections to the same process."""
    groups: dict[tuple[object, ...], list[DescriptorRow]] = {}
    for row in rows:
        # Addresses add nothing once the other end is known, or for many connections closed by the peer.
        target = row.target.partition(" ")[0] if row.kind == "socket" and (row.who or row.is_closed) else _plain(row)
        # Both ends of a connection of a process with itself are shown.
        ends = row.fd if row.kind == "socket" and row.who == "itself" else None
        key = (row.kind, row.mode, target, row.who, row.socket and row.socket.state, row.deleted, ends)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _plain(row: DescriptorRow) -> str:
    if row.kind == "shm":  # each tensor that workers share has one
        return re.sub(r"\d[\d_]*", "*", row.target)
    return re.sub(r":\[\d+\]$", "", row.target) if row.kind in _NUMBERED else row.target


def _shown_target(group: Sequence[DescriptorRow]) -> str:
    row, count = group[0], len(group)
    target = _plain(row) if count > 1 or row.kind == "pipe" else row.target
    facts = [row.socket.state] if row.socket is not None and row.socket.state else []
    sizes = {descriptor.target: descriptor.size_bytes for descriptor in group if descriptor.size_bytes is not None}
    facts += [_size(sum(sizes.values())) + (" in total" if len(sizes) > 1 else "")] if sizes else []
    facts += ["deleted"] if row.deleted else []
    facts += ["its file system does not answer"] if row.silent else []
    more = ", ..." if count > 1 and row.kind == "socket" and (row.who or row.is_closed) else ""
    return f"{target}{more}" + (f" ({', '.join(facts)})" if facts else "")


def _fds(group: Sequence[DescriptorRow]) -> str:
    text = fold_ranks(row.fd for row in group)
    return text if len(text) <= _FDS else text[: text.rfind(",", 0, _FDS - 4)] + ",..."


def _size(size: int) -> str:
    unit = next(((factor, name) for factor, name in _UNITS if size >= factor), None)
    return f"{size / unit[0]:.1f} {unit[1]}" if unit else f"{size} B"
