"""Findings about a stuck job: rank, place, reason, evidence, fix, and the next experiment. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.diagnosis.activity_wording import moves_in_words
from distdiag.diagnosis.data_workers import stuck_worker
from distdiag.diagnosis.motion import Motion
from distdiag.diagnosis.outliers import Outcome, in_init, is_starved, split, without
from distdiag.diagnosis.stack_classes import StackClass, helper_frames
from distdiag.diagnosis.stack_wording import briefly, does, spot, waits, who
from distdiag.diagnosis.stuck.evidence import has_gpu
from distdiag.diagnosis.stuck.fixes import exited_by_ras, fix_of, may_never_have_started, next_experiment
from distdiag.diagnosis.stuck.shared import common_to
from distdiag.diagnosis.stuck.stacks import kind_in_job
from distdiag.diagnosis.stuck.types import GOES_ON, Source, Stand, StuckKind
from distdiag.diagnosis.wording import format_age, lasting, named
from distdiag.fold import by_key
from distdiag.ids import Id
from distdiag.knowledge.activities import activity_of
from distdiag.knowledge.frames import library_path
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.evidence import Evidence
    from distdiag.diagnosis.stuck.join import Joined
    from distdiag.diagnosis.stuck.types import Claim, SourceRow

PREFIX = "hang"
_GLOO_TIMEOUT_S, _NCCL_TIMEOUT_S = 1800.0, 600.0
"""torch/distributed/constants.py: default_pg_timeout and default_pg_nccl_timeout, since torch 2.2."""
_LONG_WAIT_S = 60.0
_SHOWN = 8
_GROUPS = 4
_WORKER_FRAMES = 6
_VERBS = {
    StuckKind.NOT_IN_COLLECTIVE: ("is not in the collective", "are not in the collective"),
    StuckKind.STORAGE: ("waits for storage", "wait for storage"),
    StuckKind.DATA: ("waits for data", "wait for data"),
    StuckKind.LOCK: ("is not in the collective", "are not in the collective"),  # does() describes the lock
    StuckKind.DEBUGGER: ("is in a debugger", "are in a debugger"),
    StuckKind.DEVICE: ("waits for its GPU", "wait for their GPUs"),
    StuckKind.COMPILE: ("compiles", "compile"),
    StuckKind.SLOW: ("holds up the others", "hold up the others"),
    StuckKind.STOPPED: ("is stopped", "are stopped"),
    StuckKind.EXITED: ("exited", "exited"),
    StuckKind.BEHIND: ("is behind", "are behind"),
}
_ABOUT_ALL = (StuckKind.NOT_HUNG, StuckKind.NETWORK, StuckKind.OUTSIDE, StuckKind.RESTART, StuckKind.RENDEZVOUS)


def findings_of(joined: Joined, rows: Sequence[SourceRow]) -> list[Finding]:
    """Return the findings about one job, worst first; ranks stuck in different places have one each."""
    if joined.kind is StuckKind.UNKNOWN or joined.claim is None:
        return [_unknown(joined, rows)]
    if joined.kind in _ABOUT_ALL:
        return [_about_all(joined, joined.claim, rows)]
    states = _accused_states(joined)
    by_place = joined.claim.source is Source.STACKS and joined.evidence.stacks.outcome is Outcome.OUTLIERS
    by_place = by_place and joined.kind is not StuckKind.DEADLOCK
    groups = split(states) if by_place else [states]
    if len(groups) <= 1:
        return [_about_ranks(joined, joined.claim, states, joined.kind, rows)]
    found = [
        _about_ranks(joined, joined.claim, group, kind_in_job(group[0], joined.evidence), rows) for group in groups
    ]
    found.sort(key=lambda finding: finding.level is not Level.FAIL)
    return found[:_GROUPS] if len(found) <= _GROUPS else [*found[: _GROUPS - 1], _more(found[_GROUPS - 1 :])]


def _more(found: Sequence[Finding]) -> Finding:
    ranks = tuple(sorted(rank for finding in found for rank in finding.where.ranks))
    pids = tuple(pid for finding in found for pid in finding.where.pids)
    hosts = tuple(dict.fromkeys(host for finding in found for host in finding.where.hosts))
    name = named(list(ranks)) if ranks else f"{len(pids)} processes"
    title = f"{name} are outside of the collective too, in {len(found)} more places"
    where = Where(hosts=hosts, ranks=ranks, pids=pids)
    return replace(found[0], title=title, detail="", where=where, evidence=(), fix=None)


def _about_ranks(
    joined: Joined, claim: Claim, states: list[RankState], kind: StuckKind, rows: Sequence[SourceRow]
) -> Finding:
    title = _title(joined, claim, states, kind)
    level = Level.WARN if kind in GOES_ON else joined.level
    in_common = common_to(states, joined.evidence.stacks)
    about = (_moves(states), _waiting(joined, kind), _pace(joined, states, kind), _ends(joined, kind))
    details = (*about, _also_gone(joined), _also_polls(joined, states), claim.detail, in_common)
    return Finding(
        id=Id(f"{PREFIX}.{kind}"),
        level=level,
        title=title,
        detail=" ".join(filter(None, details)),
        where=_where(joined, claim, states),
        witnesses=Witnesses(ranks=tuple(sorted(claim.witnesses - joined.accused))),
        evidence=(*_worker_stack(states), *_proof(rows, title), *claim.evidence)[:_SHOWN],
        fix=fix_of(joined, claim, states, kind),
    )


def _worker_stack(states: Sequence[RankState]) -> Iterator[str]:
    """Format the stack of the DataLoader worker that the first rank waits for, down to the DataLoader's own loop."""
    worker = stuck_worker(states[0]) if states else None
    frames = helper_frames(worker.watched) if worker is not None else ()
    for frame in itertools.takewhile(lambda frame: frame.function != "_worker_loop", frames[:_WORKER_FRAMES]):
        line = f":{frame.line}" if frame.line else ""
        yield f"worker: {frame.function} ({library_path(frame.file) or frame.file}{line})"


