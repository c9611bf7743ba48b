"""Which ranks of a job are stuck or slow, and when the stacks cannot decide. Pure.

An outlier is not the rare stack: it is the rank outside of communication while others wait in it, for other ranks or
for their GPUs. Pipeline stages wait in different functions and are all in communication. Ranks that wait for their GPUs
at different lines are no outliers either: kernels are launched ahead, and each rank stops at the line whose result it
needs first. Where all ranks wait in one Gloo collective, loop counters may decide, or the peers of their `send` and
`recv`. A rank in a different collective is named only if there is a single process group: with several (tensor and data
parallel) it may wait in one of them for a rank that went on to another. Everything else is undecided.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from distdiag.diagnosis.data_workers import ran_lately, stuck_worker
from distdiag.diagnosis.motion import Motion
from distdiag.diagnosis.slow_ranks import find_slow
from distdiag.diagnosis.stack_classes import RankState, StackClass, rank_states
from distdiag.jobs.roles import in_rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.slow_ranks import SlowRanks
    from distdiag.jobs.types import Job

Rank = TypeVar("Rank")
"""A rank as some evidence shows it: its stacks (RankState), or its last lines (trace show)."""

_MINORITY = 1 / 3
"""Ranks in a different collective are named up to this share of the job; a larger group may be the correct side."""

LONG_S = 5.0
"""Ranks that have waited for so long wait for something that does not happen in a usual step."""
PATIENT_S = 300.0
"""The same where the rank that they wait for sleeps and looks again: nothing here shows whether the file or the batch
that it looks for will appear."""


class Outcome(StrEnum):
    """What the stacks of one job show."""

    OUTLIERS = "outliers"
    OTHER_COLLECTIVE = "other-collective"
    LEAST_PROGRESS = "least-progress"
    CYCLE = "cycle"
    LEFT = "left"
    ALL_WAITING = "all-waiting"
    NOT_HUNG = "not-hung"
    STANDSTILL = "standstill"
    UNREADABLE = "unreadable"
    ALONE = "alone"
    RENDEZVOUS = "rendezvous"
    """All ranks wait in init_process_group, and their environments name different places to meet."""


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """One job, judged. `outliers` are the stuck or slow ranks, `waiting` those that wait for them.

    `only_slow`: the outliers work, or the others have not been seen to wait for long. `stepping`: of a job that is not
    hung, the ranks whose progress was seen.
    """

    job: Job
    states: tuple[RankState, ...]
    outcome: Outcome
    outliers: tuple[RankState, ...] = ()
    waiting: tuple[RankState, ...] = ()
    unreadable: tuple[RankState, ...] = ()
    only_slow: bool = False
    stepping: tuple[RankState, ...] = ()
    slow: SlowRanks | None = None
    """Of a job that is not hung: the ranks that hold up the others, if there are enough samples to see them."""


def judge_job(job: Job, awaits: Mapping[Key, Key] | None = None) -> JobVerdict:
    """Judge one job. `awaits`: which process each one waits for according to /proc, both by host and pid."""
    states = rank_states(job.members)
    unreadable = _of(states, StackClass.UNREADABLE)
    known = without(states, unreadable)
    outcome, outliers, waiting = _decide(job, known, unreadable, awaits or {})
    slow = find_slow(known) if outcome is Outcome.NOT_HUNG else None
    return JobVerdict(
        job=job,
        states=states,
        outcome=outcome,
        outliers=slow.slow if slow is not None else tuple(outliers),
        waiting=tuple(waiting),
        unreadable=tuple(unreadable),
        only_slow=slow is not None or _may_only_be_slow(outcome, outliers, waiting),
        stepping=tuple(state for state in known if state.thread.moving) if outcome is Outcome.NOT_HUNG else (),
        slow=slow,
    )


def _of(states: Iterable[RankState], *kinds: StackClass) -> list[RankState]:
    return [state for state in states if state.thread.kind in kinds]


def _decide(
    job: Job, known: list[RankState], unreadable: Sequence[RankState], awaits: Mapping[Key, Key]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Return the outcome of the readable ranks, the outliers among them, and the waiting ranks."""
    still = _of(known, StackClass.EXITED, StackClass.STOPPED)
    live = without(known, still)
    waiting = _of(live, StackClass.COMM, StackClass.GPU)
    outside = without(live, waiting)
    if not known:
        return Outcome.UNREADABLE, [], []
    if len(job.rendezvous) > 1 and not job.unseen and all(in_rendezvous(state.member) for state in known):
        return Outcome.RENDEZVOUS, [], known
    stepping = [state for state in waiting if state.thread.moving]
    if not still and stepping:
        return _some_step(stepping, without(waiting, stepping), outside)
    if live and not waiting and still and len(_of(still, StackClass.EXITED)) == len(still):
        return Outcome.LEFT, [], live
    if still:
        return Outcome.OUTLIERS, [*still, *([] if len(outside) > len(waiting) else outside)], waiting
    if waiting and outside:
        return _some_are_outside(waiting, outside, awaits)
    if not waiting:
        return _none_waits(job, live)
    if unreadable or job.unseen:
        return Outcome.UNREADABLE, [], waiting
    return _all_wait(waiting)


