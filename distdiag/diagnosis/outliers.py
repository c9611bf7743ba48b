"""Which ranks of a job stand out, and what cannot be said. Pure.

An outlier is not the rare stack: it is the rank that is not in communication while others are. Pipeline stages wait in
different functions and are all in communication. Where everybody waits in one place, loop counters may decide; or which
rank each `send` and `recv` is about. One that is in another collective is named only where there is a single process
group: with several (tensor beside data parallel) it may wait in one for a rank that went on to another. Else nothing
is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.diagnosis.stack_classes import BUSY, RankState, StackClass, rank_states

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from distdiag.jobs.types import Job

_MINORITY = 1 / 3
"""Up to this share of the ranks, those in another collective are named; more may as well be the right ones."""

ALIVE = 0.03
"""Where nobody waits for anybody, so small a share of a core already shows that something goes on."""
_FROM_OTHERS = (
    *("read", "readv", "recvfrom", "recvmsg", "accept", "accept4", "connect", "poll", "ppoll", "write", "writev"),
    *("sendto", "sendmsg", "open", "openat", "flock"),
)
"""The calls that, where they sleep and are not stuck in the kernel, wait for another process."""
_WOKE = 2
"""A signal may wake a thread once, and it waits on."""
_LONG_S = 5.0
_MUCH_LONGER_S = 10.0
"""Who waits for so long in one collective waits for something that does not come."""


class Outcome(StrEnum):
    """What the stacks of one job come to."""

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


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """One job, judged. `outliers` are the ranks to look at, `waiting` those who wait for them.

    `only_slow`: the outliers may only be slower than the others, which have not been seen to wait for long.
    """

    job: Job
    states: tuple[RankState, ...]
    outcome: Outcome
    outliers: tuple[RankState, ...] = ()
    waiting: tuple[RankState, ...] = ()
    unreadable: tuple[RankState, ...] = ()
    only_slow: bool = False


def judge_job(job: Job, watched_s: float) -> JobVerdict:
    """Judge one job, whose first and last samples were taken `watched_s` seconds apart."""
    states = rank_states(job.members)
    unreadable = _of(states, StackClass.UNREADABLE)
    outcome, outliers, waiting = _decide(job, without(states, unreadable), unreadable)
    return JobVerdict(
        job=job,
        states=states,
        outcome=outcome,
        outliers=tuple(outliers),
        waiting=tuple(waiting),
        unreadable=tuple(unreadable),
        only_slow=_may_only_be_slow(outcome, outliers, waiting, watched_s),
    )


def _of(states: Iterable[RankState], *kinds: StackClass) -> list[RankState]:
    return [state for state in states if state.thread.kind in kinds]


def _decide(
    job: Job, known: list[RankState], unreadable: Sequence[RankState]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Return what the readable ranks come to, the outliers among them, and who waits."""
    still = _of(known, StackClass.EXITED, StackClass.STOPPED)
    live = without(known, still)
    waiting = _of(live, StackClass.COMM) or _of(live, StackClass.CUDA_SYNC)
    outside = _outside(live, waiting)
    if not known:
        return Outcome.UNREADABLE, [], []
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
    """List who is not in communication. Some that wait for their GPU may wait for a collective on it: no outliers."""
    on_gpu = _of(live, StackClass.CUDA_SYNC)
    outside = without(live, [*_of(live, StackClass.COMM), *on_gpu])
    is_comm = bool(waiting) and waiting[0].thread.kind is StackClass.COMM
    return on_gpu if is_comm and not outside and len(on_gpu) <= _MINORITY * len(live) else outside


def _some_are_outside(
    live: Sequence[RankState], waiting: list[RankState], outside: list[RankState]
) -> tuple[Outcome, list[RankState], list[RankState]]:
    if len(outside) * 2 >= len(live) and all(map(goes_on, outside)):
        return Outcome.NOT_HUNG, [], waiting
    # Whoever moves is not what a standstill comes from, as long as somebody else stands; nor who waits for data or asks
    # for something again and again, which may be another rank's to give.
    unmoved = [state for state in outside if not state.thread.moving] or outside
    return Outcome.OUTLIERS, [state for state in unmoved if not _may_wait_for_a_rank(state)] or unmoved, waiting


def _nobody_waits(job: Job, live: Sequence[RankState]) -> tuple[Outcome, list[RankState], list[RankState]]:
    """Nobody is in communication: it goes on; or all stand still, each in its own way."""
    if len(live) == 1 and job.world_size in (None, 1):
        state = live[0]
        return (Outcome.ALONE if not goes_on(state) else Outcome.NOT_HUNG), [], [state]
    asleep = [state for state in live if not (goes_on(state) or _wakes(state) or (state.thread.busy or 0.0) >= ALIVE)]
    # Frames name no wait for the others, yet who sleeps for long beside one that goes on most likely waits for it.
    if len(asleep) < len(live) and not any(_slept_s(state) > _LONG_S for state in asleep):
        return Outcome.NOT_HUNG, [], list(live)
    return Outcome.STANDSTILL, [], list(live)