def _accused_states(joined: Joined) -> list[RankState]:
    def key(state: RankState) -> int:
        return state.member.rank if state.member.rank is not None else -(state.member.pid or 0)

    return [state for state in joined.evidence.stacks.states if key(state) in joined.accused]


def _where(joined: Joined, claim: Claim, states: Sequence[RankState]) -> Where:
    own = [state.member.rank for state in states if state.member.rank is not None]
    ranks = tuple(sorted(own or (rank for rank in joined.accused if rank >= 0))) if claim.ranks else ()
    hosts = tuple(dict.fromkeys(state.member.host for state in states if state.member.host)) or claim.hosts
    pids = tuple(state.member.pid for state in states if state.member.pid is not None) or claim.pids
    return Where(hosts=hosts, ranks=ranks, pids=pids)


def _title(joined: Joined, claim: Claim, states: list[RankState], kind: StuckKind) -> str:
    if claim.source is not Source.STACKS or not states:
        return claim.says
    first, name = split(states)[0][0], who(states)
    several = len(states) > 1
    if kind is StuckKind.DEADLOCK:
        return f"{briefly(states)} wait for each other: {claim.says}"
    if kind in (StuckKind.DIFFERENT_COLLECTIVES, StuckKind.BEHIND):
        return claim.says
    if kind is StuckKind.BUSY:
        activity = activity_of(first.thread.frames)
        busy = f"{'are' if several else 'is'} busy outside of the collective"
        return f"{name} {_plural(activity, several) if activity else busy}: {does(first)}"
    verb = _VERBS[kind][several]
    if kind is StuckKind.STOPPED:
        return f"{name} {'are' if several else 'is'} {does(first)}"
    if kind is StuckKind.EXITED:
        by = _by_whom(joined)
        if by:
            return f"{name} {verb}{by}"
        return f"{name}: {does(first)}" if may_never_have_started(first) else f"{name} {does(first)}"
    return f"{name} {verb}: {does(first)}"


def _moves(states: Sequence[RankState]) -> str:
    """Describe the activity of the children, threads, files or connections that the first rank waits for."""
    watched = states[0].member.watched if states else None
    if watched is None or watched.activity is None or states[0].thread.motion is not Motion.WORKS:
        return ""
    words = moves_in_words(watched.activity)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def _plural(activity: str, several: bool) -> str:
    verb, _, rest = activity.partition(" ")
    return f"{verb.removesuffix('s')} {rest}".strip() if several else activity


