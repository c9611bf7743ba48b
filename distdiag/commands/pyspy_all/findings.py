"""The findings of pyspy-all: what the stacks of a job come to, and what could not be read or seen. Pure."""

from __future__ import annotations

import itertools
import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks
from distdiag.commands.pyspy_all.types import COMMAND
from distdiag.diagnosis import remedies
from distdiag.diagnosis.data_workers import ran_lately, stuck_worker
from distdiag.diagnosis.outliers import ALIVE, Outcome, split
from distdiag.diagnosis.slow_ranks import ENOUGH
from distdiag.diagnosis.stack_classes import BUSY, StackClass, helper_frames
from distdiag.diagnosis.stack_wording import (
    briefly,
    does,
    rendezvous_in_words,
    samples_in_words,
    spot,
    waits,
    who,
    worker_does,
)
from distdiag.knowledge.frames import library_path
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.pyspy_all.types import Request
    from distdiag.diagnosis.outliers import JobVerdict
    from distdiag.diagnosis.slow_ranks import SlowRanks
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.facts.stack_types import Frame
    from distdiag.jobs.types import NodeStacks

_SHOWN = 6
_PLACES = 3
_REMEDIES = {
    "not-python": "pass the pid of its Python child: --pid",
    "timeout": "increase the limit: --timeout 30; or run py-spy dump --nonblocking on it",
    "failed": "try again: a process that is starting or exiting cannot be read",
}


def job_findings(verdict: JobVerdict, request: Request, nodes: Sequence[NodeStacks]) -> list[Finding]:
    """List what one job's stacks come to."""
    makers = {
        Outcome.OUTLIERS: _outliers,
        Outcome.OTHER_COLLECTIVE: _outliers,
        Outcome.LEAST_PROGRESS: _least_progress,
        Outcome.CYCLE: _cycle,
        Outcome.LEFT: _left,
        Outcome.ALL_WAITING: _all_waiting,
        Outcome.RENDEZVOUS: _rendezvous,
        Outcome.STANDSTILL: _standstill,
        Outcome.NOT_HUNG: _not_hung,
        Outcome.ALONE: _alone,
    }
    maker = makers.get(verdict.outcome)
    found = maker(verdict, request) if maker is not None else []
    unseen = remedies.unseen_ranks(verdict.job, f"{COMMAND}.exited")
    return [*found, *_helpers(verdict), *_unreadable(verdict, request, nodes), *unseen, *_deduced(verdict)]


def waiting_in_words(members: Sequence[RankState]) -> str:
    """Describe where those wait who wait: "ranks 0-1,3 wait in `all_reduce` called from `train_step train.py:25`"."""
    groups = split(members)[::-1]
    parts = _each_waits(groups[:2])
    rest = sum(len(group) for group in groups[2:])
    return "; ".join(parts) + (f"; {rest} more are elsewhere" if rest else "")


def _each_waits(groups: Sequence[Sequence[RankState]]) -> list[str]:
    return [f"{briefly(group)} wait{'s' if len(group) == 1 else ''} {_waits(group)}" for group in groups]


def _waits(group: Sequence[RankState]) -> str:
    return waits(group[0], alone=len(group) == 1)


def reason_of(verdict: JobVerdict, group: Sequence[RankState]) -> str:
    """Describe why a group of outliers stands out."""
    first = group[0]
    if verdict.outcome is Outcome.LEAST_PROGRESS:
        return f"behind: {_counters(first)}, others {_counters(verdict.waiting[0])}"
    if verdict.outcome is Outcome.OTHER_COLLECTIVE:
        return f"in a different collective: {waits(first)}"
    if verdict.slow is not None:
        return "slower than the others"
    if verdict.outcome is Outcome.CYCLE:
        return f"in a cycle of ranks that wait for each other: {_waits(group)}"
    if first.thread.kind is StackClass.EXITED:
        return f"gone: {does(first)}" if len(group) == 1 else "gone"
    if first.thread.kind is StackClass.STOPPED:
        return does(first)
    return f"not in the collective: {does(first)}"


