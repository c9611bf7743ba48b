"""One verdict from the claims of all sources, for hang, pyspy-all and `trace blocked`. Pure.

A dead or stopped rank is a fact, whichever source reports it. Mismatched calls in a flight recorder explain why all
ranks wait. Stacks, NCCL's counters, GPUs and the log follow; /proc is last. If two sure sources accuse different ranks,
no rank is blamed: both claims are shown, with the experiment that decides. A command with fewer sources may report
unknown where hang decides, but never contradicts it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.diagnosis.gpu_use import GpuKind
from distdiag.diagnosis.motion import Motion
from distdiag.diagnosis.outliers import Outcome, is_starved, place
from distdiag.diagnosis.stack_classes import StackClass
from distdiag.diagnosis.stuck import sources
from distdiag.diagnosis.stuck.evidence import has_gpu, in_communicator_init
from distdiag.diagnosis.stuck.stacks import of_stacks
from distdiag.diagnosis.stuck.types import GOES_ON, Claim, Source, SourceRow, Stand, StuckKind
from distdiag.diagnosis.stuck.waits import of_waits
from distdiag.diagnosis.wait_graph import wait_trees
from distdiag.record import record
from distdiag.report import Fix, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.diagnosis.stuck.evidence import Evidence

_STATES = (StuckKind.EXITED, StuckKind.STOPPED)
_CALLS = (StuckKind.DIFFERENT_COLLECTIVES, StuckKind.SIZE_MISMATCH, StuckKind.DEADLOCK, StuckKind.DEVICE)
_ENDED = ("the job has ended", "its launcher is about to start it again")
_ENDING = ("the job is ending", "they failed, and the others have not noticed yet")
_ORDER = (Source.STACKS, Source.RAS, Source.RECORDER, Source.GPU, Source.LOG, Source.KERNEL, Source.WAITS)


def _waits(evidence: Evidence) -> Claim:
    keys = set(evidence.keys)
    trees = [
        tree
        for tree in wait_trees(evidence.graph)
        if not {tree.root, *(edge.waiter for edge in tree.edges)}.isdisjoint(keys)
    ]
    claim = of_waits(evidence.asked, evidence.job, evidence.keys, evidence.graph, trees)
    return replace(claim, is_sure=False) if claim.by_exclusion and _are_alike(evidence, claim) else claim


def _are_alike(evidence: Evidence, claim: Claim) -> bool:
    """Return whether other ranks share the stacks of the accused of a claim by exclusion, which voids the claim."""
    left_over = set(claim.pids)
    states = evidence.stacks.states
    others = {place(state) for state in states if state.member.pid not in left_over and state.thread.frames}
    return any(place(state) in others for state in states if state.member.pid in left_over)


_CLAIMS: Mapping[Source, Callable[[Evidence], Claim]] = {
    Source.STACKS: of_stacks,
    Source.WAITS: _waits,
    Source.GPU: sources.of_gpus,
    Source.RAS: sources.of_ras,
    Source.RECORDER: sources.of_recorder,
    Source.LOG: sources.of_log,
    Source.KERNEL: sources.of_kernel,
    Source.VERSIONS: sources.of_versions,
    Source.START: sources.of_start,
}


@record(kw_only=True)
class Joined:
    """The verdict on one job with its main `claim`. `against`: sure claims that contradict it.

    `candidates`: possible explanations of an unknown verdict, likeliest first. `starts`: reasons, from the rendezvous
    address, why ranks wait in init_process_group; the first equals `claim`.
    """

    evidence: Evidence
    claims: Mapping[Source, Claim]
    kind: StuckKind
    level: Level
    claim: Claim | None = None
    accused: frozenset[int] = frozenset()
    against: tuple[Claim, ...] = ()
    candidates: tuple[str, ...] = ()
    starts: tuple[Claim, ...] = ()


def join(evidence: Evidence) -> Joined:
    """Return the verdict on one job from the claims of all its sources."""
    missing = sources.availability(evidence)
    claims = {source: _CLAIMS[source](evidence) for source in evidence.asked.sources if source not in missing}
    if all(state.thread.kind is StackClass.EXITED for state in evidence.stacks.states):
        return _unknown(evidence, claims, _ENDED)
    stacks = claims.get(Source.STACKS)
    if stacks is not None and stacks.kind is StuckKind.RENDEZVOUS:
        if stacks.is_sure:
            return _made(evidence, claims, StuckKind.RENDEZVOUS, Level.FAIL, stacks)
        return _unknown(evidence, claims, (stacks.says, "a rank that cannot reach the others"))
    if evidence.restart_loop is not None:
        log = claims.get(Source.LOG)  # no rank lives long enough to hang
        claim = log if log is not None and log.kind is not None else stacks
        return _made(evidence, claims, StuckKind.RESTART, Level.FAIL, claim)
    moves = stacks is not None and stacks.kind is StuckKind.NOT_HUNG
    accusing = [claim for claim in _in_order(claims) if _counts(claim, moves=moves)]
    if accusing:
        return _accused(evidence, claims, accusing, moves=moves)
    if moves:
        return _made(evidence, claims, StuckKind.NOT_HUNG, Level.INFO, stacks)
    return _no_rank_accused(evidence, claims)


def _in_order(claims: Mapping[Source, Claim]) -> list[Claim]:
    """Sort claims: facts about a process first, then mismatched calls."""

    def place(claim: Claim) -> tuple[int, int]:
        of_states = claim.kind in _STATES and claim.source in (Source.STACKS, Source.WAITS)
        of_calls = claim.kind in _CALLS and claim.source is Source.RECORDER
        return 0 if of_states else 1 if of_calls else 2, _ORDER.index(claim.source)

    return sorted((claim for source, claim in claims.items() if source in _ORDER), key=place)


def _counts(claim: Claim, *, moves: bool) -> bool:
    """Return whether a claim accuses ranks and has no other explanation.

    The dumps of a running job are from different moments: a rank may not have reached a call yet.
    """
    if not claim.accused or claim.kind is None or not (claim.is_sure or claim.kind is StuckKind.SLOW):
        return False
    return not moves or (claim.source is Source.RECORDER and claim.kind in (*_CALLS[:2], StuckKind.SLOW))


def _accused(evidence: Evidence, claims: Mapping[Source, Claim], accusing: Sequence[Claim], *, moves: bool) -> Joined:
    first, *rest = accusing
    first = next((_crossed(first, claim) for claim in rest if _is_holder(claim, first)), first)
    accused = first.accused
    against = []
    for claim in rest:
        if claim.kind is StuckKind.LOCK and claim.witnesses & first.accused:
            continue  # the accused waits for a lock of that rank, which waits for the accused in a collective
        if claim.accused & first.accused:
            # Keep the ranks accused by both; only stacks separate the culprit from ranks that merely wait.
            common = claim.accused & accused
            accused = common if common and claim.is_sure and first.source is not Source.STACKS else accused
        else:
            against.append(claim)
    is_fact = first.kind in _STATES
    if (against and not is_fact) or (moves and first.kind is not StuckKind.SLOW):
        others = against or [claims[Source.STACKS]]
        candidates = tuple(dict.fromkeys(_candidate(claim) for claim in [first, *others]))[:2]
        return replace(_unknown(evidence, claims, candidates), against=tuple(others))
    assert first.kind is not None
    goes_on = first.kind in GOES_ON or (first.source is Source.STACKS and evidence.stacks.only_slow)
    level = Level.WARN if goes_on else Level.FAIL
    return replace(_made(evidence, claims, first.kind, level, first), accused=accused, against=tuple(against))


def _is_holder(claim: Claim, first: Claim) -> bool:
    """Return whether a claim concerns the ranks that hold the lock which the accused of the first one await."""
    is_lock = claim.kind is StuckKind.LOCK and first.kind is StuckKind.LOCK
    return is_lock and bool(claim.ranks and claim.witnesses & first.ranks) and not claim.ranks & first.ranks


def _crossed(first: Claim, holder: Claim) -> Claim:
    """Merge the claims about a rank that waits for a lock and the lock's holder in the collective: a deadlock."""
    return replace(
        first,
        kind=StuckKind.DEADLOCK,
        ranks=first.ranks | holder.ranks,
        pids=(*first.pids, *holder.pids),
        says=f"{first.says}; {holder.says.partition('; ')[0]}, and waits in the collective",
        fix=Fix(text="release the lock before the collective, or take it on all ranks in the same order"),
    )