def _by_whom(joined: Joined) -> str:
    """Return the cause of a rank's exit, from the kernel or the log."""
    kernel, log = joined.claims.get(Source.KERNEL), joined.claims.get(Source.LOG)
    if kernel is not None and kernel.kind is StuckKind.EXITED and kernel.accused & joined.accused:
        return ", killed by the kernel: out of memory"
    if log is not None and log.kind is StuckKind.EXITED and log.accused & joined.accused:
        return f": {log.says.partition(': ')[2] or log.says}"
    return " after NCCL's init" if exited_by_ras(joined) else ""


def _waiting(joined: Joined, kind: StuckKind) -> str:
    """Describe the ranks that wait for the accused: where, and for how long."""
    waiting = without(joined.evidence.stacks.waiting, _accused_states(joined))
    if not waiting or joined.claim is None or kind in (StuckKind.BEHIND, StuckKind.DIFFERENT_COLLECTIVES):
        return ""
    group = max(split(waiting), key=len)
    seconds = joined.evidence.waited_s
    seconds = seconds if seconds is not None and seconds >= 1 else None
    is_one = len(group) == 1
    verb = ("waits" if is_one else "wait") if seconds is None else ("has waited" if is_one else "have waited")
    since = f" for {lasting(seconds)}" if seconds is not None else ""
    name = briefly(group)
    return f"{name[:1].upper()}{name[1:]} {verb}{since} {waits(group[0], alone=is_one)}{_counted(joined, group)}."


def _also_gone(joined: Joined) -> str:
    """List dead or stopped ranks besides the accused: the job needs them too."""
    still = [s for s in joined.evidence.stacks.states if s.thread.kind in (StackClass.EXITED, StackClass.STOPPED)]
    groups = split(without(still, _accused_states(joined)))
    return f"Also: {'; '.join(f'{who(group)} {does(group[0])}' for group in groups[:_GROUPS])}." if groups else ""


def _also_polls(joined: Joined, states: Sequence[RankState]) -> str:
    """List ranks outside of the collective that poll for something the accused may have to create."""
    others = without(joined.evidence.stacks.outliers, [*_accused_states(joined), *states])
    polling = [state for state in others if state.thread.motion is Motion.POLLS]
    groups = split(polling)
    if not groups or joined.claim is None or joined.claim.source is not Source.STACKS:
        return ""
    places = "; ".join(f"{who(group)} {does(group[0])}" for group in groups[:_GROUPS])
    return f"Perhaps waiting for {briefly(states)}: {places}."


def _counted(joined: Joined, group: Sequence[RankState]) -> str:
    """Compare the loop counters of waiting and accused ranks: " (step 8; rank 3: step 7)"."""
    accused = _accused_states(joined)
    if not accused or not group[0].thread.counters:
        return ""
    own = dict(accused[0].thread.counters)
    common = [(name, value) for name, value in group[0].thread.counters if name in own]
    theirs = ", ".join(f"{name} {value}" for name, value in common)
    its = ", ".join(f"{name} {own[name]}" for name, _ in common)
    return f" ({theirs}; {briefly(accused[:1])}: {its})" if common and theirs != its else ""


def _pace(joined: Joined, states: Sequence[RankState], kind: StuckKind) -> str:
    """Describe how long a busy rank still needs, and whether the timeout expires first."""
    ranks = {state.member.rank for state in states}
    bar = next((bar for bar in joined.evidence.bars if bar.rank in ranks and bar.left_s is not None), None)
    if kind not in GOES_ON or bar is None or bar.left_s is None:
        return ""
    left_s, _ = _timeout(joined)
    ends = (
        "" if left_s is None else "; the timeout comes first" if bar.left_s > left_s else "; it ends before the timeout"
    )
    return (
        f"{bar.name or 'Its progress bar'}: {bar.done} of {bar.total} in {lasting(bar.spent_s)}, {lasting(bar.left_s)} "
        f"left at this rate{ends}."
    )


def _ends(joined: Joined, kind: StuckKind) -> str:
    """Describe when the wait times out; a default timeout only if it is near, or decides which ends first."""
    left_s, whose = _timeout(joined)
    is_default = joined.evidence.ends_in_s is None
    if left_s is None or (is_default and kind not in GOES_ON and (joined.evidence.waited_s or 0.0) < _LONG_WAIT_S):
        return ""
    return f"{whose} ends the wait in {format_age(left_s)}."


