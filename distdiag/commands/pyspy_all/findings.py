"""The findings of pyspy-all. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks
from distdiag.commands.pyspy_all.model import COMMAND, FrameClass
from distdiag.commands.pyspy_all.standing import helper_frames
from distdiag.commands.pyspy_all.unread import deduced, kernel_words, unreadable, unseen, where
from distdiag.commands.pyspy_all.verdict import ALIVE, Outcome, goes_on, has_just_begun, split
from distdiag.commands.pyspy_all.words import briefly, does, looks, stuck_worker, waits, who, worker_does
from distdiag.knowledge.frames import library_path
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.pyspy_all.model import Request, Standing
    from distdiag.commands.pyspy_all.verdict import JobVerdict
    from distdiag.jobs.nodes import NodeStacks
    from distdiag.node.capture import Frame

_SHOWN = 6
_LONG_S = 10.0
"""Who waits for so long in one collective waits for something that does not come."""
_WHAT_DECIDES = (
    "what would: a second look later (--interval 30: does anything move?), the flight recorder (start the job with "
    "TORCH_FR_BUFFER_SIZE=2000, for NCCL also TORCH_NCCL_DUMP_ON_TIMEOUT=1), --native for what a rank does in C"
)


def job_findings(verdict: JobVerdict, request: Request, nodes: Sequence[NodeStacks]) -> list[Finding]:
    """Say what one job's stacks come to."""
    makers = {
        Outcome.ODD: _odd,
        Outcome.OTHER_COLLECTIVE: _odd,
        Outcome.LEAST_PROGRESS: _least_progress,
        Outcome.CYCLE: _cycle,
        Outcome.LEFT: _left,
        Outcome.ALL_WAITING: _all_waiting,
        Outcome.STANDSTILL: _standstill,
        Outcome.NOT_HUNG: _not_hung,
        Outcome.ALONE: _alone,
    }
    maker = makers.get(verdict.outcome)
    found = maker(verdict, request) if maker is not None else []
    return [*found, *_helpers(verdict), *unreadable(verdict, request, nodes), *unseen(verdict), *deduced(verdict)]


def waiting_in_words(members: Sequence[Standing]) -> str:
    """Say where those wait who wait: "ranks 0-1,3 wait in `all_reduce` called from `train_step train.py:25`"."""
    groups = split(members)[::-1]
    parts = _each_waits(groups[:2])
    rest = sum(len(group) for group in groups[2:])
    return "; ".join(parts) + (f"; {rest} more elsewhere" if rest else "")


def _each_waits(groups: Sequence[Sequence[Standing]]) -> list[str]:
    return [f"{briefly(group)} wait{'s' if len(group) == 1 else ''} {_waits(group)}" for group in groups]


def _waits(group: Sequence[Standing]) -> str:
    return waits(group[0], alone=len(group) == 1)


def reason_of(verdict: JobVerdict, group: Sequence[Standing]) -> str:
    """Say why a group of odd members is odd."""
    first = group[0]
    if verdict.outcome is Outcome.LEAST_PROGRESS:
        return f"the least advanced: {_counters(first)}, others {_counters(verdict.waiting[0])}"
    if verdict.outcome is Outcome.OTHER_COLLECTIVE:
        return f"in another collective than the others: {waits(first)}"
    if verdict.outcome is Outcome.CYCLE:
        return f"in a circle of ranks that wait for each other: {_waits(group)}"
    if first.kind is FrameClass.EXITED:
        return f"gone: {does(first)}" if len(group) == 1 else "gone"
    if first.kind is FrameClass.STOPPED:
        return does(first)
    return f"not in the collective: {does(first)}"


