"""Pairs of ranks -> Report. Pure: the same answer for recorded facts."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold_within
from distdiag.cluster.rank_runs import Outcome
from distdiag.commands.gpu_test.isolate.classify import classify
from distdiag.commands.gpu_test.isolate.types import STAGES, Classified, Isolated, Kind, Pair, PairResult, PairStatus
from distdiag.diagnosis.wording import counted
from distdiag.launch import rank_report
from distdiag.launch.rank_report import paused
from distdiag.launch.types import Device
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from distdiag.commands.gpu_test.isolate.types import Classification, Request
    from distdiag.launch.record import Inventory, NotStarted, Plan, RunRecord

_SOURCE_LINE = re.compile(r"^\[[^\]]*:\d+\] ")
"""Where in its own source gloo raised an error."""
_SIZE_BYTES = {Device.CPU: 4 * 2**20, Device.CUDA: 64 * 2**20}


def size_for(request: Request, plan: Plan) -> int:
    """Return the bytes that a pair reduces."""
    return request.size_bytes or _SIZE_BYTES[plan.device]


def diagnose(request: Request, scene: Inventory, plan: Plan, course: RunRecord) -> Report[Isolated]:
    """Return the report of a run."""
    reported: list[dict[str, Any]] = next(reversed(rank_report.payloads(course.traces[:1], "pairs")), [])
    pairs = [_pair(fields) for fields in reported]
    host_of = {trace.rank: trace.host for trace in course.traces}
    classification, statuses = classify(pairs, host_of, least_bytes_per_s=request.expected_bytes_per_s)
    finished = course.outcome is Outcome.FINISHED
    data = Isolated(
        **rank_report.facts_of(request, scene, plan, course),
        size_bytes=size_for(request, plan),
        pairs=tuple(
            PairResult(
                a=pair.a,
                b=pair.b,
                level=pair.level,
                busbw_bytes_per_s=pair.busbw_bytes_per_s,
                status=statuses[pair.a, pair.b],
                samples=len(pair.samples),
                wrong=pair.wrong,
                error=pair.error,
            )
            for pair in pairs
        ),
        classification=_classified(classification) if finished else None,
        measuring_s=_measuring(course),
    )
    found = rank_report.findings_of(request, scene, plan, course)
    if finished and plan.nproc > 1:
        found += _finding(request, classification, data)
        found += paused(
            request, course.traces, {trace.rank: rank_report.payloads([trace], "paused") for trace in course.traces}
        )
    interrupted = course.outcome is Outcome.INTERRUPTED
    return Report(
        command=request.command,
        data=data,
        findings=tuple(found),
        summary=_summary(scene, data, classification, found, interrupted=interrupted),
        interrupted=interrupted,
    )


def no_data(request: Request, why: NotStarted, facts: dict[str, Any]) -> Isolated:
    """Return the facts of a run in which no rank was started."""
    return Isolated(**facts, size_bytes=request.size_bytes or 0, pairs=(), classification=None, measuring_s=None)


def _measuring(course: RunRecord) -> float | None:
    steps = [event.elapsed_s for event in course.traces[0].events if event.stage == "pairs"]
    return round(steps[-1] - steps[0], 3) if steps else None


def _pair(fields: dict[str, Any]) -> Pair:
    return Pair(
        a=fields["a"],
        b=fields["b"],
        level=fields["level"],
        samples=tuple(fields["bandwidths"]),
        failed=fields["failed"],
        wrong=fields["wrong"],
        error=_SOURCE_LINE.sub("", fields["error"]),
    )


def _classified(found: Classification) -> Classified:
    fields = asdict(found)
    return Classified(**{name: fields[name] for name in ("kind", "ranks", "hosts", "links", "groups", "reason")})


def _finding(request: Request, found: Classification, data: Isolated) -> list[Finding]:
    if found.kind is Kind.HEALTHY:
        return []
    host_of = {rank.rank: rank.host for rank in data.ranks}
    # A failed pair is a fault, even where the culprit is unknown; a slow pair may be as it should be.
    broken = any(pair.status in (PairStatus.FAILED, PairStatus.WRONG) for pair in data.pairs)
    errors = dict.fromkeys(pair.error for pair in data.pairs if pair.error)
    # Its first line counts pairs that are slow beside others; none is here.
    reason = found.reason[1:] if found.kind is Kind.UNIFORMLY_SLOW else found.reason
    ranks = sorted({*found.ranks, *(end for link in found.links for end in link)})
    return [
        Finding(
            id=f"{request.command}.{found.kind}",
            level=Level.UNKNOWN if found.kind is Kind.UNDECIDABLE and not broken else Level.FAIL,
            title=found.sentence,
            where=Where(
                hosts=tuple(dict.fromkeys([*found.hosts, *(host_of[rank] for rank in ranks)])), ranks=tuple(ranks)
            ),
            evidence=(*reason, *(f"torch: {error}" for error in list(errors)[:2])),
            fix=Fix(text=found.next) if found.next else None,
        )
    ]


def _summary(
    scene: Inventory, data: Isolated, found: Classification, findings: list[Finding], *, interrupted: bool
) -> str:
    measured = sum(pair.busbw_bytes_per_s is not None or pair.status == "failed" for pair in data.pairs)
    pairs = counted(len(data.pairs), "pair")
    so_far = f"{measured} of {pairs} measured"
    wrong = [finding.title for finding in findings if finding.level in (Level.FAIL, Level.UNKNOWN)]
    if interrupted:
        return f"interrupted; {wrong[0] if wrong else rank_report.how_far(data.ranks, STAGES)}; {so_far}"
    if words := rank_report.worst_of(findings):
        return words if data.classification is not None else f"{words}; {so_far}"
    where = fold_within((place.host for place in scene.places), 160)
    if data.world_size == 1:
        return f"a single rank on {where}: no pair to test"
    on = rank_report.ran_on(data.backend, data.device)
    return f"{data.world_size} ranks on {where}, {pairs} ({on}): {found.sentence}"
