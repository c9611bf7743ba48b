"""Findings about ranks, and their wording: ranks with hosts, and their stage. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import format_ranks
from distdiag.report import Fix, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.knowledge.known_lines import KnownLine
    from distdiag.launch.rank_runs import RankTimeline
    from distdiag.launch.types import Request
    from distdiag.report import Finding, Level, Witnesses


def who(traces: Sequence[RankTimeline]) -> str:
    """Format ranks with their hosts; a single rank with its pid."""
    pid = traces[0].pid if len(traces) == 1 else None
    return format_ranks([trace.rank for trace in traces], sorted({trace.host for trace in traces}), pid)


def where(traces: Sequence[RankTimeline]) -> Where:
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


def found(
    verdict: str,
    request: Request,
    at: Sequence[RankTimeline] | Where = (),
    *,
    known: KnownLine | None = None,
    level: Level | None = None,
    witnesses: Witnesses | None = None,
    evidence: Sequence[str] = (),
    **words: object,
) -> Finding:
    """Return the finding of a verdict about ranks, or another place; a known line's fix takes precedence."""
    about = {"command": request.command, **words}
    if not isinstance(at, Where):
        about["who"] = who(at) if at else ""
        at = where(at)
    made = finding(verdict, about, level=level, where=at, witnesses=witnesses, evidence=tuple(evidence))
    return replace(made, fix=Fix(text=known.fix, commands=known.commands)) if known is not None else made