def _odd(verdict: JobVerdict, request: Request) -> list[Finding]:
    groups = split(verdict.odd)
    parts = [f"{who(group)} {'is' if len(group) == 1 else 'are'} {reason_of(verdict, group)}" for group in groups[:3]]
    if len(groups) > 3:
        parts.append(f"{sum(map(len, groups[3:]))} more are elsewhere")
    rest = waiting_in_words(verdict.waiting) if verdict.waiting else ""
    title = "; ".join([*parts, rest] if rest else parts)
    gone = [one for one in verdict.odd if one.kind is FrameClass.EXITED]
    kind = "exited" if len(gone) == len(verdict.odd) else "odd-rank"
    only_slow = may_only_be_slow(verdict, request)
    slow = "It may only be slower than the others: look longer (--interval 30). " if only_slow else ""
    return [
        Finding(
            id=f"{COMMAND}.{kind}",
            level=Level.WARN if only_slow else Level.FAIL,
            title=title,
            detail=(slow + shared(verdict, request)).strip(),
            where=where(verdict.odd),
            evidence=kernel_words(verdict.odd),
            fix=_fix(verdict.odd),
        )
    ]


def may_only_be_slow(verdict: JobVerdict, request: Request) -> bool:
    """Tell whether the odd ones compute or move, and the others have not been seen to wait for long."""
    watched_s = (request.samples - 1) * request.interval_s
    if has_just_begun(verdict):
        return True
    if verdict.outcome is Outcome.ODD and verdict.waiting and all(one.stance.woke for one in verdict.waiting):
        return True  # they went on to wait again
    return watched_s < _LONG_S and all(
        # A compiler works in processes and threads of its own, while the rank sleeps.
        goes_on(one) or one.kind is FrameClass.COMPILE or (one.busy is None and one.kind is FrameClass.COMPUTE)
        for one in verdict.odd
    )


def _least_progress(verdict: JobVerdict, request: Request) -> list[Finding]:
    names = ", ".join(name for name, _ in verdict.odd[0].counters)
    return [
        Finding(
            id=f"{COMMAND}.least-progress",
            level=Level.WARN if has_just_begun(verdict) else Level.FAIL,
            title=f"{who(verdict.odd)} {'is' if len(verdict.odd) == 1 else 'are'} behind: {_counters(verdict.odd[0])}, "
            f"{briefly(verdict.waiting)} {_counters(verdict.waiting[0])}; all wait {waits(verdict.odd[0])}",
            detail=f"All ranks stand at the same line; their loop counters ({names}) tell them apart. "
            "Whoever is behind did one collective more, or the others one less. " + shared(verdict, request),
            where=where(verdict.odd),
            evidence=_at_counters(_by_counters([*verdict.odd, *verdict.waiting])),
        )
    ]


def _cycle(verdict: JobVerdict, request: Request) -> list[Finding]:
    shown = verdict.odd[:_SHOWN]
    parts = [f"{briefly([one])} {waits(one, alone=True)}" for one in shown]
    more = f"; {len(verdict.odd) - _SHOWN} more in the circle" if len(verdict.odd) > _SHOWN else ""
    rest = f"; {waiting_in_words(verdict.waiting)}" if verdict.waiting else ""
    return [
        Finding(
            id=f"{COMMAND}.p2p-cycle",
            level=Level.FAIL,
            title=f"{briefly(verdict.odd)} wait for each other: {'; '.join(parts)}{more}{rest}",
            detail="Each waits for the next one before it does what that one waits for.",
            where=where(verdict.odd),
            fix=Fix(text="let one of each pair send while the other receives, or use dist.batch_isend_irecv for both"),
        )
    ]


def _all_waiting(verdict: JobVerdict, request: Request) -> list[Finding]:
    by_counters, places = _by_counters(verdict.waiting), split(verdict.waiting)[::-1]
    same = len(places) == 1 and len(by_counters) == 1
    counters = _counters(verdict.waiting[0]) if same else ""
    return [
        Finding(
            id=f"{COMMAND}.all-waiting",
            level=Level.UNKNOWN,
            title=f"stacks cannot decide: all ranks are in communication: {waiting_in_words(verdict.waiting)}"
            + (f", all at {counters}" if counters else ""),
            detail=_several_groups(verdict)
            + ("Nobody is missing: a" if verdict.job.world_size else "If these are all the ranks, a")
            + " message was lost, an earlier collective differs, or a link or a GPU is stuck. "
            f"Stacks do not tell which; {_WHAT_DECIDES}.",
            where=where(verdict.waiting),
            evidence=(
                *(_each_waits(places[:_SHOWN]) if len(places) > 2 else ()),
                *(_at_counters(by_counters) if len(by_counters) > 1 else ()),
            ),
        )
    ]


