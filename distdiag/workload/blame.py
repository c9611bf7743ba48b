"""Which ranks are at fault, and which only suffer from it. Pure.

A rank that waits, or complains that a peer went away, is a witness. At fault are: who died, who saw something wrong of
its own, and, when all stands still, who is stopped or behind the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag import knowledge
from distdiag.cluster.launch import Outcome
from distdiag.node import machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.launch import Trace


_BUSY = 0.2
"""Of the time: a process that sleeps, with torch's own threads in it, needs under 0.01."""
_READS_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Trouble:
    """What a rank reported as wrong: one of rank.py's kinds, with its details."""

    rank: int
    kind: str
    message: str
    details: Mapping[str, object]


@dataclass(frozen=True)
class Blame:
    """Ranks by their part in it; `troubles` are those that are no consequence of another rank's."""

    died: tuple[int, ...]
    lost: tuple[int, ...]
    """Their node went away."""
    missing: tuple[int, ...]
    troubles: tuple[Trouble, ...]
    standstill: bool
    """Nothing moves, and nobody is to blame."""
    only_consequences: bool = False
    """Who died or found something wrong has only lost somebody else."""


def blame(outcome: Outcome, traces: list[Trace], stages: Sequence[str]) -> Blame:
    """Tell causes from consequences."""
    troubles = [trouble for trace in traces for trouble in _troubles(trace)]
    died = [trace for trace in traces if trace.died]
    # When all stood still, or were interrupted at it; the positions tell enough where nobody could be looked at.
    looked_at = outcome is Outcome.STALLED or any(trace.inspection for trace in traces)
    lost = tuple(trace.rank for trace in traces if trace.lost)
    missing = _missing(traces, stages) if looked_at and not died and not lost else ()
    roots = [trouble for trouble in troubles if not _sounds_like_consequence(trouble.message)]
    real_deaths = [trace for trace in died if not _sounds_like_consequence(trace.ending.tail if trace.ending else "")]
    only_consequences = not (real_deaths or roots or missing or lost)
    if not only_consequences:
        died, troubles = real_deaths, roots
    if 0 in (*(trace.rank for trace in died), *missing, *lost):
        # Without rank 0 nobody answers at the address as ours does.
        troubles = [trouble for trouble in troubles if trouble.kind != "port-foreign"]
    return Blame(
        tuple(trace.rank for trace in died),
        lost,
        missing,
        tuple(troubles),
        outcome is Outcome.STALLED and not (missing or died or troubles or lost),
        only_consequences,
    )


def is_at_work(trace: Trace) -> bool:
    """Whether a silent rank computes, waits for a core or reads files: it may be slow, or in a loop that never ends.

    A GPU rank that waits for others may spin, and what a waiting rank reads are messages.
    """
    seen = trace.inspection
    if seen is None or seen.state in machine.STOPPED:
        return False
    if trace.is_waiting:
        return _on_cpu(trace) and seen.busy > _BUSY
    return seen.state == "R" or seen.busy > _BUSY or seen.read_bytes > _READS_BYTES


def _on_cpu(trace: Trace) -> bool:
    return all(event.payload["started"].get("device") == "cpu" for event in trace.events if "started" in event.payload)


def position(trace: Trace, stages: Sequence[str]) -> tuple[int, int]:
    """How far a rank came: stage and step; beyond all stages once it finished."""
    if trace.finished:
        return len(stages), 0
    return (stages.index(trace.last.stage), trace.last.at) if trace.last is not None else (-1, 0)


def _missing(traces: list[Trace], stages: Sequence[str]) -> tuple[int, ...]:
    live = [trace for trace in traces if trace.ending is None]
    states = {trace.rank: trace.inspection.state if trace.inspection else "" for trace in live}
    stopped = tuple(rank for rank, state in states.items() if state in machine.STOPPED)
    if stopped:
        return stopped
    if any(trace.gave_up or trace.has("held") for trace in traces):
        return ()
    positions = {trace.rank: position(trace, stages) for trace in traces}
    last = min(positions.values())
    if last < max(positions.values()):
        return tuple(rank for rank, place in positions.items() if place == last)
    if not all(trace.is_waiting for trace in traces):
        return ()  # each works for itself, and sleeps in the kernel as its work needs it
    in_kernel = tuple(rank for rank, state in states.items() if state == "D")
    return in_kernel if len(in_kernel) < len(live) else ()


def _troubles(trace: Trace) -> list[Trouble]:
    found = [event.payload["trouble"] for event in trace.events if "trouble" in event.payload]
    return [Trouble(trace.rank, str(one["kind"]), str(one.get("message", "")), one) for one in found]


def _sounds_like_consequence(words: str) -> bool:
    known = knowledge.recognise(words)
    return known is not None and known.role == "consequence"
