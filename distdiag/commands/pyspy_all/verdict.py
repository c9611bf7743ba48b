"""Who is odd in a job, and what cannot be said. Pure.

The odd one is not the rare stack: it is the rank that is not in communication while others are. Pipeline stages wait in
different functions and are all in communication. Where everybody waits in one place, loop counters may decide; or which
rank each `send` and `recv` is about. One that is in another collective is named only where there is a single process
group: with several (tensor beside data parallel) it may wait in one for a rank that went on to another. Else nothing
is said.
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
    from distdiag.node.procs import Standstill

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


class Outcome(StrEnum):
    """What the stacks of one job come to."""

    ODD = "odd-rank"
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
    if not still and waiting and (any(one.moving for one in waiting) or _all_go_round(waiting, outside)):
        return Outcome.NOT_HUNG, [], waiting
    if live and not waiting and all(one.kind is FrameClass.EXITED for one in still) and still:
        return Outcome.LEFT, [], live
    if still:
        return Outcome.ODD, [*still, *([] if len(outside) > len(waiting) else outside)], waiting
    if waiting and outside:
        if len(outside) * 2 >= len(live) and all(goes_on(one) for one in outside):
            return Outcome.NOT_HUNG, [], waiting
        # Whoever moves is not what a standstill comes from, as long as somebody else stands; nor who waits for data or
        # asks for something again and again, which may be another rank's to give.
        standing = [one for one in outside if not one.moving] or outside
        return Outcome.ODD, [one for one in standing if not _may_wait_for_a_rank(one)] or standing, waiting
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
    asleep = [one for one in live if not (goes_on(one) or _wakes(one) or (one.busy or 0.0) >= ALIVE)]
    # Frames name no wait for the others, yet who sleeps for long beside one that goes on most likely waits for it.
    if len(asleep) < len(live) and not any(_slept_s(one) > _LONG_S for one in asleep):
        return Outcome.NOT_HUNG, [], list(live)
    return Outcome.STANDSTILL, [], list(live)


def _all_wait(waiting: list[Standing]) -> tuple[Outcome, list[Standing], list[Standing]]:
    if any(one.site.is_p2p for one in waiting):
        cycle = _cycle(waiting)
        if cycle:
            return Outcome.CYCLE, cycle, without(waiting, cycle)
        return Outcome.ALL_WAITING, [], waiting  # a pipeline: its stages stand at different places rightly
    if len({place(one) for one in waiting}) > 1:
        odd = _in_another_collective(waiting)
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


def _in_another_collective(members: Sequence[Standing]) -> list[Standing]:
    """Find the few that are in another operation than all the others, who are in one; none if there is no majority.

    The same operation, called from another line, may be the same collective: `broadcast` of the root and of the rest.
    """
    if any(one.stance.groups != 1 for one in members):
        return []
    groups: dict[str, list[Standing]] = {}
    for one in members:
        groups.setdefault(one.site.operation, []).append(one)
    largest = max(groups.values(), key=len)
    rest = without(members, largest)
    return rest if len(rest) <= _MINORITY * len(members) and len(groups) == 2 else []


def _cycle(members: Sequence[Standing]) -> list[Standing]:
    """Find ranks that wait for each other in a circle, each in a `send` or `recv` that names the next; empty if none.

    One that sends to a rank that receives from it is no such circle: there a message is on its way, or lost.
    """
    ranks = {one.rank: one for one in members if one.rank is not None}
    done: set[int] = set()
    for start in ranks:
        path: list[int] = []
        at: int | None = start
        while at is not None and at in ranks and at not in done:
            done.add(at)
            path.append(at)
            at = ranks[at].stance.peer if ranks[at].site.is_p2p else None
        if at in path:
            circle = [ranks[rank] for rank in path[path.index(at) :]]
            directions = {"recv" in one.site.operation for one in circle}
            return [] if len(circle) == 2 and len(directions) == 2 else circle
    return []


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


_RUNS = 0.1
"""Share of a core that somebody has used who computes, though it is also held up."""


def goes_on(one: Standing) -> bool:
    """Tell whether somebody computes (or would, if it got a processor), or moved between the looks."""
    if one.moving or one.stance.runs or (one.busy is not None and one.busy >= BUSY):
        return True
    watched = one.member.watched
    is_running = watched is not None and bool(watched.looks) and watched.looks[-1].state == "R"
    return is_running and (one.busy or 0.0) >= _RUNS  # on a busy machine, or between reads of a disk


def woke_again(one: Standing) -> bool:
    """Tell whether it went to wait several times between the looks: a wait that never ends does not wake up.

    Who sleeps and asks again and again wakes up as well, for nothing; as do waits for a GPU, and for NCCL's kernels.
    """
    still = _standstill(one)
    process = one.member.process
    polls = still is not None and "sleep" in still.syscall
    return one.stance.woke >= _WOKE and not polls and not (process is not None and process.gpu)


def _all_go_round(waiting: Sequence[Standing], outside: Sequence[Standing]) -> bool:
    """Tell whether those who wait were let go and came to wait again, and nobody else slept all the while."""
    return all(map(woke_again, waiting)) and all(goes_on(one) or one.stance.woke >= _WOKE for one in outside)


def _wakes(one: Standing) -> bool:
    """Tell whether it wakes up again and again, and not only to see whether another process still has a lock."""
    return one.stance.woke >= _WOKE and one.kind is not FrameClass.LOCK


def _may_wait_for_a_rank(one: Standing) -> bool:
    still = _standstill(one)
    if still is None or still.state != "S" or goes_on(one):
        return False
    return still.syscall in _FROM_OTHERS or ("sleep" in still.syscall and one.stance.woke >= _WOKE)


def _slept_s(one: Standing) -> float:
    still = _standstill(one)
    return (still.since_s or 0.0) if still is not None and one.stance.woke == 0 else 0.0


def _standstill(one: Standing) -> Standstill | None:
    watched = one.member.watched
    look = watched.looks[-1] if watched is not None and watched.looks else None
    return look.standstill[0] if look is not None and look.standstill else None


def has_just_begun(verdict: JobVerdict) -> bool:
    """Tell whether nobody has waited for longer than a step may take: then who is waited for may only be slower."""
    if any(one.kind in (FrameClass.STOPPED, FrameClass.EXITED) for one in verdict.odd):
        return False
    stills = [_standstill(one) for one in verdict.waiting if one.stance.woke == 0]
    waited = [still.since_s for still in stills if still is not None and still.since_s is not None]
    return bool(waited) and len(waited) == len(stills) and max(waited) <= _LONG_S


def split(members: Iterable[Standing]) -> list[list[Standing]]:
    """Put together who stands at the same place, the smallest group first."""
    groups: dict[Hashable, list[Standing]] = {}
    for one in members:
        groups.setdefault((place(one), one.status), []).append(one)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].rank is None, group[0].rank or 0))