def _outliers(verdict: JobVerdict, request: Request) -> list[Finding]:
    groups = split(verdict.outliers)
    parts = [f"{who(group)} {'is' if len(group) == 1 else 'are'} {reason_of(verdict, group)}" for group in groups[:3]]
    if len(groups) > 3:
        parts.append(f"{sum(map(len, groups[3:]))} more are elsewhere")
    rest = waiting_in_words(verdict.waiting) if verdict.waiting else ""
    title = "; ".join([*parts, rest] if rest else parts)
    gone = [state for state in verdict.outliers if state.thread.kind is StackClass.EXITED]
    kind = "exited" if len(gone) == len(verdict.outliers) else "straggler" if verdict.only_slow else "stuck-rank"
    slow = "It may only be slower than the others: sample for longer (--interval 30). " if verdict.only_slow else ""
    return [
        Finding(
            id=f"{COMMAND}.{kind}",
            level=Level.WARN if verdict.only_slow else Level.FAIL,
            title=title,
            detail=(slow + _shared(verdict, request)).strip(),
            where=where(verdict.outliers),
            evidence=kernel_words(verdict.outliers),
            fix=_fix(verdict.outliers, request),
        )
    ]


def _least_progress(verdict: JobVerdict, request: Request) -> list[Finding]:
    behind, others = verdict.outliers[0], verdict.waiting
    names = ", ".join(name for name, _ in behind.thread.counters)
    return [
        Finding(
            id=f"{COMMAND}.least-progress",
            level=Level.WARN if verdict.only_slow else Level.FAIL,
            title=f"{who(verdict.outliers)} {'is' if len(verdict.outliers) == 1 else 'are'} behind: "
            f"{_counters(behind)}, {briefly(others)} {_counters(others[0])}; all wait {waits(behind)}",
            detail=f"All ranks are on the same line; only their loop counters ({names}) differ. "
            "Either the ranks behind issued an extra collective, or the others skipped one. "
            + _shared(verdict, request),
            where=where(verdict.outliers),
            evidence=_at_counters(_by_counters([*verdict.outliers, *verdict.waiting])),
        )
    ]


def _cycle(verdict: JobVerdict, request: Request) -> list[Finding]:
    shown = verdict.outliers[:_SHOWN]
    parts = [f"{briefly([state])} {waits(state, alone=True)}" for state in shown]
    more = f"; {len(verdict.outliers) - _SHOWN} more in the cycle" if len(verdict.outliers) > _SHOWN else ""
    rest = f"; {waiting_in_words(verdict.waiting)}" if verdict.waiting else ""
    return [
        Finding(
            id=f"{COMMAND}.p2p-cycle",
            level=Level.FAIL,
            title=f"{briefly(verdict.outliers)} wait for each other: {'; '.join(parts)}{more}{rest}",
            detail="Each rank blocks on the next before it reaches the call that the next needs.",
            where=where(verdict.outliers),
            fix=Fix(text="have one rank of each pair send while the other receives, or use dist.batch_isend_irecv"),
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
            title=f"stacks cannot decide: all ranks wait in communication: {waiting_in_words(verdict.waiting)}"
            + (f", all at {counters}" if counters else ""),
            detail=_several_groups(verdict)
            + ("No rank is missing: a" if verdict.job.world_size else "If these are all the ranks, a")
            + " message was lost, an earlier collective differs, or a link or a GPU is stuck. "
            "Stacks do not show which.",
            where=where(verdict.waiting),
            evidence=(
                *(_each_waits(places[:_SHOWN]) if len(places) > 2 else ()),
                *(_at_counters(by_counters) if len(by_counters) > 1 else ()),
            ),
            fix=Fix(
                text="join the stacks with all other evidence, or see whether anything moves within 30 s; the next run "
                "can record what each rank called",
                commands=(
                    _again(request, "hang"),
                    _again(request, "pyspy-all", "--interval", "30"),
                    f"{request.program} flight-recorder --how",
                ),
            ),
        )
    ]


