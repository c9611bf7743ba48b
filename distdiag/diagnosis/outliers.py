"""Stuck or slow ranks of a job, by their stacks. Pure.

An outlier is not the rank with the rare stack but the one outside of communication while others wait in it, for other
ranks or for their GPUs. Pipeline stages wait in different functions, yet all in communication. Ranks that wait for
their GPUs at different lines are no outliers: kernels are launched ahead, and each rank blocks at the line that needs
the first result. If all ranks wait in one Gloo collective, loop counters or the peers of `send` and `recv` may decide.
A rank in a different collective is blamed only in a job with a single process group: with several (tensor and data
parallel) it may wait in one for a rank that continued to another. All else is undecided.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from distdiag.diagnosis.data_workers import ran_lately, stuck_worker
from distdiag.diagnosis.gpu_place import is_located
from distdiag.diagnosis.motion import Motion
from distdiag.diagnosis.slow_ranks import find_slow
from distdiag.diagnosis.stack_classes import RankState, StackClass, rank_states
from distdiag.fold import by_key
from distdiag.jobs.roles import in_rendezvous
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.slow_ranks import SlowRanks
    from distdiag.jobs.types import Job

Rank = TypeVar("Rank")
"""A rank seen through its stacks (RankState) or its last lines (trace show)."""

_MINORITY = 1 / 3
"""Largest share of ranks to blame for a different collective; a larger group may be the correct side."""

_STARVED = 0.05
"""Share of a core below which samples of the processors may all miss a thread."""

LONG_S = 5.0
"""Seconds of waiting that no ordinary step explains."""
PATIENT_S = 300.0
"""The same if the awaited rank polls: whether its file or batch will appear is unknown."""


class Outcome(StrEnum):
    """The pattern in the stacks of one job."""

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
    """All ranks wait in init_process_group, with different addresses in their environments."""


@record(kw_only=True)
class JobVerdict:
    """The judgement on one job. `outliers` are the stuck or slow ranks, `waiting` the victims.

    `only_slow`: the outliers work, or the others have not waited for long. `stepping`: ranks with observed progress, if
    the job is not hung.
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
    """If the job is not hung: the ranks that slow it down, given enough samples."""


def judge_job(job: Job, awaits: Mapping[Key, Key] | None = None) -> JobVerdict:
    """Judge one job. `awaits`: the process each one waits for according to /proc, by (host, pid)."""
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


def in_init(state: RankState) -> bool:
    """Return whether a rank's stack is in init_process_group."""
    return any(
        frame.function == "init_process_group" and frame.file.endswith("distributed_c10d.py")
        for frame in state.thread.frames
    )


def _left_just_now(state: RankState) -> bool:
    """Return whether an exited rank still ran when the processes were listed."""
    return state.member.process is not None and state.member.process.state != "Z"


