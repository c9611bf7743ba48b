"""Claim of the source "stacks", and the kind of a rank's fault. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.diagnosis.motion import Motion
from distdiag.diagnosis.outliers import LONG_S, Outcome, split, works
from distdiag.diagnosis.stack_classes import FILE_LOCKS, StackClass, in_event_loop
from distdiag.diagnosis.stack_wording import briefly, counters_in_words, does, rendezvous_in_words, waits, who
from distdiag.diagnosis.stuck.types import GOES_ON, Claim, Source, StuckKind
from distdiag.diagnosis.wait_reasons import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.evidence import Evidence

_KINDS = {
    StackClass.EXITED: StuckKind.EXITED,
    StackClass.STOPPED: StuckKind.STOPPED,
    StackClass.DATA: StuckKind.DATA,
    StackClass.STORAGE: StuckKind.STORAGE,
    StackClass.LOCK: StuckKind.LOCK,
    StackClass.GIL: StuckKind.LOCK,
    StackClass.DEBUGGER: StuckKind.DEBUGGER,
}
_LOCKING = (*FILE_LOCKS, "futex")
"""Python's own locks have no frame: a thread waiting for a lock or thread sleeps in a futex."""


def of_stacks(evidence: Evidence) -> Claim:
    """Return the claim of the stacks of all ranks."""
    verdict = evidence.stacks
    outcome = verdict.outcome
    waiting = frozenset(s.member.rank for s in verdict.waiting if s.member.rank is not None)
    claim = Claim(source=Source.STACKS, says="", witnesses=waiting, seconds=evidence.waited_s)
    if outcome is Outcome.UNREADABLE:
        reasons = Counter(state.thread.reason for state in verdict.unreadable)
        why = next(iter(reasons), "not all ranks were seen")
        return replace(claim, says=f"not all stacks could be read: {why}")
    if outcome is Outcome.RENDEZVOUS:
        is_sure = _rank_0_listens(evidence)
        return replace(claim, kind=StuckKind.RENDEZVOUS, says=rendezvous_in_words(evidence.job), is_sure=is_sure)
    if outcome is Outcome.NOT_HUNG:
        moving = [state for state in verdict.states if state.thread.moving] or list(verdict.states)
        return replace(claim, kind=StuckKind.NOT_HUNG, says=f"{briefly(moving)} made progress between samples")
    if outcome in (Outcome.OUTLIERS, Outcome.OTHER_COLLECTIVE, Outcome.LEAST_PROGRESS, Outcome.CYCLE):
        return _of_outliers(claim, evidence)
    if outcome is Outcome.LEFT:
        gone = [state for state in verdict.states if state.thread.kind is StackClass.EXITED]
        return _accusing(claim, gone, StuckKind.EXITED, f"{who(gone)} exited", is_sure=False)
    words = "; ".join(f"{briefly(group)}: {_place(group[0])}" for group in split(verdict.waiting)[:3])
    return replace(claim, says=f"no rank stands out: {words}")


def _rank_0_listens(evidence: Evidence) -> bool:
    """Return whether rank 0 listens at its MASTER_PORT while others try another port of its host.

    A script may change the port after the start, but then those ranks would have found rank 0. Ranks that try another
    host may belong to another job.
    """
    hosts = {place.rpartition(":")[0] for place, _ in evidence.job.rendezvous}
    ports = {place.rpartition(":")[2]: ranks for place, ranks in evidence.job.rendezvous}
    first = next((port for port, ranks in ports.items() if 0 in ranks), "")
    pids = {(member.host, member.pid) for member in evidence.job.members if member.rank == 0}
    return (
        len(ports) > 1
        and len(hosts) == 1
        and any(
            (node.host, socket.pid) in pids and socket.state == "LISTEN" and socket.local.rpartition(":")[2] == first
            for node in evidence.nodes
            for network in node.networks
            for socket in network.sockets
        )
    )


def _place(state: RankState) -> str:
    return waits(state, alone=True) if state.thread.kind in (StackClass.COMM, StackClass.GPU) else does(state)