def _rendezvous(verdict: JobVerdict, request: Request) -> list[Finding]:
    return [
        Finding(
            id=f"{COMMAND}.rendezvous",
            level=Level.UNKNOWN,
            title=rendezvous_in_words(verdict.job),
            detail="So say the environments with which they were started; the script may have set others since.",
            where=where(verdict.waiting),
            fix=Fix(
                text=f"{_SAME_PLACE}; whether a rank listens there:",
                commands=(_again(request, "hang"),),
            ),
        )
    ]


_SAME_PLACE = "start all ranks with the same MASTER_ADDR and MASTER_PORT"


def _several_groups(verdict: JobVerdict) -> str:
    most = max((state.thread.groups for state in verdict.waiting), default=0)
    if most <= 1:
        return ""
    return f"Each is in {most} process groups, and stacks do not show which of them a wait belongs to. "


def _left(verdict: JobVerdict, request: Request) -> list[Finding]:
    """Report that ranks have ended and nobody is seen to wait for them: the end of the job, or of a part of it."""
    gone = [state for state in verdict.states if state.thread.kind is StackClass.EXITED]
    parts = _each_does(split(verdict.waiting))
    return [
        Finding(
            id=f"{COMMAND}.exited",
            level=Level.UNKNOWN,
            title=f"{who(gone)} {'is' if len(gone) == 1 else 'are'} gone, and no rank waits in communication: "
            + "; ".join(parts),
            detail="This can be a normal end of the job: rank 0 may still be writing its last checkpoint.",
            where=where(gone),
            fix=_fix(gone, request),
        )
    ]


def _standstill(verdict: JobVerdict, request: Request) -> list[Finding]:
    groups = split(verdict.waiting)
    parts = _each_does(groups)
    one_sample = all(state.thread.moving is None for state in verdict.waiting)
    return [
        Finding(
            id=f"{COMMAND}.all-waiting",
            level=Level.UNKNOWN,
            title="no rank waits in communication"
            + ("" if one_sample else ", and none moved or computed between the samples")
            + ": "
            + "; ".join(parts),
            detail="One sample cannot distinguish moving from stuck: use --samples 2." if one_sample else "",
            where=where(verdict.waiting),
            fix=Fix(text="join the stacks with all other evidence", commands=(_again(request, "hang"),)),
        )
    ]


def _each_does(groups: Sequence[Sequence[RankState]]) -> list[str]:
    parts = [f"{briefly(group)}: {does(group[0])}" for group in groups[:_PLACES]]
    rest = sum(map(len, groups[_PLACES:]))
    return [*parts, *([f"{rest} more are elsewhere"] if rest else [])]


def _slow(verdict: JobVerdict, request: Request, slow: SlowRanks) -> Finding:
    """Report ranks of a running job for which the others wait in most samples."""
    is_alone = len(slow.slow) == 1
    pronoun = "it" if is_alone else "them"
    place = f", in {spot(slow.frame)} in {slow.at_frame} of {slow.samples} samples" if slow.frame is not None else ""
    busy = min((state.thread.busy or 0.0 for state in slow.slow), default=0.0)
    often = "all" if slow.others_wait == slow.samples else f"at least {slow.others_wait} of"
    return Finding(
        id=f"{COMMAND}.straggler",
        level=Level.WARN,
        title=f"{who(slow.slow)} {'is' if is_alone else 'are'} slower than the others{place}",
        detail=f"{briefly(slow.others).capitalize()} {'waits' if len(slow.others) == 1 else 'wait'} for {pronoun} in "
        f"{often} "
        f"{slow.samples} samples; {briefly(slow.slow)} {'waits' if is_alone else 'wait'} for others "
        f"{f'in at most {slow.slow_wait}' if slow.slow_wait else 'in none'}. "
        + (f"{'It is' if is_alone else 'They are'} computing. " if busy >= BUSY else "")
        + _shared(verdict, request),
        where=where(slow.slow),
        fix=Fix(
            text=f"find out why only {briefly(slow.slow)} {'does' if is_alone else 'do'} this work; if all ranks do, "
            "compare the hosts: clocks, load, storage"
        ),
    )


