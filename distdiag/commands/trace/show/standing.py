"""Where each rank is, from its last lines, and who is odd. Pure.

As with stacks, the odd one is not the rare line: it is the rank that is not in communication while the others are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.commands.trace.show.result import Stand
from distdiag.knowledge.calls import call_in
from distdiag.knowledge.frames import kind_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from distdiag.commands.trace.show.collect import Line
    from distdiag.commands.trace.show.result import Member, Run

COMM = "communication wait"
FRESH_S = 2.0
"""A process whose last line is younger goes on."""
_MINORITY = 1 / 3


class Outcome(StrEnum):
    """What the last lines of a run come to."""

    ENDED = "ended"
    GOES_ON = "goes-on"
    ODD = "odd-rank"
    GONE = "exited"
    LEFT_FIRST = "left-first"
    ELSEWHERE = "elsewhere"
    SAME = "same-place"
    APART = "undecided"
    ALONE = "alone"
    NOTHING = "no-lines"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A run, judged: `odd` are those to look at, `waiting` those that wait for them, or all others."""

    run: Run
    outcome: Outcome
    stands: tuple[Stand, ...]
    odd: tuple[Stand, ...] = ()
    waiting: tuple[Stand, ...] = ()


def judge(run: Run) -> Judged:
    """Say who is odd in a run, if the lines tell it."""
    stands = tuple(stand_of(member) for member in run.members)
    outcome, odd, waiting = _decide(stands)
    return Judged(run=run, outcome=outcome, stands=stands, odd=tuple(odd), waiting=tuple(waiting))


def stand_of(member: Member) -> Stand:
    """Say where a process's main thread is."""
    raised_at = member.process.error_at
    if raised_at is not None:
        kind, operation = call_in(raised_at.source)
        return Stand(
            member=member, kind=kind, operation=operation, user=raised_at, library=None, source=raised_at.source
        )
    thread = next((one for one in member.process.threads if one.main), None)
    if thread is None or not thread.last:
        return Stand(member=member, kind="", operation="", user=None, library=None, source="")
    last = thread.last[-1]
    library = last if last.kind != "user" else None
    user = last if library is None else thread.user
    kind, operation = call_in(user.source) if user is not None else ("", "")
    if library is not None:
        inner = next(
            (found for found in (kind_of(line.function, line.file) for line in _run_of(thread.last)) if found[0]), None
        )
        if inner is not None and not inner[1]:
            kind, operation = inner[0], operation if operation and kind == inner[0] else library.function
    return Stand(
        member=member,
        kind=kind,
        operation=operation,
        user=user,
        library=library,
        source=user.source if user is not None else "",
    )


def _run_of(lines: Sequence[Line]) -> Iterable[Line]:
    """Give the library lines since the user's last one, the newest first."""
    for line in reversed(lines):
        if line.kind == "user":
            return
        yield line


def _decide(stands: Sequence[Stand]) -> tuple[Outcome, list[Stand], list[Stand]]:
    known = [one for one in stands if one.user is not None or one.library is not None]
    if not known:
        return Outcome.NOTHING, [], []
    by_state = {state: [one for one in known if one.member.process.state == state] for state in _STATES}
    running, gone = by_state["running"], [one for one in known if one.member.process.state != "running"]
    if len(by_state["ended"]) == len(known):
        return Outcome.ENDED, [], []
    if running and gone:
        return Outcome.GONE, _first_to_leave(by_state) or gone, running
    if running and all(goes_on(one) for one in running):
        return Outcome.GOES_ON, [], list(running)
    if len(known) == 1:
        return Outcome.ALONE, [], known
    first = _first_to_leave(by_state)
    if first and len(by_state["died"]) < len(known):
        return Outcome.LEFT_FIRST, first, without(known, first)
    return _compare(known)


_STATES = ("running", "ended", "raised", "died")


def _first_to_leave(by_state: dict[str, list[Stand]]) -> list[Stand]:
    """Find whose end the others' followed: an exception in a collective mostly tells that another rank has gone."""
    causes = [one for one in by_state["raised"] if one.kind != COMM]
    consequences = [one for one in by_state["raised"] if one.kind == COMM]
    if causes:
        return [min(causes, key=ended_at)]
    if by_state["died"] and (consequences or not by_state["ended"]):
        return by_state["died"]
    if by_state["ended"]:
        return [min(by_state["ended"], key=ended_at)]
    return []


def ended_at(one: Stand) -> float:
    """When a process came to its end, in seconds since 1970; infinite where nobody knows."""
    at_s = one.member.process.ended_s
    return float("inf") if at_s is None else at_s


def without(stands: Iterable[Stand], others: Iterable[Stand]) -> list[Stand]:
    """Leave some out."""
    left_out = {id(one) for one in others}
    return [one for one in stands if id(one) not in left_out]


def _compare(left: list[Stand]) -> tuple[Outcome, list[Stand], list[Stand]]:
    waiting = [one for one in left if one.kind == COMM]
    others = [one for one in left if one.kind != COMM]
    if waiting and others:
        if len(others) > len(waiting) and all(goes_on(one) for one in others):
            return Outcome.GOES_ON, [], left
        return Outcome.ODD, [one for one in others if not goes_on(one)] or others, waiting
    groups = split(left)
    if len(groups) == 1:
        return Outcome.SAME, [], left
    if len(groups) == 2 and len(groups[0]) <= _MINORITY * len(left):
        return Outcome.ELSEWHERE, groups[0], groups[1]
    return Outcome.APART, [], left


def goes_on(one: Stand) -> bool:
    """Tell whether it executed a line just now."""
    process = one.member.process
    return process.state == "running" and process.age_s is not None and process.age_s < FRESH_S


def place(one: Stand) -> Hashable:
    """Say where somebody is, so that equal places are equal."""
    line = one.user or one.library
    return (one.kind, one.operation, line.file, line.line) if line is not None else None


def split(stands: Iterable[Stand]) -> list[list[Stand]]:
    """Put together who is at the same place, the smallest group first."""
    groups: dict[Hashable, list[Stand]] = {}
    for one in stands:
        groups.setdefault((place(one), one.member.process.state), []).append(one)
    return sorted(groups.values(), key=lambda own: (len(own), own[0].member.rank is None, own[0].member.rank or 0))
