"""From what every source says on its own to one verdict that all of them can bear. Pure.

A rank that is gone or stopped is a fact, whoever reports it. What a recorder has of calls that do not fit together
explains why all ranks wait. Then come stacks, NCCL's counters and the log, and last what /proc leaves over. Where two
sure sources accuse different ranks, nobody is blamed: both are named, with the experiment that tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distdiag.commands.hang.claims import all_claims, availability, has_gpu, seconds_of
from distdiag.commands.hang.types import HangClass, Source, SourceRow, Stand
from distdiag.diagnosis.outliers import Outcome
from distdiag.diagnosis.stack_classes import StackClass
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.commands.hang.claims import Claim, Evidence

_STATES = (HangClass.EXITED, HangClass.STOPPED)
_CALLS = (HangClass.DIFFERENT_COLLECTIVES, HangClass.SIZE_MISMATCH, HangClass.DEADLOCK, HangClass.DEVICE)
_GOES_ON = (HangClass.SLOW, HangClass.BUSY, HangClass.COMPILE)
"""What ends on its own unless the timeout comes first: a warning, never a failure."""
_ENDED = ("the job has ended", "its launcher is about to start it again")
_ORDER = (Source.STACKS, Source.RAS, Source.RECORDER, Source.LOG, Source.KERNEL, Source.WAITS)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The verdict on one job. `claim`: the one it rests on; `others`: those that bear it; `against`: those that do not.

    `candidates`: where it is unknown, what it may be, the likeliest first.
    """

    evidence: Evidence
    claims: Mapping[Source, Claim]
    class_name: HangClass
    level: Level
    claim: Claim | None = None
    accused: frozenset[int] = frozenset()
    against: tuple[Claim, ...] = ()
    candidates: tuple[str, ...] = ()

    def bearing(self) -> list[Claim]:
        """List the claims of other sources that accuse the same."""
        return [
            claim
            for claim in self.claims.values()
            if claim is not self.claim and claim.accused & self.accused and claim not in self.against
        ]


def join(evidence: Evidence) -> Joined:
    """Join what all sources say of one job."""
    claims = all_claims(evidence)
    if all(state.thread.kind is StackClass.EXITED for state in evidence.stacks.states):
        return _made(evidence, claims, HangClass.UNKNOWN, Level.UNKNOWN, None, candidates=_ENDED)
    if Source.STACKS in claims and claims[Source.STACKS].class_name is HangClass.RENDEZVOUS:
        claim = claims[Source.STACKS]
        if claim.is_sure:
            return _made(evidence, claims, HangClass.RENDEZVOUS, Level.FAIL, claim)
        candidates = (claim.says, "a rank that cannot reach the others")
        return _made(evidence, claims, HangClass.UNKNOWN, Level.UNKNOWN, None, candidates=candidates)
    moves = Source.STACKS in claims and claims[Source.STACKS].class_name is HangClass.NOT_HUNG
    accusing = [claim for claim in _in_order(claims) if _counts(claim, moves=moves)]
    if accusing:
        return _accused(evidence, claims, accusing, moves=moves)
    if moves:
        return _made(evidence, claims, HangClass.NOT_HUNG, Level.INFO, claims[Source.STACKS])
    return _nobody(evidence, claims)


def _in_order(claims: Mapping[Source, Claim]) -> list[Claim]:
    """Sort claims, those first that are facts of a process, then those that explain why all wait."""

    def place(claim: Claim) -> tuple[int, int]:
        of_states = claim.class_name in _STATES and claim.source in (Source.STACKS, Source.WAITS)
        of_calls = claim.class_name in _CALLS and claim.source is Source.RECORDER
        return 0 if of_states else 1 if of_calls else 2, _ORDER.index(claim.source)

    return sorted((claim for source, claim in claims.items() if source in _ORDER), key=place)


def _counts(claim: Claim, *, moves: bool) -> bool:
    """Return whether a claim names somebody, and is not explained otherwise.

    Of a job that goes on, dumps are of different moments: that a rank has not called something yet is no fault.
    """
    if not claim.accused or claim.class_name is None or not (claim.is_sure or claim.class_name is HangClass.SLOW):
        return False
    return not moves or (claim.source is Source.RECORDER and claim.class_name in (*_CALLS[:2], HangClass.SLOW))


