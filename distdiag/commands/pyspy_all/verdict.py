"""Who is odd in a job, and what cannot be said. Pure.

The odd one is not the rare stack: it is the rank that is not in communication while others are. Pipeline stages wait in
different functions and are all in communication. Where everybody waits in the same place, stacks cannot decide;
then loop counters may, and else nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.commands.pyspy_all.model import FrameClass, Standing
from distdiag.commands.pyspy_all.standing import BUSY, judge_all

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from distdiag.jobs.model import Job

_MINORITY = 1 / 3
"""Up to this share of the ranks, those in another collective are named; more may as well be the right ones."""

ALIVE = 0.03
"""Where nobody waits for anybody, so small a share of a core already shows that something goes on."""


class Outcome(StrEnum):
    """What the stacks of one job come to."""

    ODD = "odd-rank"
    OTHER_COLLECTIVE = "other-collective"
    LEAST_PROGRESS = "least-progress"
    ALL_WAITING = "all-waiting"
    NOT_HUNG = "not-hung"
    STANDSTILL = "standstill"
    UNREADABLE = "unreadable"
    ALONE = "alone"


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """One job, judged. `odd` are the members to look at, `waiting` those who wait for them."""

    job: Job
    standings: tuple[Standing, ...]
    outcome: Outcome
    odd: tuple[Standing, ...] = ()
    waiting: tuple[Standing, ...] = ()
    unreadable: tuple[Standing, ...] = ()


def judge_job(job: Job) -> JobVerdict:
    """Judge one job."""
    standings = judge_all(job.members)
    unreadable = tuple(one for one in standings if one.kind is FrameClass.UNREADABLE)
    outcome, odd, waiting = _decide(
        job, [one for one in standings if one.kind is not FrameClass.UNREADABLE], unreadable
    )
    return JobVerdict(
        job=job,
        standings=standings,
        outcome=outcome,
        odd=tuple(odd),
        waiting=tuple(waiting),
        unreadable=unreadable,
    )


def _decide(
    job: Job, known: list[Standing], unreadable: Sequence[Standing]
) -> tuple[Outcome, list[Standing], list[Standing]]:
    still = [one for one in known if one.kind in (FrameClass.EXITED, FrameClass.STOPPED)]
    live = without(known, still)
    waiting = [one for one in live if one.kind is FrameClass.COMM]
    if not waiting:
        waiting = [one for one in live if one.kind is FrameClass.CUDA_SYNC]
    outside = _outside(live, waiting)
    if not known:
        return Outcome.UNREADABLE, [], []
    if any(one.moving for one in waiting) and not still:
        return Outcome.NOT_HUNG, [], waiting
    if still:
        return Outcome.ODD, [*still, *([] if len(outside) > len(waiting) else outside)], waiting
    if waiting and outside:
        if len(outside) * 2 >= len(live) and all(goes_on(one) for one in outside):
            return Outcome.NOT_HUNG, [], waiting
        # Whoever moves is not what a standstill comes from, as long as somebody else stands.
        return Outcome.ODD, [one for one in outside if not one.moving] or outside, waiting
    if not waiting:
        return _nobody_waits(job, live)
    if unreadable or job.unseen:
        return Outcome.UNREADABLE, [], waiting
    return _all_wait(waiting)


def _outside(live: Sequence[Standing], waiting: Sequence[Standing]) -> list[Standing]:
    """List who is not in communication. Some that wait for their GPU may wait for a collective on it: no outliers."""
    outside = [one for one in live if one.kind not in (FrameClass.COMM, FrameClass.CUDA_SYNC)]
    on_gpu = (
        [one for one in live if one.kind is FrameClass.CUDA_SYNC]
        if waiting and waiting[0].kind is FrameClass.COMM
        else []
    )
    if not outside and on_gpu and len(on_gpu) <= _MINORITY * len(live):
        return on_gpu
    return outside


def _nobody_waits(job: Job, live: Sequence[Standing]) -> tuple[Outcome, list[Standing], list[Standing]]:
    """Nobody is in communication: it goes on; or all stand still, each in its own way."""
    if len(live) == 1 and job.world_size in (None, 1):
        one = live[0]
        return (Outcome.ALONE if not goes_on(one) else Outcome.NOT_HUNG), [], [one]
    if any(goes_on(one) or (one.busy or 0.0) >= ALIVE for one in live):
        return Outcome.NOT_HUNG, [], list(live)
    return Outcome.STANDSTILL, [], list(live)


def _all_wait(waiting: list[Standing]) -> tuple[Outcome, list[Standing], list[Standing]]:
    if any(one.site.is_p2p for one in waiting):
        return Outcome.ALL_WAITING, [], waiting  # a pipeline: its stages stand at different places rightly
    if len({place(one) for one in waiting}) > 1:
        odd = _minority(waiting)
        rest = without(waiting, odd)
        return (Outcome.OTHER_COLLECTIVE if odd else Outcome.ALL_WAITING), odd, rest if odd else waiting
    behind = _least_advanced(waiting)
    if behind:
        return Outcome.LEAST_PROGRESS, behind, without(waiting, behind)
    return Outcome.ALL_WAITING, [], waiting


def place(one: Standing) -> Hashable:
    """Say where somebody stands, so that equal places are equal: the operation, and the user's own line."""
    frame = one.site.frame or (one.frames[0] if one.frames else None)
    return one.kind, one.site.operation, frame


def _minority(members: Sequence[Standing]) -> list[Standing]:
    """Find the few that stand elsewhere than all the others, who stand together; none if there is no such majority."""
    groups: dict[Hashable, list[Standing]] = {}
    for one in members:
        groups.setdefault(place(one), []).append(one)
    largest = max(groups.values(), key=len)
    rest = without(members, largest)
    return rest if len(rest) <= _MINORITY * len(members) and len(groups) == 2 else []


def _least_advanced(members: Sequence[Standing]) -> list[Standing]:
    """Find those whose loop counters are behind; counters that not all have do not count."""
    names = set.intersection(*(set(dict(one.counters)) for one in members))
    ordered = [name for name, _ in members[0].counters if name in names]
    progress = {id(one): tuple(dict(one.counters)[name] for name in ordered) for one in members}
    least = min(progress.values())
    behind = [one for one in members if progress[id(one)] == least]
    return behind if len(behind) < len(members) else []


def without(members: Iterable[Standing], others: Iterable[Standing]) -> list[Standing]:
    """Leave some members out; by identity, for comparing tens of thousands with each other takes minutes."""
    left_out = {id(one) for one in others}
    return [one for one in members if id(one) not in left_out]


def goes_on(one: Standing) -> bool:
    """Tell whether somebody computes, or moved between the looks."""
    return bool(one.moving) or (one.busy is not None and one.busy >= BUSY)


def split(members: Iterable[Standing]) -> list[list[Standing]]:
    """Put together who stands at the same place, the smallest group first."""
    groups: dict[Hashable, list[Standing]] = {}
    for one in members:
        groups.setdefault((place(one), one.status), []).append(one)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].rank is None, group[0].rank or 0))
