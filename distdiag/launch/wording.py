"""Words that several findings share: who, where, how far, how much. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.report import Fix, Where

if TYPE_CHECKING:
    from distdiag.cluster.rank_runs import RankTimeline
    from distdiag.knowledge import Known


def who(traces: list[RankTimeline]) -> str:
    """Name ranks with host, and pid where it is one."""
    if len(traces) == 1:
        return f"rank {traces[0].rank} ({traces[0].host}, pid {traces[0].pid})"
    hosts = sorted({trace.host for trace in traces})
    return f"{name_ranks(trace.rank for trace in traces)} ({fold(hosts)})"


def where(traces: list[RankTimeline]) -> Where:
    """Give the same for programs."""
    return Where(
        hosts=tuple(sorted({trace.host for trace in traces})),
        ranks=tuple(trace.rank for trace in traces),
        pids=tuple(trace.pid for trace in traces if trace.pid is not None),
    )


def place(trace: RankTimeline, *, before_end: bool = False) -> tuple[str, str]:
    """Give stage and step of the last event, or of the last one before what the rank found wrong."""
    events = [event for event in trace.events if not (before_end and "trouble" in event.payload)]
    return (events[-1].stage, events[-1].note) if events else ("start", "starting Python")


def amount(size_bytes: int) -> str:
    """Write a number of bytes for people: 64 MiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.4g} {unit}"
    return f"{size_bytes} B"


def fix_from(known: Known | None, otherwise: Fix) -> Fix:
    """Give the fix of a known failure, or another one."""
    return Fix(text=known.fix, commands=known.commands) if known is not None else otherwise