def _decide(
    job: Job, known: list[RankState], unreadable: Sequence[RankState], awaits: Mapping[Key, Key]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Return outcome, outliers and waiting ranks, from the readable ranks."""
    still = _of(known, StackClass.EXITED, StackClass.STOPPED)
    live = without(known, still)
    waiting = _of(live, StackClass.COMM, StackClass.GPU)
    outside = without(live, waiting)
    starved = list(filter(is_starved, outside))
    outside = without(outside, starved)
    # While others wait in init_process_group, a rank without a process may be about to start, like one on another host.
    is_start = bool(waiting) and all(map(in_init, waiting))
    absent = [state for state in still if state.member.is_absent] if is_start else []
    still = without(still, absent)
    if not known:
        return Outcome.UNREADABLE, [], []
    if len(job.rendezvous) > 1 and not job.unseen and all(in_rendezvous(state.member) for state in known):
        return Outcome.RENDEZVOUS, [], known
    stepping = [state for state in waiting if state.thread.moving]
    if not still and stepping:
        return _some_step(stepping, without(waiting, stepping), outside)
    # Ranks leave one after the other, and the sample of one in init_process_group may be older than that exit.
    is_ending = not waiting or (is_start and all(map(_left_just_now, still)))
    if live and still and is_ending and len(_of(still, StackClass.EXITED)) == len(still):
        return Outcome.LEFT, [], live
    if still:
        return Outcome.OUTLIERS, [*still, *([] if len(outside) > len(waiting) else outside)], waiting
    if waiting and outside:
        return _some_are_outside(waiting, outside, awaits)
    if not waiting:
        return _none_waits(job, live)
    if starved:
        return Outcome.STANDSTILL, [], [*waiting, *starved]
    if unreadable or job.unseen or absent:
        return Outcome.UNREADABLE, [], waiting
    return _all_wait(waiting)


def _some_step(
    stepping: list[RankState], unmoved: list[RankState], outside: list[RankState]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Judge a job in which some ranks step from one wait to the next: it runs, unless most ranks have long waited.

    A rank that evaluates on its GPU waits for it repeatedly, while the others wait for that rank.
    """
    if len(stepping) >= len(unmoved) or waited_s(unmoved) <= LONG_S:
        return Outcome.NOT_HUNG, [], [*stepping, *unmoved]
    return Outcome.OUTLIERS, [*stepping, *outside], unmoved


def _some_are_outside(
    waiting: list[RankState], outside: list[RankState], awaits: Mapping[Key, Key]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Blame those ranks outside of communication that wait for no other rank outside.

    A rank that makes progress is not blamed while another makes none; nor is one that waits for such a rank.
    """
    # Waiting ranks that woke up since the first sample may have made a step invisible in their frames.
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
    """Judge a job without ranks in communication: it makes progress, or this is unproven."""
    moving = [state for state in live if state.thread.moving]
    # Frames do not show it, but a rank asleep for long while another moves most likely waits for that one.
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
    """Return the ranks without progress, or all if every rank makes some."""
    return [rank for rank in outside if not goes_on(rank)] or list(outside)


def minority_of(groups: Sequence[Sequence[Rank]]) -> list[Rank]:
    """Return the smaller of two groups if it is small enough to blame, else an empty list."""
    if len(groups) != 2:
        return []
    fewer, more = sorted(groups, key=len)
    return list(fewer) if len(fewer) <= _MINORITY * (len(fewer) + len(more)) else []


def place(state: RankState) -> Hashable:
    """Return an identity of a rank's place: operation and line of user code."""
    frame = state.thread.location.frame or (state.thread.frames[0] if state.thread.frames else None)
    return state.thread.kind, state.thread.location.operation, frame


def _in_another_collective(members: Sequence[RankState]) -> list[RankState]:
    """Find a minority in a different operation than the others.

    One operation called at two lines may be one collective: `broadcast` on the root and on the rest.
    """
    if any(state.thread.groups != 1 for state in members):
        return []
    groups = by_key((state.thread.location.operation, state) for state in members)
    return minority_of(list(groups.values()))


def _unmatched(members: Sequence[RankState]) -> list[RankState]:
    """Find a minority in a `send` or `recv` with a peer that waits in a collective of the only group."""
    ranks = {state.member.rank: state for state in members}
    peers = {id(state): ranks.get(state.thread.peer) for state in members if state.thread.location.is_p2p}
    found = [
        state for state in members if (peer := peers.get(id(state))) is not None and not peer.thread.location.is_p2p
    ]
    is_one_group = all(state.thread.groups == 1 for state in members)
    return found if is_one_group and len(found) <= _MINORITY * len(members) else []


def _cycle(members: Sequence[RankState]) -> list[RankState]:
    """Find a cycle of ranks, each in a `send` or `recv` with the next one; empty without any.

    A sender and its receiver form no cycle: the message is in flight, or lost.
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
    """Find the ranks with the lowest loop counters, comparing counters common to all ranks.

    Empty if an outer loop's counter is not common: inner ones restart in each round.
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
    """Filter by identity: comparing tens of thousands of ranks by value takes minutes."""
    left_out = {id(state) for state in others}
    return [state for state in members if id(state) not in left_out]


def works(state: RankState) -> bool:
    """Return whether a rank makes progress, computes, or waits for activity of its own children, threads or files."""
    return state.thread.motion in (Motion.MOVES, Motion.COMPUTES, Motion.WORKS)


def is_starved(state: RankState) -> bool:
    """Return whether a rank with a GPU hardly ran between the samples, though it was runnable in all of them.

    No sample of its C frames exists then, so it may wait for its GPU at this line, as waits for a GPU spin.
    """
    thread, process, watched = state.thread, state.member.process, state.member.watched
    return (
        thread.motion is Motion.COMPUTES
        and thread.kind in (StackClass.COMPUTE, StackClass.PYTHON)
        and thread.busy is not None
        and thread.busy < _STARVED
        and (process is not None and process.gpu)
        and not (watched is not None and is_located(watched.places))
    )


def waited_s(waiting: Iterable[RankState]) -> float:
    """Return a lower bound of the longest wait, in seconds."""
    return max((state.thread.still_s for state in waiting if not state.thread.moving), default=0.0)


def _may_only_be_slow(outcome: Outcome, outliers: Sequence[RankState], waiting: Sequence[RankState]) -> bool:
    """Return whether the outliers work, or the others have not waited for long."""
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
    """Return whether a rank, or the DataLoader worker it waits for, polls."""
    if state.member.watched is not None and state.member.watched.build_locks:
        return False  # the process that would remove the lock is dead
    worker = stuck_worker(state)
    return state.thread.motion is Motion.POLLS or (worker is not None and ran_lately(state))


def _watched_s(states: Iterable[RankState]) -> float:
    """Return the longest sampling time of these ranks in seconds."""
    seen = [state.member.watched.samples for state in states if state.member.watched is not None]
    return max((samples[-1].at_s - samples[0].at_s for samples in seen if samples), default=0.0)


def mark(verdict: JobVerdict, outlier: RankState) -> str:
    """Return an outlier's label: "gone", "straggler" if it may just be slow, else "stuck"."""
    if outlier.thread.kind is StackClass.EXITED:
        return "gone"
    return "straggler" if verdict.only_slow else "stuck"


def split(members: Iterable[RankState]) -> list[list[RankState]]:
    """Group ranks by place, smallest group first."""
    groups = by_key(((place(state), state.thread.status), state) for state in members)
    return sorted(
        groups.values(), key=lambda group: (len(group), group[0].member.rank is None, group[0].member.rank or 0)
    )
