"""Texts shared by findings: ranks with hosts, and their stage. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.diagnosis.wording import format_ranks
from distdiag.report import Fix, Where

if TYPE_CHECKING:
    from distdiag.cluster.rank_runs import RankTimeline
    from distdiag.knowledge.known_lines import KnownLine


def who(traces: list[RankTimeline]) -> str:
    """Format ranks with their hosts; a single rank with its pid."""
    pid = traces[0].pid if len(traces) == 1 else None
    return format_ranks([trace.rank for trace in traces], sorted({trace.host for trace in traces}), pid)


def where(traces: list[RankTimeline]) -> Where:
    """Return hosts, ranks and pids of ranks."""
    return Where(
        hosts=tuple(sorted({trace.host for trace in traces})),
        ranks=tuple(trace.rank for trace in traces),
        pids=tuple(trace.pid for trace in traces if trace.pid is not None),
    )


def place(trace: RankTimeline, *, before_end: bool = False) -> tuple[str, str]:
    """Return stage and step of a rank's last event, optionally of the last before its error."""
    events = [event for event in trace.events if not (before_end and "trouble" in event.payload)]
    return (events[-1].stage, events[-1].note) if events else ("start", "starting Python")


def fix_from(known: KnownLine | None, otherwise: Fix) -> Fix:
    """Return the fix of a known failure, else the other fix."""
    return Fix(text=known.fix, commands=known.commands) if known is not None else otherwise