def _no_rank_accused(evidence: Evidence, claims: Mapping[Source, Claim]) -> Joined:
    """Judge a job without accused ranks: all wait in one place, none waits, or the evidence is thin."""
    recorder, kernel = claims.get(Source.RECORDER), claims.get(Source.KERNEL)
    in_flight = recorder is not None and recorder.kind is StuckKind.NETWORK
    lost = kernel is not None and kernel.kind is StuckKind.NETWORK
    device = kernel is not None and kernel.kind is StuckKind.DEVICE
    stacks = evidence.stacks
    if evidence.restarts and stacks.outcome not in (Outcome.ALL_WAITING, Outcome.LEAST_PROGRESS):
        return _made(evidence, claims, StuckKind.RESTART, Level.UNKNOWN, claims.get(Source.LOG))
    if lost:
        return _made(evidence, claims, StuckKind.NETWORK, Level.FAIL, kernel)
    # The dumps of a running job look the same; only the stacks show that it does not move.
    if in_flight and not has_gpu(evidence) and stacks.outcome in (Outcome.ALL_WAITING, Outcome.LEAST_PROGRESS):
        return _made(evidence, claims, StuckKind.NETWORK, Level.FAIL, recorder)
    if device and (in_flight or stacks.outcome is Outcome.ALL_WAITING):
        return _made(evidence, claims, StuckKind.DEVICE, Level.FAIL, kernel)
    if recorder is not None and recorder.kind is StuckKind.OUTSIDE and stacks.outcome is Outcome.STANDSTILL:
        return _made(evidence, claims, StuckKind.OUTSIDE, Level.UNKNOWN, recorder)
    if stacks.outcome is Outcome.LEFT:
        return _unknown(evidence, claims, _ENDING)
    suspects = [claim for claim in claims.values() if claim.accused and claim.kind is not None]
    candidates = tuple(map(_candidate, suspects[:2]))
    candidates = candidates or _open_candidates(evidence, in_flight=in_flight)
    return _unknown(evidence, claims, candidates)


