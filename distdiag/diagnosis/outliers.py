"""Which ranks of a job are stuck or slow, and when the stacks cannot decide. Pure.

An outlier is not the rare stack: it is the rank that is not in communication while others are. Pipeline stages wait in
different functions and are all in communication. Where all ranks wait in one place, loop counters may decide, or the
peers of their `send` and `recv`. A rank in a different collective is named only if there is a single process group:
with several (tensor and data parallel) it may wait in one of them for a rank that went on to another. Everything else
is undecided.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from distdiag.diagnosis.data_workers import ran_lately
from distdiag.diagnosis.slow_ranks import find_slow
from distdiag.diagnosis.stack_classes import BUSY, RankState, StackClass, rank_states
from distdiag.jobs.roles import in_rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from distdiag.diagnosis.slow_ranks import SlowRanks
    from distdiag.jobs.types import Job

Rank = TypeVar("Rank")
"""A rank as some evidence shows it: its stacks (RankState), or its last lines (trace show)."""

_MINORITY = 1 / 3
"""Ranks in a different collective are named up to this share of the job; a larger group may be the correct side."""

ALIVE = 0.03
"""Where no rank waits for another, this small a share of a core already shows activity."""
_FROM_OTHERS = (
    *("read", "readv", "recvfrom", "recvmsg", "accept", "accept4", "connect", "poll", "ppoll", "write", "writev"),
    *("sendto", "sendmsg", "open", "openat", "flock"),
)
"""Calls that wait for another process when they sleep and are not stuck in the kernel."""
_WOKE = 2
"""A signal may wake a thread once, and it waits on."""
_LONG_S = 5.0
_MUCH_LONGER_S = 10.0
"""A rank that waits for so long in one collective waits for something that does not come."""
_PATIENT_S = 30.0
"""For how long the others may wait for a rank that wakes up from time to time, before it is called stuck."""


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

    `only_slow`: the outliers may only be slower than the others, which have not been seen to wait for long.
    """

    job: Job
    states: tuple[RankState, ...]
    outcome: Outcome
    outliers: tuple[RankState, ...] = ()
    waiting: tuple[RankState, ...] = ()
    unreadable: tuple[RankState, ...] = ()
    only_slow: bool = False
    slow: SlowRanks | None = None
    """Of a job that is not hung: the ranks that hold up the others, if there are enough samples to see them."""


def judge_job(job: Job, watched_s: float) -> JobVerdict:
    """Judge one job, whose first and last samples were taken `watched_s` seconds apart."""
    states = rank_states(job.members)
    unreadable = _of(states, StackClass.UNREADABLE)
    outcome, outliers, waiting = _decide(job, without(states, unreadable), unreadable)
    slow = find_slow(without(states, unreadable)) if outcome is Outcome.NOT_HUNG else None
    return JobVerdict(
        job=job,
        states=states,
        outcome=outcome,
        outliers=slow.slow if slow is not None else tuple(outliers),
        waiting=tuple(waiting),
        unreadable=tuple(unreadable),
        only_slow=slow is not None or _may_only_be_slow(outcome, outliers, waiting, watched_s),
        slow=slow,
    )


def _of(states: Iterable[RankState], *kinds: StackClass) -> list[RankState]:
    return [state for state in states if state.thread.kind in kinds]