def _several_groups(verdict: JobVerdict) -> str:
    most = max((one.stance.groups for one in verdict.waiting), default=0)
    if most <= 1:
        return ""
    return f"They are in {most} process groups each, and stacks do not tell which of them a wait is for. "


def _left(verdict: JobVerdict, request: Request) -> list[Finding]:
    """Say that ranks have ended and nobody is seen to wait for them: the end of the job, or of a part of it."""
    gone = [one for one in verdict.standings if one.kind is FrameClass.EXITED]
    parts = [f"{briefly(group)}: {does(group[0])}" for group in split(verdict.waiting)[:3]]
    return [
        Finding(
            id=f"{COMMAND}.exited",
            level=Level.UNKNOWN,
            title=f"{who(gone)} {'is' if len(gone) == 1 else 'are'} gone, and no rank waits in communication: "
            + "; ".join(parts),
            detail="A job may end so: rank 0 still writes its last checkpoint.",
            where=where(gone),
            fix=_fix(gone),
        )
    ]


def _standstill(verdict: JobVerdict, request: Request) -> list[Finding]:
    groups = split(verdict.waiting)
    parts = [f"{briefly(group)}: {does(group[0])}" for group in groups[:4]]
    one_look = all(one.moving is None for one in verdict.waiting)
    return [
        Finding(
            id=f"{COMMAND}.all-waiting",
            level=Level.UNKNOWN,
            title="nobody is in communication"
            + ("" if one_look else " and nobody moved or computed between the looks")
            + ": "
            + "; ".join(parts),
            detail="One look cannot tell moving from stuck: give --samples 2." if one_look else "",
            where=where(verdict.waiting),
        )
    ]


def _not_hung(verdict: JobVerdict, request: Request) -> list[Finding]:
    moving = [one for one in verdict.standings if one.moving]
    busy = [one for one in verdict.standings if not one.moving and (one.busy or 0.0) >= ALIVE]
    parts = []
    if moving:
        parts.append(f"{briefly(moving)} moved between the looks")
    if busy:
        parts.append(f"{briefly(busy)} compute{'s' if len(busy) == 1 else ''}")
    wakes = [one for one in verdict.standings if not one.moving and (one.busy or 0.0) < ALIVE and one.stance.woke]
    if wakes and not moving:
        parts.append(f"{briefly(wakes)} wake{'s' if len(wakes) == 1 else ''} up again and again")
    if (
        not wakes
        and verdict.waiting
        and verdict.waiting[0].kind is FrameClass.COMM
        and not any(one.moving for one in verdict.waiting)
    ):
        parts.append(f"{briefly(verdict.waiting)} wait{'s' if len(verdict.waiting) == 1 else ''} for them")
    return [
        Finding(
            id=f"{COMMAND}.not-hung",
            level=Level.INFO,
            title=f"not hung, as far as can be seen in {looks(request.samples, request.interval_s)}: "
            + ", ".join(parts),
            detail="Should it be slow or move in a circle, look longer: --interval 30.",
            where=where(verdict.standings),
        )
    ]


def _alone(verdict: JobVerdict, request: Request) -> list[Finding]:
    one = verdict.waiting[0]
    if stuck_worker(one) is not None:
        return []
    return [
        Finding(
            id=f"{COMMAND}.all-waiting",
            level=Level.UNKNOWN,
            title=f"{who([one])} stands still: {does(one)}" if one.moving is not None else f"{who([one])}: {does(one)}",
            detail="There is no other rank to compare it with.",
            where=where([one]),
        )
    ]


