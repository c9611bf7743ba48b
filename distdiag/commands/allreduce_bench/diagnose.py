"""The rows and how the ranks fared -> Report. Pure: the same answer for recorded facts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold
from distdiag.cluster.launch import Outcome
from distdiag.commands.allreduce_bench import compare, symptoms, verdict
from distdiag.commands.allreduce_bench.measured import arrivals_of, rows_of
from distdiag.commands.allreduce_bench.model import STAGES, Bench, SizeResult
from distdiag.commands.allreduce_bench.sizes import USUAL, parse_sizes
from distdiag.commands.allreduce_bench.words import short, speed
from distdiag.report import Finding, Level, Report
from distdiag.workload import judge
from distdiag.workload.pauses import paused, without_core

if TYPE_CHECKING:
    from distdiag.cluster.records import PausedTold
    from distdiag.commands.allreduce_bench.model import Request
    from distdiag.workload.record import Course, NotRun, Plan, Scene


def rows_for(request: Request, device: str) -> list[tuple[str, int]]:
    """List what is to be measured, collectives one after the other."""
    sizes = request.sizes or parse_sizes(USUAL[device])
    return [(op, size) for op in request.ops for size in sizes]


def diagnose(request: Request, scene: Scene, plan: Plan, course: Course) -> Report[Bench]:
    """Say what the run shows."""
    rows = rows_for(request, plan.device)
    results = rows_of(request, rows, course.traces)
    arrivals = arrivals_of(rows, course.traces)
    device_name = judge.started(course.traces).get("device_name")
    expected = verdict.expectation(plan, scene, device_name, results)
    here = device_name if device_name not in (None, "cpu") else str(plan.device)
    differs = compare.differs(request.baseline, plan.nproc, here) if request.baseline is not None else ""
    compared = compare.compare(request.baseline, results) if request.baseline is not None and not differs else ()
    data = Bench(
        **judge.facts_of(request, scene, plan, course),
        device_name=device_name,
        nodes=len(plan.machines),
        stat=request.stat,
        results=results,
        arrivals=arrivals,
        verdict=expected,
        compared=compared,
        no_core_share=round(without_core(_pauses(course)), 3),
        training=verdict.training(request, plan, scene, results),
    )
    found = [
        *judge.findings_of(request, scene, plan, course),
        *_not_measured(request, results),
        *paused(request, course.traces, _pauses(course)),
        *symptoms.shape_findings(request, results, arrivals, whole=course.outcome is Outcome.FINISHED),
        *verdict.hardware_findings(request, expected),
    ]
    if request.baseline is not None and results:
        found += compare.comparison_findings(request, request.baseline, differs, compared, data.no_core_share)
    interrupted = course.outcome is Outcome.INTERRUPTED
    return Report(
        command=request.command,
        data=data,
        findings=tuple(found),
        summary=_summary(request, scene, data, found, len(rows), interrupted=interrupted),
        interrupted=interrupted,
    )


def repeated(request: Request, report: Report[Bench], again: Bench) -> Report[Bench]:
    """Judge the same run again where slower rows were repeated: of each row the better of its times counts."""
    assert request.baseline is not None
    better = {(row.op, row.size_bytes): row for row in again.compared}
    compared = tuple(
        min(row, better.get((row.op, row.size_bytes), row), key=lambda one: one.ratio) for row in report.data.compared
    )
    found = [finding for finding in report.findings if finding.id != f"{request.command}.slower"]
    no_core = max(report.data.no_core_share, again.no_core_share)
    found += compare.comparison_findings(request, request.baseline, "", compared, no_core)
    still = sum(row.slower for row in compared)
    words = judge.worst_of(found) or (
        f"{report.data.world_size} ranks: "
        + (f"{still} of {len(compared)} rows stay" if still else "no row stays")
        + " slower than in the earlier run"
        + "".join(f"; but {finding.title}" for finding in found if finding.level is Level.WARN)
    )
    data = replace(report.data, compared=compared, no_core_share=no_core)
    return replace(report, data=data, findings=tuple(found), summary=words)


def _pauses(course: Course) -> dict[int, list[PausedTold]]:
    return {
        trace.rank: [row["paused"] for row in judge.payloads([trace], "row") if "paused" in row]
        for trace in course.traces
    }


def no_data(request: Request, why: NotRun, facts: dict[str, Any]) -> Bench:
    """Give the facts of a run in which no rank was started."""
    return Bench(
        **facts,
        device_name=None,
        nodes=len(why.scene.places),
        stat=request.stat,
        results=(),
        arrivals=(),
        verdict=None,
        compared=(),
        no_core_share=0.0,
        training=(),
    )


def _not_measured(request: Request, results: tuple[SizeResult, ...]) -> list[Finding]:
    """Rows that were passed over, one finding for each reason."""
    reasons: dict[tuple[str, str], list[SizeResult]] = {}
    for row in results:
        if row.skipped:
            kind = "too-large" if "bytes" in row.skipped else "alone" if "nobody" in row.skipped else "unsupported"
            reasons.setdefault((kind, row.skipped if kind != "too-large" else ""), []).append(row)
    found = [
        Finding(
            id=f"{request.command}.{kind}",
            level=Level.WARN if kind == "unsupported" else Level.INFO,
            title=f"not measured: {', '.join(f'{row.op} {short(row.size_bytes)}' for row in group)}",
            detail=group[0].skipped,
        )
        for (kind, _), group in reasons.items()
    ]
    if results and all(row.skipped for row in results):
        nothing = "nothing could be measured"
        found.append(Finding(id=f"{request.command}.nothing-measured", level=Level.UNKNOWN, title=nothing))
    return found


def _summary(
    request: Request, scene: Scene, data: Bench, found: list[Finding], asked: int, *, interrupted: bool
) -> str:
    measured = [row for row in data.results if row.time_s is not None]
    so_far = f"{len(measured)} of {asked} rows were measured"
    if interrupted:
        wrong = [finding.title for finding in found if finding.level in (Level.FAIL, Level.UNKNOWN)]
        return f"interrupted; {wrong[0] if wrong else judge.how_far(data.ranks, STAGES)}; {so_far}"
    if wrong_words := judge.worst_of(found):
        return wrong_words if len(measured) == asked else f"{wrong_words}; {so_far}"
    where = fold(dict.fromkeys(place.host for place in scene.places))
    if data.world_size == 1:
        return f"one rank on {where} sends nothing: busbw is 0 by definition, and means nothing"
    best = max(measured, key=lambda row: (row.size_bytes, row.busbw_bytes_per_s or 0.0))
    warnings = "".join(f"; but {finding.title}" for finding in found if finding.level is Level.WARN)
    return (
        f"{data.world_size} ranks on {where}: {best.op} of {short(best.size_bytes)} at busbw "
        f"{speed(best.busbw_bytes_per_s or 0.0, request.unit)} ({data.backend}, {data.device_name or data.device})"
        f"{warnings}"
    )