def _all_wait(waiting: list[RankState]) -> tuple[Outcome, list[RankState], list[RankState]]:
    if any(state.thread.location.is_p2p for state in waiting):
        cycle = _cycle(waiting)
        if cycle:
            return Outcome.CYCLE, cycle, without(waiting, cycle)
        return Outcome.ALL_WAITING, [], waiting  # a pipeline: its stages stand at different places rightly
    if len({place(state) for state in waiting}) > 1:
        outliers = _in_another_collective(waiting)
        rest = without(waiting, outliers)
        return (Outcome.OTHER_COLLECTIVE if outliers else Outcome.ALL_WAITING), outliers, rest if outliers else waiting
    behind = _least_advanced(waiting)
    if behind:
        return Outcome.LEAST_PROGRESS, behind, without(waiting, behind)
    return Outcome.ALL_WAITING, [], waiting


def place(state: RankState) -> Hashable:
    """Return where a rank is, so that equal places are equal: the operation, and the user's own line."""
    frame = state.thread.location.frame or (state.thread.frames[0] if state.thread.frames else None)
    return state.thread.kind, state.thread.location.operation, frame


def _in_another_collective(members: Sequence[RankState]) -> list[RankState]:
    """Find the few that are in another operation than all the others, who are in one; none if there is no majority.

    The same operation, called from another line, may be the same collective: `broadcast` of the root and of the rest.
    """
    if any(state.thread.groups != 1 for state in members):
        return []
    groups: dict[str, list[RankState]] = {}
    for state in members:
        groups.setdefault(state.thread.location.operation, []).append(state)
    largest = max(groups.values(), key=len)
    rest = without(members, largest)
    return rest if len(rest) <= _MINORITY * len(members) and len(groups) == 2 else []


def _cycle(members: Sequence[RankState]) -> list[RankState]:
    """Find ranks that wait for each other in a circle, each in a `send` or `recv` that names the next; empty if none.

    One that sends to a rank that receives from it is no such circle: there a message is on its way, or lost.
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
            circle = [ranks[rank] for rank in path[path.index(at) :]]
            directions = {"recv" in state.thread.location.operation for state in circle}
            return [] if len(circle) == 2 and len(directions) == 2 else circle
    return []


def _least_advanced(members: Sequence[RankState]) -> list[RankState]:
    """Find those whose loop counters are behind; counters that not all have do not count."""
    names = set.intersection(*(set(dict(state.thread.counters)) for state in members))
    ordered = [name for name, _ in members[0].thread.counters if name in names]
    progress = {id(state): tuple(dict(state.thread.counters)[name] for name in ordered) for state in members}
    least = min(progress.values())
    behind = [state for state in members if progress[id(state)] == least]
    return behind if len(behind) < len(members) else []


def without(members: Iterable[RankState], others: Iterable[RankState]) -> list[RankState]:
    """Leave some members out; by identity, for comparing tens of thousands with each other takes minutes."""
    left_out = {id(state) for state in others}
    return [state for state in members if id(state) not in left_out]


_RUNS = 0.1
"""Share of a core that somebody has used who computes, though it is also held up."""


def goes_on(state: RankState) -> bool:
    """Return whether somebody computes (or would, if it got a processor), or moved between the samples."""
    if state.thread.moving or state.thread.runs or (state.thread.busy is not None and state.thread.busy >= BUSY):
        return True
    sample = state.last_sample
    is_running = sample is not None and sample.state == "R"
    return is_running and (state.thread.busy or 0.0) >= _RUNS  # on a busy machine, or between reads of a disk


def woke_again(state: RankState) -> bool:
    """Return whether it went to wait several times between the samples: a wait that never ends does not wake up.

    Who sleeps and asks again and again wakes up as well, for nothing; as do waits for a GPU, and for NCCL's kernels.
    """
    still = state.standstill
    process = state.member.process
    polls = still is not None and "sleep" in still.syscall
    return state.thread.woke >= _WOKE and not polls and not (process is not None and process.gpu)


def _all_go_round(waiting: Sequence[RankState], outside: Sequence[RankState]) -> bool:
    """Return whether those who wait were let go and came to wait again, and nobody else slept all the while."""
    return all(map(woke_again, waiting)) and all(goes_on(state) or state.thread.woke >= _WOKE for state in outside)


def _wakes(state: RankState) -> bool:
    """Return whether it wakes up again and again, and not only to see whether another process still has a lock."""
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
        return True  # they went on to wait again
    return watched_s < _MUCH_LONGER_S and all(map(_may_compute, outliers))


def _may_compute(state: RankState) -> bool:
    # A compiler works in processes and threads of its own, while the rank sleeps.
    kind = state.thread.kind
    return goes_on(state) or kind is StackClass.COMPILE or (state.thread.busy is None and kind is StackClass.COMPUTE)


def _has_just_begun(outliers: Sequence[RankState], waiting: Sequence[RankState]) -> bool:
    """Return whether nobody has waited for longer than a step may take: then who is waited for may only be slower."""
    if any(state.thread.kind in (StackClass.STOPPED, StackClass.EXITED) for state in outliers):
        return False
    stills = [state.standstill for state in waiting if state.thread.woke == 0]
    waited = [still.since_s for still in stills if still is not None and still.since_s is not None]
    return bool(waited) and len(waited) == len(stills) and max(waited) <= _LONG_S


def mark(verdict: JobVerdict, outlier: RankState) -> str:
    """Return what kind of outlier it is: "gone", "straggler" if it may only be slower, else "stuck"."""
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