def _helpers(verdict: JobVerdict) -> list[Finding]:
    """Name the DataLoader workers that waiting ranks wait for."""
    found = []
    for one in verdict.odd or verdict.waiting:
        helper = stuck_worker(one)
        if helper is not None and verdict.outcome is not Outcome.NOT_HUNG:
            found.append((one, helper))
    if not found:
        return []
    one, helper = found[0]
    more = f"; so do {len(found) - 1} more" if len(found) > 1 else ""
    return [
        Finding(
            id=f"{COMMAND}.helper-stuck",
            level=Level.FAIL,
            title=f"DataLoader worker {helper.process.pid} of {who([one])} {worker_does(helper)}{more}",
            evidence=_worker_stack(helper_frames(helper.watched)),
            where=Where(
                hosts=tuple(dict.fromkeys(owner.member.host for owner, _ in found)),
                ranks=tuple(owner.rank for owner, _ in found if owner.rank is not None),
                pids=tuple(worker.process.pid for _, worker in found),
            ),
        )
    ]


def shared(verdict: JobVerdict, request: Request) -> str:
    """Say what the odd ones have in common that not all have: a node, a local rank, a parallel group."""
    odd, all_of_them = verdict.odd, verdict.standings
    parts = []
    hosts = {one.member.host for one in odd}
    if len(odd) > 1 and len(hosts) == 1 and len({one.member.host for one in all_of_them}) > 1:
        there = sum(one.member.host in hosts for one in all_of_them)
        parts.append(f"all on {next(iter(hosts))}" + (", all of its ranks" if there == len(odd) else ""))
    locals_ = {one.member.local_rank for one in odd}
    if len(odd) > 1 and len(locals_) == 1 and None not in locals_ and len(hosts) > 1:
        parts.append(f"all have local rank {next(iter(locals_))}")
    ranks = {one.rank for one in odd if one.rank is not None}
    for name, group in request.groups:
        if len(ranks) == len(odd) and ranks <= set(group):
            parts.append(f"{'all ' if len(odd) > 1 else ''}in {name} group {fold_ranks(group)}")
    return f"The odd ranks have in common: {'; '.join(parts)}." if parts else ""


def _worker_stack(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Write a worker's stack down to the DataLoader's own loop."""
    own = list(itertools.takewhile(lambda frame: frame.function != "_worker_loop", frames))[:_SHOWN]
    return tuple(f"{frame.function} ({library_path(frame.file) or frame.file}{_line(frame)})" for frame in own)


def _fix(members: Sequence[Standing]) -> Fix | None:
    first = members[0]
    if first.kind is FrameClass.STOPPED and first.status == "stopped":
        pids = " ".join(str(one.pid) for one in members if one.kind is FrameClass.STOPPED)
        return Fix(
            text=f"on {first.member.host}, let it go on, and find who stopped it", commands=(f"kill -CONT {pids}",)
        )
    if first.status == "frozen":
        return Fix(
            text=f"on {first.member.host}, thaw its cgroup: docker unpause CONTAINER, or as root",
            commands=(first.reason.partition(": ")[2],),
        )
    if first.kind is FrameClass.EXITED:
        return Fix(
            text=f"read the end of that rank's log, and whether the kernel ended it on {first.member.host}",
            commands=("dmesg -T | grep -iE 'out of memory|killed process|segfault'",),
        )
    return None


def _counters(one: Standing) -> str:
    return ", ".join(f"{name} {value}" for name, value in one.counters)


def _at_counters(groups: Sequence[Sequence[Standing]]) -> tuple[str, ...]:
    return tuple(f"{briefly(group)}: {_counters(group[0])}" for group in groups if group[0].counters)[:_SHOWN]


def _by_counters(members: Sequence[Standing]) -> list[list[Standing]]:
    groups: dict[tuple[tuple[str, int], ...], list[Standing]] = {}
    for one in members:
        groups.setdefault(one.counters, []).append(one)
    return sorted(groups.values(), key=len)


def _line(frame: Frame) -> str:
    return f":{frame.line}" if frame.line else ""