def _not_hung(verdict: JobVerdict, request: Request) -> list[Finding]:
    moving = [state for state in verdict.states if state.thread.moving]
    busy = [state for state in verdict.states if not state.thread.moving and (state.thread.busy or 0.0) >= ALIVE]
    parts = []
    if moving:
        parts.append(f"{briefly(moving)} moved between the samples")
    if busy:
        parts.append(f"{briefly(busy)} {'is' if len(busy) == 1 else 'are'} computing")
    wakes = [
        state
        for state in verdict.states
        if not state.thread.moving and (state.thread.busy or 0.0) < ALIVE and state.thread.woke
    ]
    if wakes and not moving:
        parts.append(f"{briefly(wakes)} keep{'s' if len(wakes) == 1 else ''} waking up")
    if (
        not wakes
        and verdict.waiting
        and verdict.waiting[0].thread.kind is StackClass.COMM
        and not any(state.thread.moving for state in verdict.waiting)
    ):
        parts.append(f"{briefly(verdict.waiting)} wait{'s' if len(verdict.waiting) == 1 else ''}")
    slow = ("if it is slow, find the rank that the others wait for", _again(request, "pyspy-all", "--samples", "20"))
    loops = ("if it may be in an endless loop, sample for longer", _again(request, "pyspy-all", "--interval", "30"))
    next_ = [slow, loops] if request.samples < ENOUGH else [loops]
    return [
        *([_slow(verdict, request, verdict.slow)] if verdict.slow is not None else []),
        Finding(
            id=f"{COMMAND}.not-hung",
            level=Level.INFO,
            title=f"no hang seen in {samples_in_words(request.samples, request.interval_s)}: " + ", ".join(parts),
            where=where(verdict.states),
            fix=Fix(text="; ".join(text for text, _ in next_), commands=tuple(command for _, command in next_))
            if verdict.slow is None
            else None,
        ),
    ]


def _alone(verdict: JobVerdict, request: Request) -> list[Finding]:
    state = verdict.waiting[0]
    if stuck_worker(state) is not None:
        return []
    return [
        Finding(
            id=f"{COMMAND}.all-waiting",
            level=Level.UNKNOWN,
            title=f"{who([state])} makes no progress: {does(state)}"
            if state.thread.moving is not None
            else f"{who([state])}: {does(state)}",
            detail="It is the only rank: no other to compare it with.",
            where=where([state]),
            fix=_fix([state], request),
        )
    ]


def _helpers(verdict: JobVerdict) -> list[Finding]:
    """Name the DataLoader workers that waiting ranks wait for."""
    found = []
    for state in verdict.outliers or verdict.waiting:
        helper = stuck_worker(state)
        if helper is not None and verdict.outcome is not Outcome.NOT_HUNG:
            found.append((state, helper))
    if not found:
        return []
    state, helper = found[0]
    more = f"; so do {len(found) - 1} more" if len(found) > 1 else ""
    # One that ran a moment ago may only be slow.
    is_stuck = not verdict.only_slow and not all(ran_lately(owner) for owner, _ in found)
    return [
        Finding(
            id=f"{COMMAND}.helper-stuck",
            level=Level.FAIL if is_stuck else Level.WARN,
            title=f"DataLoader worker {helper.process.pid} of {who([state])} {worker_does(helper)}{more}",
            evidence=_worker_stack(helper_frames(helper.watched)),
            where=Where(
                hosts=tuple(dict.fromkeys(owner.member.host for owner, _ in found)),
                ranks=tuple(owner.member.rank for owner, _ in found if owner.member.rank is not None),
                pids=tuple(worker.process.pid for _, worker in found),
            ),
        )
    ]