def _timeout(joined: Joined) -> tuple[float | None, str]:
    """Return the seconds until the waiting ranks time out, and the origin: the process group or torch's default."""
    evidence = joined.evidence
    if evidence.ends_in_s is not None:
        return evidence.ends_in_s, "The process group's timeout"
    if evidence.waited_s is None:
        return None, ""
    limit_s, backend = (_NCCL_TIMEOUT_S, "NCCL") if has_gpu(evidence) else (_GLOO_TIMEOUT_S, "Gloo")
    default = f"{backend}'s default timeout of {format_age(limit_s)}, unless the job set another,"
    return max(0.0, limit_s - evidence.waited_s), default


def _proof(rows: Sequence[SourceRow], title: str) -> tuple[str, ...]:
    chosen = [row for row in rows if row.stand in (Stand.AGREES, Stand.DISAGREES) and not _is_in_title(row.says, title)]
    disagrees = {Stand.DISAGREES: " disagrees"}
    return tuple(f"{row.source}{disagrees.get(row.stand, '')}: {row.says}" for row in chosen)


def _is_in_title(says: str, title: str) -> bool:
    """Return whether a title already contains a claim: both its ranks and their place."""
    return all(part in title for part in says.split(": "))


def _about_all(joined: Joined, claim: Claim, rows: Sequence[SourceRow]) -> Finding:
    titles = {
        StuckKind.NOT_HUNG: f"not hung: {claim.says}",
        StuckKind.RENDEZVOUS: claim.says,
        StuckKind.NETWORK: _network(joined, claim),
        StuckKind.OUTSIDE: f"hung outside of the collectives: {claim.says}",
        StuckKind.RESTART: _restarts(joined, claim),
    }
    title = titles[joined.kind]
    return Finding(
        id=Id(f"{PREFIX}.{joined.kind}"),
        level=joined.level,
        title=title,
        detail=claim.detail,
        where=Where(hosts=claim.hosts, ranks=tuple(sorted(claim.ranks)) if joined.kind is StuckKind.RESTART else ()),
        witnesses=Witnesses(ranks=tuple(sorted(claim.witnesses))),
        evidence=(*_proof(rows, title), *claim.evidence)[:_SHOWN],
        fix=fix_of(joined, claim, [], joined.kind),
    )


def _restarts(joined: Joined, claim: Claim) -> str:
    loop, evidence = joined.evidence.restart_loop, joined.evidence
    if loop is None:
        return f"elastic restart {evidence.restarts} in progress: ranks are not in a collective yet"
    why = f": {claim.says}" if claim.source is Source.LOG else ""
    count, round_s = loop
    return f"restarted {count} times, after {lasting(round_s)} each on average: a restart loop{why}"


def _network(joined: Joined, claim: Claim) -> str:
    if claim.source is Source.KERNEL:
        return f"the network loses data: {claim.says}"
    return f"the network, and no rank: {claim.says.partition(': no rank')[0]}"


def _unknown(joined: Joined, rows: Sequence[SourceRow]) -> Finding:
    evidence = joined.evidence
    text, commands = next_experiment(joined)
    if joined.against:
        title = f"the sources disagree: {'; '.join(joined.candidates)}"
    else:
        one_of = "either " if len(joined.candidates) > 1 else "perhaps "
        title = f"cannot decide: {_situation(evidence)}; {one_of}{' or '.join(joined.candidates)}"
    known = evidence.advisories
    bug = (
        f"A known bug matches: {known[0].applies}: {known[0].symptom} ({known[0].source}). {known[0].fix}."
        if known
        else ""
    )
    return Finding(
        id=Id.HANG_UNKNOWN,
        level=Level.UNKNOWN,
        title=title,
        detail=" ".join(filter(None, [_why_none(evidence), bug])),
        where=Where(),
        witnesses=Witnesses(
            ranks=tuple(sorted({s.member.rank for s in evidence.stacks.states if s.member.rank is not None}))
        ),
        evidence=(*_proof(rows, title), *_counter_lines(evidence))[:_SHOWN],
        fix=Fix(text=text, commands=commands),
    )