def _of_outliers(claim: Claim, evidence: Evidence) -> Claim:
    verdict = evidence.stacks
    first = verdict.outliers[0]
    if verdict.outcome is Outcome.CYCLE:
        says = "; ".join(f"{briefly([state])} waits {waits(state, alone=True)}" for state in verdict.outliers[:4])
        return _accusing(claim, verdict.outliers, StuckKind.DEADLOCK, says)
    if verdict.outcome is Outcome.OTHER_COLLECTIVE:
        others = f", {briefly(verdict.waiting)} {waits(verdict.waiting[0])}"
        wait = "wait" if len(verdict.outliers) > 1 else "waits"
        says = f"{who(verdict.outliers)} {wait} {waits(first)}{others}"
        return _accusing(claim, verdict.outliers, StuckKind.DIFFERENT_COLLECTIVES, says)
    if verdict.outcome is Outcome.LEAST_PROGRESS:
        says = (
            f"{who(verdict.outliers)} {'are' if len(verdict.outliers) > 1 else 'is'} at {counters_in_words(first)}, "
            f"{briefly(verdict.waiting)} at "
            f"{counters_in_words(verdict.waiting[0])}; "
            f"all wait {waits(first)}"
        )
        return _accusing(claim, verdict.outliers, StuckKind.BEHIND, says)
    gone = [state for state in verdict.outliers if state.thread.kind is StackClass.EXITED]
    chosen = gone or [state for state in verdict.outliers if state.thread.kind is StackClass.STOPPED]
    # A polling rank may wait for something that a stuck rank has to create.
    chosen = chosen or [s for s in verdict.outliers if s.thread.motion is not Motion.POLLS] or list(verdict.outliers)
    groups = split(chosen)
    says = "; ".join(f"{who(group)}: {does(group[0])}" for group in groups[:3])
    kinds = [kind_in_job(group[0], evidence) for group in groups]
    kind = next((each for each in kinds if each not in GOES_ON), kinds[0])
    return _accusing(claim, chosen, kind, says, is_sure=not gone or _is_waited_for(evidence))


def kind_in_job(state: RankState, evidence: Evidence) -> StuckKind:
    """Return the kind of a rank's fault, at most SLOW while the others have not waited for long."""
    kind = kind_of(state, evidence)
    return StuckKind.SLOW if evidence.stacks.only_slow and kind not in GOES_ON else kind


def _is_waited_for(evidence: Evidence) -> bool:
    """Return whether the others wait for the dead ranks.

    Ranks that exit one after the other are a job that ends, in an unknown order.
    """
    waiting = evidence.stacks.waiting
    lasts = [not state.thread.moving and state.thread.still_s > LONG_S for state in waiting]
    return bool(waiting) and all(lasts) and not evidence.job.unseen


def kind_of(state: RankState, evidence: Evidence) -> StuckKind:
    """Return the kind of fault of a rank outside of the collective, by its activity rather than function names."""
    thread = state.thread
    found = _KINDS.get(thread.kind)
    if found is not None and found in (StuckKind.EXITED, StuckKind.STOPPED, StuckKind.DEBUGGER):
        return found
    if works(state):
        if thread.kind is StackClass.COMPILE:
            return StuckKind.COMPILE
        is_brief = thread.motion is Motion.MOVES and (evidence.waited_s or 0.0) <= LONG_S
        return StuckKind.SLOW if is_brief else StuckKind.BUSY
    still = state.standstill
    if still is not None and still.state == "D":
        is_device = still.path.startswith("/dev/") or "nv" in still.wait_channel[:3]
        return StuckKind.DEVICE if is_device else StuckKind.STORAGE
    wait = evidence.wait(state)
    if wait is not None and wait.kind in (Kind.CHILD, Kind.FILE, Kind.NETWORK, Kind.SLEEP):
        if found is StuckKind.LOCK and wait.kind is Kind.SLEEP:  # a polled lock file
            return found
        return StuckKind.DATA if found is StuckKind.DATA else StuckKind.NOT_IN_COLLECTIVE
    if wait is not None and wait.kind is Kind.LOCK:
        return StuckKind.LOCK
    if found is not StuckKind.DATA and in_event_loop(thread.frames):  # a DataLoader's queue waits in `selectors` too
        return StuckKind.NOT_IN_COLLECTIVE
    if still is not None and still.syscall in _LOCKING and thread.kind in (StackClass.PYTHON, StackClass.STORAGE):
        return StuckKind.LOCK
    return found or StuckKind.NOT_IN_COLLECTIVE


def _accusing(claim: Claim, states: Sequence[RankState], kind: StuckKind, says: str, *, is_sure: bool = True) -> Claim:
    return replace(
        claim,
        kind=kind,
        says=says,
        is_sure=is_sure,
        ranks=frozenset(state.member.rank for state in states if state.member.rank is not None),
        pids=tuple(state.member.pid for state in states if state.member.pid is not None),
        hosts=tuple(dict.fromkeys(state.member.host for state in states if state.member.host)),
    )
