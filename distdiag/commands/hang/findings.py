"""The verdict of hang in words: rank, place, reason; its proof; its fix; and the next experiment. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.commands.hang.types import COMMAND, HangClass, Source, Stand
from distdiag.diagnosis import remedies
from distdiag.diagnosis.outliers import Outcome, split, without
from distdiag.diagnosis.stack_classes import BUSY, StackClass
from distdiag.diagnosis.stack_wording import briefly, does, waits, who
from distdiag.diagnosis.wait_reasons import Kind, lasting
from distdiag.diagnosis.wording import named
from distdiag.knowledge.activities import activity_of
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.hang.claims import Claim, Evidence
    from distdiag.commands.hang.join import Joined
    from distdiag.commands.hang.types import Request, SourceRow
    from distdiag.diagnosis.stack_classes import RankState

_GLOO_TIMEOUT_S, _NCCL_TIMEOUT_S = 1800.0, 600.0
"""torch/distributed/constants.py: default_pg_timeout and default_pg_nccl_timeout, since torch 2.2."""
_SHOWN = 8
_VERBS = {
    HangClass.NOT_IN_COLLECTIVE: ("is not in the collective", "are not in the collective"),
    HangClass.STORAGE: ("waits for storage", "wait for storage"),
    HangClass.DATA: ("waits for data", "wait for data"),
    HangClass.LOCK: ("waits for a lock", "wait for a lock"),
    HangClass.DEBUGGER: ("is in a debugger", "are in a debugger"),
    HangClass.DEVICE: ("waits for its GPU", "wait for their GPUs"),
    HangClass.COMPILE: ("compiles", "compile"),
    HangClass.SLOW: ("holds up the others", "hold up the others"),
    HangClass.STOPPED: ("is stopped", "are stopped"),
    HangClass.EXITED: ("exited", "exited"),
    HangClass.BEHIND: ("is behind", "are behind"),
}
_FIXES = {
    HangClass.NOT_IN_COLLECTIVE: "see why only it runs that line: a branch on the rank, uneven batches, a retry loop",
    HangClass.DIFFERENT_COLLECTIVES: "find the branch on the rank before that line; all ranks need the same calls",
    HangClass.SIZE_MISMATCH: "make the tensors equal on all ranks: pad uneven batches, or gather their sizes first",
    HangClass.BEHIND: "compare how many steps each rank makes: dataset length, drop_last, early stopping",
    HangClass.DEADLOCK: "use one order of groups on all ranks; let one of a pair send while the other receives",
    HangClass.DATA: "see what the DataLoader workers wait for; set DataLoader(timeout=...) to get an error",
    HangClass.LOCK: "see which thread holds it; take locks in one order, and none around a collective",
    HangClass.DEBUGGER: "continue it, or leave the debugger; distdiag.breakpoint() holds all ranks at once",
    HangClass.COMPILE: "compile before the first collective on all ranks, or raise the timeout",
    HangClass.BUSY: "raise the timeout (init_process_group(timeout=...)), or prepare it before the job",
    HangClass.SLOW: "compare its host with the others: clocks, other processes, memory bandwidth, storage",
    HangClass.OUTSIDE: "look at what comes after the last collective: logging, a checkpoint, an evaluation",
}


def finding_of(joined: Joined, rows: Sequence[SourceRow]) -> Finding:
    """Write the verdict on one job."""
    claim, class_name = joined.claim, joined.class_name
    if class_name is HangClass.UNKNOWN or claim is None:
        return _unknown(joined, rows)
    if class_name in (
        HangClass.NOT_HUNG,
        HangClass.NETWORK,
        HangClass.OUTSIDE,
        HangClass.RESTART,
        HangClass.RENDEZVOUS,
    ):
        return _about_all(joined, claim, rows)
    states = _accused_states(joined)
    title = _title(joined, claim, states)
    return Finding(
        id=f"{COMMAND}.{class_name}",
        level=joined.level,
        title=title,
        detail=" ".join(filter(None, [_pace(joined, states), _waiting(joined), _why(joined)])),
        where=_where(joined, claim, states),
        witnesses=Witnesses(ranks=tuple(sorted(claim.witnesses - joined.accused))),
        evidence=(*_proof(rows, title), *claim.evidence)[:_SHOWN],
        fix=_fix(joined, claim, states),
    )


def _accused_states(joined: Joined) -> list[RankState]:
    def key(state: RankState) -> int:
        return state.member.rank if state.member.rank is not None else -(state.member.pid or 0)

    return [state for state in joined.evidence.stacks.states if key(state) in joined.accused]


def _where(joined: Joined, claim: Claim, states: Sequence[RankState]) -> Where:
    ranks = tuple(sorted(rank for rank in joined.accused if rank >= 0)) if claim.ranks else ()
    hosts = tuple(dict.fromkeys(state.member.host for state in states if state.member.host)) or claim.hosts
    pids = tuple(state.member.pid for state in states if state.member.pid is not None) or claim.pids
    return Where(hosts=hosts, ranks=ranks, pids=pids)


def _title(joined: Joined, claim: Claim, states: list[RankState]) -> str:
    if claim.source is not Source.STACKS or not states:
        return claim.says
    first, name = split(states)[0][0], who(states)
    several = len(states) > 1
    if joined.class_name is HangClass.DEADLOCK:
        return f"{briefly(states)} wait for each other: {claim.says}"
    if joined.class_name in (HangClass.DIFFERENT_COLLECTIVES, HangClass.BEHIND):
        return claim.says
    if joined.class_name is HangClass.BUSY:
        activity = activity_of(first.thread.frames)
        return f"{name} {_plural(activity, several) if activity else _busy_word(first, several)}: {does(first)}"
    verb = _VERBS[joined.class_name][several]
    if joined.class_name is HangClass.STOPPED:
        return f"{name} {'are' if several else 'is'} {does(first)}"
    if joined.class_name is HangClass.EXITED:
        by = _by_whom(joined)
        if not by and _may_never_have_started(first):
            return f"{name}: {does(first)}"
        return f"{name} {verb}{by or f': {does(first)}'}"
    return f"{name} {verb}: {does(first)}"


def _may_never_have_started(state: RankState) -> bool:
    return state.member.process is None and state.thread.kind is StackClass.EXITED


def _busy_word(state: RankState, several: bool) -> str:
    busy = (state.thread.busy or 0.0) >= BUSY
    return ("are" if several else "is") + (" computing outside of the collective" if busy else " still busy")


def _plural(activity: str, several: bool) -> str:
    verb, _, rest = activity.partition(" ")
    return f"{verb.removesuffix('s')} {rest}".strip() if several else activity


def _by_whom(joined: Joined) -> str:
    """Return what the kernel or the log say of the end of a rank."""
    kernel, log = joined.claims.get(Source.KERNEL), joined.claims.get(Source.LOG)
    if kernel is not None and kernel.class_name is HangClass.EXITED and kernel.accused & joined.accused:
        return ", killed by the kernel: out of memory"
    if log is not None and log.class_name is HangClass.EXITED and log.accused & joined.accused:
        return f": {log.says.partition(': ')[2] or log.says}"
    return ""


def _waiting(joined: Joined) -> str:
    """Describe who waits for them, where and since when."""
    waiting = without(joined.evidence.stacks.waiting, _accused_states(joined))
    if not waiting or joined.claim is None or joined.class_name in (HangClass.BEHIND, HangClass.DIFFERENT_COLLECTIVES):
        return ""
    group = max(split(waiting), key=len)
    seconds = joined.evidence.waited_s()
    # One that polls, as in a rendezvous, wakes again and again: for how long it has waited is not known.
    seconds = seconds if seconds is not None and seconds >= 1 else None
    is_one = len(group) == 1
    verb = ("waits" if is_one else "wait") if seconds is None else ("has waited" if is_one else "have waited")
    since = f" for {lasting(seconds)}" if seconds is not None else ""
    return f"{briefly(group).capitalize()} {verb}{since} {waits(group[0])}{_counted(joined, group)}."


def _counted(joined: Joined, group: Sequence[RankState]) -> str:
    """Compare the loop counters of those who wait and of the rank that they wait for: " (step 8; rank 3: step 7)"."""
    accused = _accused_states(joined)
    if not accused or not group[0].thread.counters:
        return ""
    own = dict(accused[0].thread.counters)
    common = [(name, value) for name, value in group[0].thread.counters if name in own]
    theirs = ", ".join(f"{name} {value}" for name, value in common)
    its = ", ".join(f"{name} {own[name]}" for name, _ in common)
    return f" ({theirs}; {briefly(accused[:1])}: {its})" if common and theirs != its else ""


def _pace(joined: Joined, states: Sequence[RankState]) -> str:
    """Describe how long a busy rank still needs, and whether the timeout comes first."""
    if joined.class_name not in (HangClass.BUSY, HangClass.COMPILE, HangClass.DATA, HangClass.SLOW) or not states:
        return ""
    waited_s = joined.evidence.waited_s() or 0.0
    is_nccl = any(state.member.process is not None and state.member.process.gpu for state in states)
    limit_s, backend = (_NCCL_TIMEOUT_S, "NCCL") if is_nccl else (_GLOO_TIMEOUT_S, "Gloo")
    ranks = {state.member.rank for state in states}
    bar = next((bar for bar in joined.evidence.bars if bar.rank in ranks and bar.left_s is not None), None)
    if bar is None or bar.left_s is None:
        left = max(0.0, limit_s - waited_s)
        return f"{backend}'s default timeout ends the job in {lasting(left)}." if waited_s else ""
    ends = "the timeout comes first" if waited_s + bar.left_s > limit_s else "it ends before the timeout"
    return (
        f"{bar.name or 'Its progress bar'}: {bar.done} of {bar.total} in {lasting(bar.spent_s)}, {lasting(bar.left_s)} "
        f"left at this rate; with {backend}'s default timeout of {lasting(limit_s)} {ends}."
    )


def _why(joined: Joined) -> str:
    return joined.claim.detail if joined.claim is not None else ""


def _proof(rows: Sequence[SourceRow], title: str) -> tuple[str, ...]:
    chosen = [row for row in rows if row.stand in (Stand.AGREES, Stand.DISAGREES) and not _is_said(row.says, title)]
    disagrees = {Stand.DISAGREES: " disagrees"}
    return tuple(f"{row.source}{disagrees.get(row.stand, '')}: {row.says}" for row in chosen)


def _is_said(says: str, title: str) -> bool:
    """Return whether a title tells it all: who, and what they do."""
    return all(part in title for part in says.split(": "))


def _fix(joined: Joined, claim: Claim, states: Sequence[RankState]) -> Fix | None:
    first = states[0] if states else None
    if joined.class_name is HangClass.STOPPED and first is not None:
        if first.thread.status == "frozen":
            return remedies.thaw(first.member.host, first.thread.reason.partition(": ")[2])
        stopped = [state.member for state in states if state.thread.kind is StackClass.STOPPED]
        return remedies.resume((member.host, member.pid) for member in stopped) if stopped else claim.fix
    if claim.fix is not None:
        return claim.fix
    if joined.class_name is HangClass.EXITED:
        is_missing = first is not None and _may_never_have_started(first)
        remedy = remedies.find_missing_rank if is_missing else remedies.find_cause_of_death
        return remedy(claim.hosts, len(states) or len(claim.ranks) or 1)
    if joined.class_name is HangClass.STORAGE and first is not None:
        still = first.standstill
        path = still.path.rpartition("/")[0] if still is not None and still.path.startswith("/") else ""
        commands = (f"timeout 5 stat -f {shlex.quote(path)}",) if path else ("dmesg -T | tail -n 20",)
        return Fix(text=f"on {first.member.host}, check that the file system answers", commands=commands)
    if joined.class_name is HangClass.DEVICE:
        return Fix(text="look for Xid errors on its host", commands=("dmesg -T | grep -i xid", "nvidia-smi -q -d ECC"))
    if joined.class_name is HangClass.NOT_IN_COLLECTIVE and first is not None and _waits_for_a_reply(joined, first):
        return _look_at_its_sockets(joined, first)
    text = _FIXES.get(joined.class_name)
    return Fix(text=text) if text else None


def _waits_for_a_reply(joined: Joined, state: RankState) -> bool:
    """Return whether it waits at a connection that is not of the job's collectives."""
    wait = joined.evidence.graph.main((state.member.host, state.member.pid or 0))
    still = state.standstill
    at_socket = still is not None and still.path.startswith(("TCP ", "UDP ", "unix "))
    return at_socket or (wait is not None and wait.kind is Kind.NETWORK)