def _accused(evidence: Evidence, claims: Mapping[Source, Claim], accusing: Sequence[Claim], *, moves: bool) -> Joined:
    first, *rest = accusing
    accused = first.accused
    against = []
    for claim in rest:
        if claim.accused & first.accused:
            # Both can bear those whom both accuse, and stacks know best who only waits.
            common = claim.accused & accused
            accused = common if common and claim.is_sure and first.source is not Source.STACKS else accused
        else:
            against.append(claim)
    is_fact = first.class_name in _STATES
    if (against and not is_fact) or (moves and first.class_name is not HangClass.SLOW):
        others = against or [claims[Source.STACKS]]
        candidates = tuple(dict.fromkeys(_candidate(claim) for claim in [first, *others]))[:2]
        return _made(
            evidence, claims, HangClass.UNKNOWN, Level.UNKNOWN, None, against=tuple(others), candidates=candidates
        )
    assert first.class_name is not None
    goes_on = first.class_name in _GOES_ON or (first.source is Source.STACKS and evidence.stacks.only_slow)
    level = Level.WARN if goes_on else Level.FAIL
    return _made(evidence, claims, first.class_name, level, first, accused=accused, against=tuple(against))


def _nobody(evidence: Evidence, claims: Mapping[Source, Claim]) -> Joined:
    """Nobody is accused: everybody waits in the same place, or is outside of it, or the evidence is thin."""
    recorder, kernel = claims.get(Source.RECORDER), claims.get(Source.KERNEL)
    in_flight = recorder is not None and recorder.class_name is HangClass.NETWORK
    lost = kernel is not None and kernel.class_name is HangClass.NETWORK
    device = kernel is not None and kernel.class_name is HangClass.DEVICE
    stacks = evidence.stacks
    if evidence.restarts and stacks.outcome not in (Outcome.ALL_WAITING, Outcome.LEAST_PROGRESS):
        return _made(evidence, claims, HangClass.RESTART, Level.UNKNOWN, claims.get(Source.LOG))
    if lost:
        return _made(evidence, claims, HangClass.NETWORK, Level.FAIL, kernel)
    # Dumps of a job that runs look the same: that it stands still is for the stacks to say.
    if in_flight and not has_gpu(evidence) and stacks.outcome in (Outcome.ALL_WAITING, Outcome.LEAST_PROGRESS):
        return _made(evidence, claims, HangClass.NETWORK, Level.FAIL, recorder)
    if device and (in_flight or stacks.outcome is Outcome.ALL_WAITING):
        return _made(evidence, claims, HangClass.DEVICE, Level.FAIL, kernel)
    if recorder is not None and recorder.class_name is HangClass.OUTSIDE and stacks.outcome is Outcome.STANDSTILL:
        return _made(evidence, claims, HangClass.OUTSIDE, Level.UNKNOWN, recorder)
    suspects = [claim for claim in claims.values() if claim.accused and claim.class_name is not None]
    candidates = tuple(map(_candidate, suspects[:2]))
    candidates = candidates or _open_candidates(evidence, in_flight=in_flight)
    return _made(evidence, claims, HangClass.UNKNOWN, Level.UNKNOWN, None, candidates=candidates)


def _candidate(claim: Claim) -> str:
    return f"{claim.says} ({claim.source})"


def _open_candidates(evidence: Evidence, *, in_flight: bool) -> tuple[str, ...]:
    if in_flight:
        return ("a GPU that does not finish its kernel", "the network between the nodes")
    if evidence.stacks.outcome is Outcome.ALL_WAITING:
        hosts = {member.host for member in evidence.job.members}
        between = "the network between the nodes" if len(hosts) > 1 else "the connections between the ranks"
        between += " or a GPU" if has_gpu(evidence) else ""
        return ("mismatched calls (another collective, group or size on some ranks)", between)
    if any(state.thread.kind is StackClass.GIL for state in evidence.stacks.states):
        return (
            "a deadlock between that thread and a thread that needs the GIL",
            "a long call into C++ that keeps the GIL",
        )
    if evidence.stacks.outcome in (Outcome.STANDSTILL, Outcome.ALONE):
        return ("the job waits for something outside of it", "it is starting or ending")
    return ("a rank that was not read holds up the others", "a rank on a host that was not asked does")


def _made(
    evidence: Evidence,
    claims: Mapping[Source, Claim],
    class_name: HangClass,
    level: Level,
    claim: Claim | None,
    **more: Any,  # noqa: ANN401 - the other fields of Joined
) -> Joined:
    return Joined(evidence=evidence, claims=claims, class_name=class_name, level=level, claim=claim, **more)


def source_rows(joined: Joined) -> tuple[SourceRow, ...]:
    """Return how each source stands to the verdict."""
    missing = availability(joined.evidence)
    rows = []
    for source in Source:
        seconds = seconds_of(joined.evidence, source)
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
    if joined.claim is not None and claim.class_name is not None:
        if joined.accused and claim.accused & joined.accused:
            return Stand.AGREES
        if not joined.accused and claim.class_name is joined.class_name:
            return Stand.AGREES
    return Stand.CANNOT_TELL