def _decide(
    job: Job, known: list[RankState], unreadable: Sequence[RankState]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Return the outcome of the readable ranks, the outliers among them, and the waiting ranks."""
    still = _of(known, StackClass.EXITED, StackClass.STOPPED)
    live = without(known, still)
    waiting = _of(live, StackClass.COMM) or _of(live, StackClass.CUDA_SYNC)
    outside = _outside(live, waiting)
    if not known:
        return Outcome.UNREADABLE, [], []
    if len(job.rendezvous) > 1 and not job.unseen and all(in_rendezvous(state.member) for state in known):
        return Outcome.RENDEZVOUS, [], known
    if not still and waiting and (any(state.thread.moving for state in waiting) or _all_go_round(waiting, outside)):
        return Outcome.NOT_HUNG, [], waiting
    if live and not waiting and still and len(_of(still, StackClass.EXITED)) == len(still):
        return Outcome.LEFT, [], live
    if still:
        return Outcome.OUTLIERS, [*still, *([] if len(outside) > len(waiting) else outside)], waiting
    if waiting and outside:
        return _some_are_outside(live, waiting, outside)
    if not waiting:
        return _nobody_waits(job, live)
    if unreadable or job.unseen:
        return Outcome.UNREADABLE, [], waiting
    return _all_wait(waiting)


def _outside(live: Sequence[RankState], waiting: Sequence[RankState]) -> list[RankState]:
    """List the ranks that are not in communication. A rank that waits for its GPU may wait for a collective on it."""
    on_gpu = _of(live, StackClass.CUDA_SYNC)
    outside = without(live, [*_of(live, StackClass.COMM), *on_gpu])
    is_comm = bool(waiting) and waiting[0].thread.kind is StackClass.COMM
    return on_gpu if is_comm and not outside and len(on_gpu) <= _MINORITY * len(live) else outside


def _some_are_outside(
    live: Sequence[RankState], waiting: list[RankState], outside: list[RankState]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    if len(outside) * 2 >= len(live) and all(map(goes_on, outside)):
        return Outcome.NOT_HUNG, [], waiting
    # A rank that moves is not the cause while another does not move; nor is a rank that waits for data or polls for
    # something that another rank may have to provide.
    unmoved = stuck_of(outside, lambda state: bool(state.thread.moving))
    return Outcome.OUTLIERS, [state for state in unmoved if not _may_wait_for_a_rank(state)] or unmoved, waiting


def _nobody_waits(job: Job, live: Sequence[RankState]) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Judge a job where no rank is in communication: it runs, or every rank is stuck elsewhere."""
    if len(live) == 1 and job.world_size in (None, 1):
        state = live[0]
        return (Outcome.ALONE if not goes_on(state) else Outcome.NOT_HUNG), [], [state]
    asleep = [state for state in live if not (goes_on(state) or _wakes(state) or (state.thread.busy or 0.0) >= ALIVE)]
    # Frames show no wait for a rank, yet a rank that sleeps for long beside a running rank most likely waits for it.
    if len(asleep) < len(live) and not any(_slept_s(state) > _LONG_S for state in asleep):
        return Outcome.NOT_HUNG, [], list(live)
    return Outcome.STANDSTILL, [], list(live)


def _all_wait(waiting: list[RankState]) -> tuple[Outcome, list[RankState], list[RankState]]:
    if any(state.thread.location.is_p2p for state in waiting):
        cycle = _cycle(waiting)
        if cycle:
            return Outcome.CYCLE, cycle, without(waiting, cycle)
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


_RUNS = 0.1
"""Share of a core that a rank uses which computes although it is also blocked at times."""


def goes_on(state: RankState) -> bool:
    """Return whether a rank computes (or is runnable), or moved between the samples."""
    if state.thread.moving or state.thread.runs or (state.thread.busy is not None and state.thread.busy >= BUSY):
        return True
    sample = state.last_sample
    is_running = sample is not None and sample.state == "R"
    return is_running and (state.thread.busy or 0.0) >= _RUNS  # on a busy machine, or between reads of a disk


def woke_again(state: RankState) -> bool:
    """Return whether it went to sleep several times between the samples: a wait that never ends does not wake up.

    A rank that polls with sleeps wakes up too, without progress; so do waits for a GPU and for NCCL's kernels.
    """
    process = state.member.process
    return state.thread.woke >= _WOKE and not polls(state) and not (process is not None and process.gpu)


def polls(state: RankState) -> bool:
    """Return whether it sleeps and looks again, as whoever waits at a FileStore: that it wakes is no progress."""
    still = state.standstill
    return still is not None and "sleep" in still.syscall


def _waited_s(waiting: Sequence[RankState]) -> float:
    """Return for how long the longest of the waiting ranks has slept; 0 where that is not known."""
    stills = [state.standstill for state in waiting]
    return max((still.since_s for still in stills if still is not None and still.since_s is not None), default=0.0)


def _all_go_round(waiting: Sequence[RankState], outside: Sequence[RankState]) -> bool:
    """Return whether the waiting ranks were released and waited again, and no other rank slept all the time."""
    return all(map(woke_again, waiting)) and all(goes_on(state) or state.thread.woke >= _WOKE for state in outside)


def _wakes(state: RankState) -> bool:
    """Return whether it keeps waking up, and not only to check whether another process still holds a lock."""
    return state.thread.woke >= _WOKE and state.thread.kind is not StackClass.LOCK


def _may_wait_for_a_rank(state: RankState) -> bool:
    still = state.standstill
    if still is None or still.state != "S" or goes_on(state):
        return False
    return still.syscall in _FROM_OTHERS or ("sleep" in still.syscall and state.thread.woke >= _WOKE)


def _slept_s(state: RankState) -> float:
    still = state.standstill
    return (still.since_s or 0.0) if still is not None and state.thread.woke == 0 else 0.0


def _may_only_be_slow(
    outcome: Outcome, outliers: Sequence[RankState], waiting: Sequence[RankState], watched_s: float
) -> bool:
    """Return whether the outliers compute or move, and the others have not been seen to wait for long."""
    if outcome not in (Outcome.OUTLIERS, Outcome.OTHER_COLLECTIVE, Outcome.LEAST_PROGRESS):
        return False
    if _has_just_begun(outliers, waiting):
        return True
    if outcome is Outcome.LEAST_PROGRESS:
        return False
    if outcome is Outcome.OUTLIERS and waiting and all(state.thread.woke for state in waiting):
        # They were released and waited again; or look again and again: how long they have waited is not known then.
        return not any(map(polls, waiting)) or not all(_slept_s(state) > _LONG_S for state in outliers)
    if outcome is Outcome.OUTLIERS and all(map(ran_lately, outliers)) and 0.0 < _waited_s(waiting) <= _PATIENT_S:
        return True
    return watched_s < _MUCH_LONGER_S and all(map(_may_compute, outliers))


def _child_works(state: RankState) -> bool:
    """Return whether it waits for a child that used the processor between the samples: an evaluation, a compiler."""
    samples = state.member.watched.samples if state.member.watched is not None else ()
    stills = [sample.standstill[0] for sample in samples if sample.standstill]
    if len(stills) < 2 or stills[0].path != stills[-1].path:
        return False
    before, after = stills[0].child_cpu_s, stills[-1].child_cpu_s
    passed_s = samples[-1].at_s - samples[0].at_s
    return before is not None and after is not None and after - before >= _RUNS * passed_s > 0


def _may_compute(state: RankState) -> bool:
    # A compiler works in processes and threads of its own, while the rank sleeps.
    kind = state.thread.kind
    if _child_works(state):
        return True
    return goes_on(state) or kind is StackClass.COMPILE or (state.thread.busy is None and kind is StackClass.COMPUTE)


def _has_just_begun(outliers: Sequence[RankState], waiting: Sequence[RankState]) -> bool:
    """Return whether no rank has waited for longer than a step may take: then the outliers may only be slower."""
    if any(state.thread.kind in (StackClass.STOPPED, StackClass.EXITED) for state in outliers):
        return False
    stills = [state.standstill for state in waiting if state.thread.woke == 0]
    waited = [still.since_s for still in stills if still is not None and still.since_s is not None]
    return bool(waited) and len(waited) == len(stills) and max(waited) <= _LONG_S


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