def _look_at_its_sockets(joined: Joined, state: RankState) -> Fix:
    member, evidence = state.member, joined.evidence
    whom = ("--rank", str(member.rank)) if member.rank is not None else (str(member.pid),)
    return Fix(
        text="see who is at the other end, and why it does not answer; give the call a timeout",
        commands=(again_on(evidence, "trace", "fds", *whom),),
    )


def _about_all(joined: Joined, claim: Claim, rows: Sequence[SourceRow]) -> Finding:
    evidence = joined.evidence
    titles = {
        HangClass.NOT_HUNG: f"not hung: {claim.says}",
        HangClass.RENDEZVOUS: claim.says,
        HangClass.NETWORK: _network(joined, claim),
        HangClass.OUTSIDE: f"hung outside of the collectives: {claim.says}",
        HangClass.RESTART: f"elastic restart {evidence.restarts} in progress: ranks are not in a collective yet",
    }
    slow = again_on(evidence, "pyspy-all", "--samples", "20")
    fixes = {
        HangClass.RENDEZVOUS: Fix(text="start all ranks with the same MASTER_ADDR and MASTER_PORT"),
        HangClass.NOT_HUNG: Fix(text="if it is slow, find the rank that the others wait for", commands=(slow,)),
        HangClass.NETWORK: Fix(text="test the network between the nodes", commands=(again(evidence.request, "ports"),)),
        HangClass.OUTSIDE: Fix(text=_FIXES[HangClass.OUTSIDE], commands=(again_on(evidence, "pyspy-all"),)),
        HangClass.RESTART: Fix(text="read why the attempt before ended", commands=("distdiag logs PATH",)),
    }
    return Finding(
        id=f"{COMMAND}.{joined.class_name}",
        level=joined.level,
        title=titles[joined.class_name],
        detail=" ".join(filter(None, [_why(joined)])),
        where=Where(hosts=claim.hosts),
        witnesses=Witnesses(ranks=tuple(sorted(claim.witnesses))),
        evidence=(*_proof(rows, titles[joined.class_name]), *claim.evidence)[:_SHOWN],
        fix=fixes.get(joined.class_name),
    )


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
        id=f"{COMMAND}.{HangClass.UNKNOWN}",
        level=Level.UNKNOWN,
        title=title,
        detail=" ".join(filter(None, [bug])),
        where=Where(),
        witnesses=Witnesses(
            ranks=tuple(sorted({s.member.rank for s in evidence.stacks.states if s.member.rank is not None}))
        ),
        evidence=_proof(rows, title),
        fix=Fix(text=text, commands=commands),
    )