def _candidate(claim: Claim) -> str:
    return f"{claim.says} ({claim.source})"


def _open_candidates(evidence: Evidence, *, in_flight: bool) -> tuple[str, ...]:
    if in_flight:
        return ("a GPU that does not finish its kernel", "the network between the nodes")
    if evidence.stacks.outcome is Outcome.ALL_WAITING:
        hosts = {member.host for member in evidence.job.members}
        between = "the network between the nodes" if len(hosts) > 1 else "the connections between the ranks"
        if in_communicator_init(evidence.stacks.states):
            return (f"{between}, over the interface that NCCL chose", "another group or size on some ranks")
        between += " or a GPU" if has_gpu(evidence) else ""
        if evidence.gpus is not None and evidence.gpus.kind is GpuKind.ALL_BUSY_LOW_POWER:
            return (f"{between}: all GPUs run the kernel of a collective", "collectives that differ between ranks")
        if evidence.gpus is not None and evidence.gpus.kind is GpuKind.ALL_IDLE:
            return ("a wait on the host that is not for the GPU: all GPUs are idle", between)
        return ("mismatched calls (another collective, group or size on some ranks)", between)
    if any(state.thread.kind is StackClass.GIL for state in evidence.stacks.states):
        return (
            "a deadlock between that thread and one waiting for the GIL",
            "a long call into C++ that keeps the GIL",
        )
    if evidence.stacks.outcome in (Outcome.STANDSTILL, Outcome.ALONE):
        if any(map(is_starved, evidence.stacks.states)):
            return ("a rank that works too slowly", "a collective or a GPU that does not finish")
        if any(state.thread.motion is Motion.COMPUTES for state in evidence.stacks.states):
            return ("a long operation", "a loop that does not end")
        return ("the job waits for something outside of it", "it is starting or ending")
    return ("a rank that was not read holds up the others", "a rank on a host that was not asked does")


def _unknown(evidence: Evidence, claims: Mapping[Source, Claim], candidates: tuple[str, ...]) -> Joined:
    return replace(_made(evidence, claims, StuckKind.UNKNOWN, Level.UNKNOWN, None), candidates=candidates)


def _made(
    evidence: Evidence, claims: Mapping[Source, Claim], kind: StuckKind, level: Level, claim: Claim | None
) -> Joined:
    return Joined(evidence=evidence, claims=claims, kind=kind, level=level, claim=claim)


def source_rows(joined: Joined) -> tuple[SourceRow, ...]:
    """Return for each source whether it agrees with the verdict."""
    missing = sources.availability(joined.evidence)
    rows = []
    for source in joined.evidence.asked.sources:
        seconds = sources.seconds_of(joined.evidence, source)
        if source in missing:
            why, hint = missing[source]
            row = SourceRow(source=source, stand=Stand.NOT_AVAILABLE, says=why, hint=hint, seconds=seconds)
        else:
            claim = joined.claims[source]
            ranks = tuple(sorted(claim.ranks))
            row = SourceRow(source=source, stand=_stand(claim, joined), says=claim.says, ranks=ranks, seconds=seconds)
        rows.append(row)
    return tuple(rows)


def _stand(claim: Claim, joined: Joined) -> Stand:
    if claim is joined.claim:
        return Stand.AGREES
    if claim in joined.against:
        return Stand.DISAGREES
    if joined.claim is not None and claim.kind is not None:
        if joined.accused and claim.accused & joined.accused:
            return Stand.AGREES
        if not joined.accused and claim.kind is joined.kind:
            return Stand.AGREES
    return Stand.CANNOT_TELL