def _some_step(
    stepping: list[RankState], unmoved: list[RankState], outside: list[RankState]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Judge a job of which ranks go from one wait to the next: it runs, unless most ranks have long waited for these.

    One rank that evaluates on its GPU waits for it again and again, while the others wait for that rank.
    """
    if len(stepping) >= len(unmoved) or waited_s(unmoved) <= LONG_S:
        return Outcome.NOT_HUNG, [], [*stepping, *unmoved]
    return Outcome.OUTLIERS, [*stepping, *outside], unmoved


def _some_are_outside(
    waiting: list[RankState], outside: list[RankState], awaits: Mapping[Key, Key]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Name the ranks that hold up the others: of those outside, the ones that wait for no other rank outside.

    A rank that makes progress is not the cause while another makes none; nor is one that waits for such a rank.
    """
    # Waiting ranks that woke up since the first sample may have made a step that their frames do not show.
    is_brief = waited_s(waiting) <= LONG_S and waited_s(waiting) < _watched_s(waiting)
    if (is_brief or len(outside) >= len(waiting)) and all(map(works, outside)):
        is_moving = any(state.thread.moving for state in outside)
        return (Outcome.NOT_HUNG if is_moving else Outcome.STANDSTILL), [], [*waiting, *outside]
    unmoved = stuck_of(outside, lambda state: bool(state.thread.moving))
    keys = {_key(state) for state in [*outside, *waiting]}
    first = [state for state in unmoved if awaits.get(_key(state)) not in keys]
    return Outcome.OUTLIERS, first or unmoved, waiting


def _key(state: RankState) -> Key:
    return state.member.host, state.member.pid or 0


def _none_waits(job: Job, live: Sequence[RankState]) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Judge a job where no rank is in communication: it makes progress, or nothing proves that it does."""
    moving = [state for state in live if state.thread.moving]
    # Frames show no wait for a rank, yet a rank that sleeps for long beside a moving one most likely waits for it.
    if moving and not any(_sleeps_long(state) for state in live):
        return Outcome.NOT_HUNG, [], list(live)
    return (Outcome.ALONE if len(live) == 1 and job.world_size in (None, 1) else Outcome.STANDSTILL), [], list(live)


def _sleeps_long(state: RankState) -> bool:
    return state.thread.motion is Motion.STILL and state.thread.still_s > LONG_S


def _all_wait(waiting: list[RankState]) -> tuple[Outcome, list[RankState], list[RankState]]:
    if _of(waiting, StackClass.GPU):
        return Outcome.ALL_WAITING, [], waiting
    if any(state.thread.location.is_p2p for state in waiting):
        cycle = _cycle(waiting)
        if cycle:
            return Outcome.CYCLE, cycle, without(waiting, cycle)
        if unmatched := _unmatched(waiting):
            return Outcome.OTHER_COLLECTIVE, unmatched, without(waiting, unmatched)
        return Outcome.ALL_WAITING, [], waiting  # a pipeline: its stages wait at different places by design
    if len({place(state) for state in waiting}) > 1:
        outliers = _in_another_collective(waiting)
        rest = without(waiting, outliers)
        return (Outcome.OTHER_COLLECTIVE if outliers else Outcome.ALL_WAITING), outliers, rest if outliers else waiting
    behind = _least_advanced(waiting)
    if behind:
        return Outcome.LEAST_PROGRESS, behind, without(waiting, behind)
    return Outcome.ALL_WAITING, [], waiting


def stuck_of(outside: Sequence[Rank], goes_on: Callable[[Rank], bool]) -> list[Rank]:
    """Return the ranks outside of communication that do not go on, or all of them if all do."""
    return [rank for rank in outside if not goes_on(rank)] or list(outside)


def minority_of(groups: Sequence[Sequence[Rank]]) -> list[Rank]:
    """Return the smaller of two groups of ranks, if it is small enough to be named; else nothing."""
    if len(groups) != 2:
        return []
    fewer, more = sorted(groups, key=len)
    return list(fewer) if len(fewer) <= _MINORITY * (len(fewer) + len(more)) else []


def place(state: RankState) -> Hashable:
    """Return where a rank is, so that equal places are equal: the operation, and the user's own line."""
    frame = state.thread.location.frame or (state.thread.frames[0] if state.thread.frames else None)
    return state.thread.kind, state.thread.location.operation, frame


def _in_another_collective(members: Sequence[RankState]) -> list[RankState]:
    """Find the few ranks in a different operation than all the others; none if there is no majority.

    The same operation, called from another line, may be the same collective: `broadcast` of the root and of the rest.
    """
    if any(state.thread.groups != 1 for state in members):
        return []
    groups: dict[str, list[RankState]] = {}
    for state in members:
        groups.setdefault(state.thread.location.operation, []).append(state)
    return minority_of(list(groups.values()))


def _unmatched(members: Sequence[RankState]) -> list[RankState]:
    """Find the few ranks in a `send` or `recv` whose peer waits in a collective of the one group, for them as well."""
    ranks = {state.member.rank: state for state in members}
    peers = {id(state): ranks.get(state.thread.peer) for state in members if state.thread.location.is_p2p}
    found = [
        state for state in members if (peer := peers.get(id(state))) is not None and not peer.thread.location.is_p2p
    ]
    is_one_group = all(state.thread.groups == 1 for state in members)
    return found if is_one_group and len(found) <= _MINORITY * len(members) else []


def _cycle(members: Sequence[RankState]) -> list[RankState]:
    """Find a cycle of ranks, each in a `send` or `recv` that names the next; empty if there is none.

    A rank that sends to a rank that receives from it is no cycle: that message is on its way, or lost.
    """
    ranks = {state.member.rank: state for state in members if state.member.rank is not None}
    done: set[int] = set()
    for start in ranks:
        path: list[int] = []
        at: int | None = start
        while at is not None and at in ranks and at not in done:
            done.add(at)
            path.append(at)
            at = ranks[at].thread.peer if ranks[at].thread.location.is_p2p else None
        if at in path:
            cycle = [ranks[rank] for rank in path[path.index(at) :]]
            directions = {"recv" in state.thread.location.operation for state in cycle}
            return [] if len(cycle) == 2 and len(directions) == 2 else cycle
    return []


def _least_advanced(members: Sequence[RankState]) -> list[RankState]:
    """Find the ranks whose loop counters are behind; only counters that all ranks have are compared.

    None where the counter of an outer loop is not known of all: an inner one begins again in each round.
    """
    names = set.intersection(*(set(dict(state.thread.counters)) for state in members))
    if any(state.thread.counters and state.thread.counters[0][0] not in names for state in members):
        return []
    ordered = [name for name, _ in members[0].thread.counters if name in names]
    progress = {id(state): tuple(dict(state.thread.counters)[name] for name in ordered) for state in members}
    least = min(progress.values())
    behind = [state for state in members if progress[id(state)] == least]
    return behind if len(behind) < len(members) else []


def without(members: Iterable[RankState], others: Iterable[RankState]) -> list[RankState]:
    """Return the members without these others; by identity, because comparing tens of thousands takes minutes."""
    left_out = {id(state) for state in others}
    return [state for state in members if id(state) not in left_out]


def works(state: RankState) -> bool:
    """Return whether a rank makes progress, computes, or waits for children, threads or files of its own that move."""
    return state.thread.motion in (Motion.MOVES, Motion.COMPUTES, Motion.WORKS)


def waited_s(waiting: Iterable[RankState]) -> float:
    """Return for how long the longest of the waiting ranks is known to have waited, at least."""
    return max((state.thread.still_s for state in waiting if not state.thread.moving), default=0.0)


def _may_only_be_slow(outcome: Outcome, outliers: Sequence[RankState], waiting: Sequence[RankState]) -> bool:
    """Return whether the outliers work, or the others have not been seen to wait for long."""
    if outcome not in (Outcome.OUTLIERS, Outcome.OTHER_COLLECTIVE, Outcome.LEAST_PROGRESS):
        return False
    if any(state.thread.kind in (StackClass.STOPPED, StackClass.EXITED) for state in outliers):
        return False
    if not any(state.standstill or state.thread.moving is not None for state in [*waiting, *outliers]):
        return all(state.thread.kind in (StackClass.COMPILE, StackClass.COMPUTE) for state in outliers)  # a pasted dump
    if not waiting or outcome is not Outcome.OUTLIERS:
        return 0.0 < waited_s([*waiting, *outliers]) <= LONG_S
    if all(map(works, outliers)):
        return True
    stuck = [state for state in outliers if not works(state)]
    needed_s = PATIENT_S if all(map(_looks_again, stuck)) else LONG_S
    return waited_s(waiting) <= needed_s or waited_s(stuck) <= LONG_S


def _looks_again(state: RankState) -> bool:
    """Return whether a rank, or the DataLoader worker that it waits for, sleeps and wakes up."""
    if state.member.watched is not None and state.member.watched.build_locks:
        return False  # the process that would remove that lock is gone
    worker = stuck_worker(state)
    return state.thread.motion is Motion.POLLS or (worker is not None and ran_lately(state))


def _watched_s(states: Iterable[RankState]) -> float:
    """Return for how long ranks were sampled; the longest."""
    seen = [state.member.watched.samples for state in states if state.member.watched is not None]
    return max((samples[-1].at_s - samples[0].at_s for samples in seen if samples), default=0.0)


def mark(verdict: JobVerdict, outlier: RankState) -> str:
    """Return the kind of an outlier: "gone", "straggler" if it may only be slower, else "stuck"."""
    if outlier.thread.kind is StackClass.EXITED:
        return "gone"
    return "straggler" if verdict.only_slow else "stuck"


def split(members: Iterable[RankState]) -> list[list[RankState]]:
    """Group ranks that are at the same place, the smallest group first."""
    groups: dict[Hashable, list[RankState]] = {}
    for state in members:
        groups.setdefault((place(state), state.thread.status), []).append(state)
    return sorted(
        groups.values(), key=lambda group: (len(group), group[0].member.rank is None, group[0].member.rank or 0)
    )