def _situation(evidence: Evidence) -> str:
    stacks = evidence.stacks
    if all(state.thread.kind is StackClass.EXITED for state in stacks.states):
        return "all ranks have exited"
    if stacks.outcome is Outcome.UNREADABLE:
        unread = [state for state in stacks.unreadable]
        return f"{briefly(unread)} could not be read" if unread else "not all ranks were seen"
    groups = split(stacks.waiting)[::-1]
    if not groups:
        return "no rank stands out"
    all_of_them = (
        f"all {len(stacks.waiting)} ranks" if len(groups) == 1 and len(stacks.waiting) > 1 else briefly(groups[0])
    )
    more = f", {named([s.member.rank or 0 for g in groups[1:] for s in g])} elsewhere" if len(groups) > 1 else ""
    is_one = len(groups[0]) == 1
    if groups[0][0].thread.kind is StackClass.COMM:
        return f"{all_of_them} wait{'s' if is_one else ''} {waits(groups[0][0])}{more}"
    return f"{all_of_them} {'is' if is_one else 'are'} at {does(groups[0][0])}{more}"


def next_experiment(joined: Joined) -> tuple[str, tuple[str, ...]]:
    """Return the one thing that tells the candidates apart: in words, and as a command."""
    evidence = joined.evidence
    request = evidence.request
    if evidence.stacks.outcome is Outcome.UNREADABLE:
        if evidence.job.unseen:
            return "look at all hosts of the job", (f"{request.program} hang --hosts LIST",)
        return "read the stacks as root", (f'sudo env "PATH=$PATH" {again_on(evidence, "hang")}',)
    if all(state.thread.kind is StackClass.EXITED for state in evidence.stacks.states):
        return "find the first failure in its log", (f"{request.program} logs PATH",)
    if joined.against:
        return "take it again a minute later: what moved was not stuck", (again_on(evidence, "hang"),)
    native = [state for state in evidence.stacks.states if state.thread.kind in (StackClass.GIL, StackClass.LOCK)]
    if native and native[0].member.pid is not None:
        whom = () if request.cluster.typed() else ("--pid", str(native[0].member.pid))
        words = ("pyspy-all", "--native", "--threads", "all", *whom)
        return "see which C++ function waits (this pauses the process for about a second)", (again(request, *words),)
    if evidence.recorder is not None and len({member.host for member in evidence.job.members}) > 1:
        return "test the network without the job", (again(request, "ports"),)
    if evidence.recorder is not None:
        return "test the GPUs and the network without the job", (again(request, "gpu-test"),)
    return (
        "restart it with a flight recorder, which records what each rank called",
        (f"{request.program} flight-recorder --how",),
    )


def again_on(evidence: Evidence, *words: str) -> str:
    """Format a command about this job to paste; it is named where there are others."""
    job = evidence.job.name
    is_named = job and (evidence.request.wanted.job or not evidence.alone)
    return again(evidence.request, *words, *(("--job", shlex.quote(job)) if is_named else ()))


def again(request: Request, *words: str) -> str:
    """Format a command to paste: this program with the same hosts."""
    return remedies.again(request.program, request.cluster, *words)