def _shared(verdict: JobVerdict, request: Request) -> str:
    """Describe what the outliers have in common that not all have: a node, a local rank, a parallel group."""
    outliers, count = verdict.outliers, len(verdict.outliers)
    parts = []
    hosts = {state.member.host for state in outliers}
    if count > 1 and len(hosts) == 1 and len({state.member.host for state in verdict.states}) > 1:
        there = sum(state.member.host in hosts for state in verdict.states)
        parts.append(f"all on {next(iter(hosts))}" + (", all of its ranks" if there == count else ""))
    locals_ = {state.member.local_rank for state in outliers}
    if count > 1 and len(locals_) == 1 and None not in locals_ and len(hosts) > 1:
        parts.append(f"all have local rank {next(iter(locals_))}")
    ranks = {state.member.rank for state in outliers if state.member.rank is not None}
    for name, group in request.groups:
        if len(ranks) == count and ranks <= set(group):
            parts.append(f"{'all ' if count > 1 else ''}in {name} group {fold_ranks(group)}")
    kind = "stragglers" if verdict.only_slow else "stuck ranks"
    return f"What the {kind} have in common: {'; '.join(parts)}." if parts else ""


def _worker_stack(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Format a worker's stack down to the DataLoader's own loop."""
    own = list(itertools.takewhile(lambda frame: frame.function != "_worker_loop", frames))[:_SHOWN]
    return tuple(f"{frame.function} ({library_path(frame.file) or frame.file}{_line(frame)})" for frame in own)


def _again(request: Request, *words: str) -> str:
    job = ("--job", shlex.quote(request.job)) if request.job else ()
    pids = [word for pid in request.pids for word in ("--pid", str(pid))] if words[0] == COMMAND else []
    return remedies.again(request.program, request.cluster, *words, *job, *pids)


def _fix(members: Sequence[RankState], request: Request) -> Fix:
    first = members[0]
    host, thread = first.member.host, first.thread
    if thread.kind is StackClass.STOPPED and thread.status == "stopped":
        stopped = [state.member for state in members if state.thread.kind is StackClass.STOPPED]
        return remedies.resume((member.host, member.pid) for member in stopped)
    if thread.status == "frozen":
        return remedies.thaw(host, thread.reason.partition(": ")[2])
    if thread.kind is StackClass.EXITED:
        gone = [state.member.host for state in members if state.thread.kind is StackClass.EXITED]
        return remedies.find_cause_of_death(gone, len(gone))
    if thread.moving or (thread.busy or 0.0) >= BUSY:
        return Fix(text="see why only it runs that line: a branch on the rank, uneven batches, a retry loop")
    member = first.member
    whom = ("--rank", str(member.rank)) if member.rank is not None else ("--pid", str(member.pid))
    it = "it waits" if len(members) == 1 else "they wait"
    return Fix(
        text=f"see which file, lock, process or socket {it} for",
        commands=(_again(request, "trace", "blocked", *whom),),
    )


def _counters(state: RankState) -> str:
    return ", ".join(f"{name} {value}" for name, value in state.thread.counters)


def _at_counters(groups: Sequence[Sequence[RankState]]) -> tuple[str, ...]:
    return tuple(f"{briefly(group)}: {_counters(group[0])}" for group in groups if group[0].thread.counters)[:_SHOWN]


def _by_counters(members: Sequence[RankState]) -> list[list[RankState]]:
    groups: dict[tuple[tuple[str, int], ...], list[RankState]] = {}
    for state in members:
        groups.setdefault(state.thread.counters, []).append(state)
    return sorted(groups.values(), key=len)


def _line(frame: Frame) -> str:
    return f":{frame.line}" if frame.line else ""


def _unreadable(verdict: JobVerdict, request: Request, nodes: Sequence[NodeStacks]) -> list[Finding]:
    """Name the processes that could not be read, why, and what gives the right to."""
    by_reason: dict[tuple[str, str], list[RankState]] = {}
    for state in verdict.unreadable:
        by_reason.setdefault((state.thread.status, state.thread.reason), []).append(state)
    return [_cannot_read(members, request, _node_of(members[0], nodes)) for members in by_reason.values()]


def _node_of(state: RankState, nodes: Sequence[NodeStacks]) -> NodeStacks | None:
    return next((node for node in nodes if node.host == state.member.host), None)


def _cannot_read(members: list[RankState], request: Request, node: NodeStacks | None) -> Finding:
    status, reason = members[0].thread.status, members[0].thread.reason
    remedy = Fix(text=_REMEDIES[status]) if status in _REMEDIES else None
    return Finding(
        id=f"{COMMAND}.unreadable",
        level=Level.UNKNOWN,
        title=f"{who(members)} could not be read: {reason}",
        where=where(members),
        evidence=kernel_words(members),
        fix=_rights(members[0], request, node) if status == "denied" else remedy,
    )


def _rights(state: RankState, request: Request, node: NodeStacks | None) -> Fix:
    """Return how to get the right to read a process; in order of effort, and only what helps there."""
    scope = node.processes.ptrace_scope if node is not None else None
    as_root = node is not None and node.processes.user == 0
    theirs = state.member.process.user if state.member.process is not None else -1
    as_other_user = remedies.as_other_user(f"{request.program} pyspy-all")
    if node is not None and not as_root and theirs != node.processes.user:
        return as_other_user
    if scope in (1, 2) and not as_root:
        text = "run it as root, or allow users to read their own processes until the next reboot"
        commands = (*as_other_user.commands, "echo 0 | sudo tee /proc/sys/kernel/yama/ptrace_scope")
        return Fix(text=text, commands=commands)
    if scope == 3:
        return Fix(
            text="kernel.yama.ptrace_scope is 3: no process can be read until this host is rebooted with a lower value"
        )
    return remedies.ptrace_in_container()


def _deduced(verdict: JobVerdict) -> list[Finding]:
    """List the processes whose rank only follows from the other ranks."""
    return [
        Finding(
            id=f"{COMMAND}.rank-deduced",
            level=Level.INFO,
            title=f"pid {member.process.pid} on {member.host} is assumed to be rank {member.rank}",
            detail="Its environment does not set a rank. It started the other ranks of its host, has a connection on "
            "their MASTER_PORT, and this is the only rank unaccounted for. Lightning starts ranks this way.",
            where=Where(hosts=(member.host,), ranks=(member.rank,), pids=(member.process.pid,)),
        )
        for member in verdict.job.members
        if member.deduced and member.rank is not None and member.process is not None
    ]


def where(members: Iterable[RankState]) -> Where:
    """Return the hosts, ranks and pids that a finding is about."""
    members = list(members)
    return Where(
        hosts=tuple(dict.fromkeys(state.member.host for state in members if state.member.host)),
        ranks=tuple(sorted({state.member.rank for state in members if state.member.rank is not None})),
        pids=tuple(state.member.pid for state in members if state.member.pid is not None),
    )


def kernel_words(members: Sequence[RankState]) -> tuple[str, ...]:
    """Format what the kernel reports of the first rank of each place; their stacks are in the groups."""
    lines = []
    for group in split(members)[:_PLACES]:
        still = group[0].standstill
        if still is not None:
            facts = [f"state {still.state}", still.syscall, still.wait_channel, still.path]
            lines.append(f"{briefly(group)}: " + ", ".join(fact for fact in facts if fact))
    return tuple(lines)