def _why_none(evidence: Evidence) -> str:
    """Explain why no rank is blamed although they wait at different places."""
    waiting = evidence.stacks.waiting
    if len(split(waiting)) == 1 or evidence.stacks.outcome is not Outcome.ALL_WAITING:
        return ""
    if any(state.thread.kind is StackClass.GPU for state in waiting):
        return (
            "Kernels are launched ahead, and each rank stops where it first needs a result: their lines do not show "
            "the rank at fault."
        )
    most = max(state.thread.groups for state in waiting)
    if most <= 1:
        return ""
    return f"Each is in {most} process groups, and stacks do not show to which of them a wait belongs."


def _counter_lines(evidence: Evidence) -> tuple[str, ...]:
    """List the differing loop counters of waiting ranks: "rank 1: step 4"."""
    by_counters = by_key((state.thread.counters, state) for state in evidence.stacks.waiting)
    if len(by_counters) < 2 or evidence.stacks.outcome is not Outcome.ALL_WAITING:
        return ()
    groups = sorted((item for item in by_counters.items() if item[0]), key=lambda item: len(item[1]))
    return tuple(
        f"{briefly(group)}: {', '.join(f'{name} {value}' for name, value in counters)}" for counters, group in groups
    )


def _situation(evidence: Evidence) -> str:
    stacks = evidence.stacks
    if all(state.thread.kind is StackClass.EXITED for state in stacks.states):
        return "all ranks have exited"
    if stacks.outcome is Outcome.UNREADABLE:
        unread = [state for state in stacks.unreadable]
        return f"{briefly(unread)} could not be read" if unread else "not all ranks were seen"
    groups = sorted(split(stacks.waiting), key=len, reverse=True)
    if not groups:
        return "no rank stands out"
    if stacks.outcome is Outcome.LEFT:
        gone = [state for state in stacks.states if state.thread.kind is StackClass.EXITED]
        if any(map(in_init, stacks.states)):
            return f"{who(gone)} exited just now"
        return f"{who(gone)} exited, and no rank waits for {'it' if len(gone) == 1 else 'them'}"
    if stacks.outcome in (Outcome.STANDSTILL, Outcome.ALONE):
        waits_for_others = any(state.thread.kind in (StackClass.COMM, StackClass.GPU) for state in stacks.waiting)
        how = "most ranks are outside of the collective" if waits_for_others else "no rank waits for another"
        if starved := list(filter(is_starved, stacks.waiting)):
            how = f"{briefly(starved)} hardly got to run, and may be waiting for a GPU"
        return f"{how}: " + "; ".join(map(_unmoved, groups[:3])) + _rest(groups[3:], "elsewhere")
    count = len(stacks.waiting)
    all_of_them = "both ranks" if count == 2 else f"all {count} ranks"
    all_of_them = all_of_them if len(groups) == 1 and count > 1 else briefly(groups[0])
    is_one = len(groups[0]) == 1
    parts = [f"{all_of_them} wait{'s' if is_one else ''} {waits(groups[0][0], alone=is_one)}"]
    parts += [f"{briefly(group)} {waits(group[0], alone=len(group) == 1)}" for group in groups[1:3]]
    return "; ".join(parts) + _rest(groups[3:], "in other calls")


def _rest(groups: Sequence[Sequence[RankState]], where: str) -> str:
    states = [state for group in groups for state in group]
    return f"; {briefly(states)} {where}" if states else ""


def _unmoved(group: Sequence[RankState]) -> str:
    """Describe ranks without progress that wait for no other: "rank 3 has computed at train.py:41 for all of 10 s"."""
    first, name = group[0], briefly(group)
    seconds = lasting(first.thread.still_s)
    if is_starved(first):
        return f"{name}: {does(first)}"
    if first.thread.motion is Motion.COMPUTES and first.thread.location.frame is not None:
        has = "has" if len(group) == 1 else "have"
        return f"{name} {has} computed at {spot(first.thread.location.frame)} for all of {seconds}"
    since = (
        f", for {seconds}" if first.thread.motion in (Motion.STILL, Motion.POLLS) and first.thread.still_s >= 1 else ""
    )
    return f"{name}: {does(first)}{since}"
