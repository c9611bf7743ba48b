"""Measurements and outcomes of the ranks -> rows of times and bandwidths -> Report. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench import findings
from distdiag.commands.allreduce_bench.findings import short, speed
from distdiag.commands.allreduce_bench.formulas import NO_PEER, bus_factor, is_in_place, shape_of
from distdiag.commands.allreduce_bench.types import USUAL, Arrival, Bench, SizeResult, Times, parse_sizes
from distdiag.diagnosis.wording import counted
from distdiag.ids import Shared
from distdiag.launch import rank_report
from distdiag.launch.rank_report import paused, without_core
from distdiag.launch.rank_runs import Outcome
from distdiag.report import Finding, Level, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.records import RowMessage
    from distdiag.commands.allreduce_bench.types import Request
    from distdiag.launch.rank_runs import RankTimeline
    from distdiag.launch.record import Inventory, Plan, RunRecord


def rows_of(
    request: Request, rows: Sequence[tuple[str, int]], traces: Sequence[RankTimeline]
) -> tuple[SizeResult, ...]:
    """Return a row for each collective and size reported by rank 0, measured or skipped."""
    reported = [_reported_rows(trace) for trace in traces]
    return tuple(
        _row(request, op, size_bytes, [by_number[number] for by_number in reported if number in by_number], len(traces))
        for number, (op, size_bytes) in enumerate(rows, 1)
        if reported and number in reported[0]
    )


def arrivals_of(rows: Sequence[tuple[str, int]], traces: Sequence[RankTimeline]) -> tuple[Arrival, ...]:
    """Return for each row and rank its delay in entering the collective."""
    reported = [(trace, _reported_rows(trace)) for trace in traces]
    return tuple(
        Arrival(
            rank=trace.rank,
            host=trace.host,
            op=op,
            size_bytes=size_bytes,
            inside_s=own[number]["inside_ns"] * 1e-9,
            late_s=own[number]["late_ns"] * 1e-9,
        )
        for number, (op, size_bytes) in enumerate(rows, 1)
        for trace, own in reported
        if number in own and "inside_ns" in own[number]
    )


def times_of(seconds: Sequence[float]) -> Times:
    """Return statistics over at least one time."""
    ordered = sorted(seconds)
    n = len(ordered)
    return Times(
        p50=ordered[n // 2],
        p99=_nearest(ordered, 99),
        min=ordered[0],
        max=ordered[-1],
        mean=math.fsum(ordered) / n,
        iqr=_nearest(ordered, 75) - _nearest(ordered, 25),
    )


def _reported_rows(trace: RankTimeline) -> dict[int, RowMessage]:
    return {event.payload["row"]["number"]: event.payload["row"] for event in trace.events if "row" in event.payload}


def _row(request: Request, op: str, size_bytes: int, told: list[RowMessage], world_size: int) -> SizeResult:
    first = told[0]
    shape = shape_of(op, size_bytes, request.dtype, world_size)
    seconds = [time_ns * 1e-9 for time_ns in first.get("times_ns", ())]
    times = times_of(seconds) if seconds else None
    algbw = shape.size_bytes / float(getattr(times, request.stat)) if times else None
    wrong = [count for row in told if (count := row.get("wrong")) is not None]
    return SizeResult(
        op=op,
        size_bytes=shape.size_bytes,
        count=shape.count,
        dtype=request.dtype,
        in_place=is_in_place(op, request.in_place),
        iterations=len(seconds),
        time_s=times,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if algbw is None else algbw * bus_factor(op, world_size),
        wrong=sum(wrong) if wrong else None,
        skipped=str(first.get("skipped", "")),
    )


def _nearest(ordered: list[float], percent: int) -> float:
    return ordered[max(0, min(len(ordered) - 1, math.ceil(len(ordered) * percent / 100) - 1))]


def rows_for(request: Request, device: str) -> list[tuple[str, int]]:
    """List the (collective, bytes) to measure, grouped by collective."""
    sizes = request.sizes or parse_sizes(USUAL[device])
    return [(op, size) for op in request.ops for size in sizes]


def diagnose(request: Request, scene: Inventory, plan: Plan, course: RunRecord) -> Report[Bench]:
    """Judge a run."""
    rows = rows_for(request, plan.device)
    results = rows_of(request, rows, course.traces)
    arrivals = arrivals_of(rows, course.traces)
    device_name = rank_report.started(course.traces).get("device_name")
    expected = findings.expectation(plan, scene, device_name, results)
    here = device_name if device_name not in (None, "cpu") else str(plan.device)
    differs = findings.differs(request.baseline, plan.nproc, here) if request.baseline is not None else ""
    compared = findings.compare(request.baseline, results) if request.baseline is not None and not differs else ()
    data = Bench(
        **vars(rank_report.facts_of(request, scene, plan, course)),
        device_name=device_name,
        nodes=len(plan.machines),
        stat=request.stat,
        results=results,
        arrivals=arrivals,
        verdict=expected,
        compared=compared,
        no_core_share=round(without_core(course.traces), 3),
    )
    found = [
        *rank_report.findings_of(request, scene, plan, course),
        *_not_measured(request, results, course.outcome),
        *paused(request, course.traces),
        *findings.shape_findings(request, results, arrivals, whole=course.outcome is Outcome.FINISHED),
        *findings.hardware_findings(request, expected),
    ]
    if request.baseline is not None and results:
        found += findings.comparison_findings(request, request.baseline, differs, compared, data.no_core_share)
    measured = sum(row.time_s is not None for row in results)
    return rank_report.concluded(
        request,
        scene,
        course.outcome,
        data,
        found,
        passed=lambda hosts: _passed(data, hosts),
        so_far="" if measured == len(rows) else f"; {measured} of {counted(len(rows), 'row')} measured",
    )


def repeated(request: Request, report: Report[Bench], again: Bench) -> Report[Bench]:
    """Judge a run together with its repetition of slower rows: the better time of each row counts."""
    assert request.baseline is not None
    better = {(row.op, row.size_bytes): row for row in again.compared}
    compared = tuple(
        min(row, better.get((row.op, row.size_bytes), row), key=lambda timed: timed.ratio)
        for row in report.data.compared
    )
    found = [finding for finding in report.findings if finding.id != f"{request.command}.slower"]
    no_core = max(report.data.no_core_share, again.no_core_share)
    found += findings.comparison_findings(request, request.baseline, "", compared, no_core)
    still = sum(row.slower for row in compared)
    words = rank_report.worst_of(found) or (
        f"{report.data.world_size} ranks: "
        + (f"{still} of {len(compared)} rows stay" if still else "no row stays")
        + " slower than in the earlier run"
        + "".join(f"; but {finding.title}" for finding in found if finding.level is Level.WARN)
    )
    data = replace(report.data, compared=compared, no_core_share=no_core)
    return replace(report, data=data, findings=tuple(found), summary=words)


def _not_measured(request: Request, results: tuple[SizeResult, ...], outcome: Outcome) -> list[Finding]:
    """Return a finding for each reason to skip rows."""
    reasons: dict[tuple[Shared, str], list[SizeResult]] = {}
    for row in results:
        if row.skipped:
            kind = Shared.ALONE if row.skipped == NO_PEER else Shared.UNSUPPORTED
            kind = Shared.TOO_LARGE if "bytes" in row.skipped else kind
            reasons.setdefault((kind, row.skipped if kind is not Shared.TOO_LARGE else ""), []).append(row)
    found = [
        Finding(
            id=kind.of(request.command),
            level=Level.WARN if kind is Shared.UNSUPPORTED else Level.INFO,
            title=f"not measured: {', '.join(f'{row.op} {short(row.size_bytes)}' for row in group)}",
            detail=group[0].skipped,
        )
        for (kind, _), group in reasons.items()
    ]
    if all(row.skipped for row in results) and (results or outcome is Outcome.FINISHED):
        nothing = "nothing could be measured"
        found.append(Finding(id=Shared.NOTHING_MEASURED.of(request.command), level=Level.UNKNOWN, title=nothing))
    return found


def _passed(data: Bench, hosts: str) -> str:
    if data.world_size == 1:
        return f"a single rank on {hosts}: it sends nothing, so busbw is 0 by definition"
    sizes = [(row.size_bytes, row.busbw_bytes_per_s, row.op) for row in data.results if row.busbw_bytes_per_s]
    size_bytes, busbw, op = max(sizes)
    on = rank_report.ran_on(data.backend, data.device_name or data.device)
    passed = f"{data.world_size} ranks on {hosts}: {op} of {short(size_bytes)} at busbw {speed(busbw)} ({on})"
    if not data.compared or any(row.slower for row in data.compared):
        return passed
    return f"{passed}; none of {counted(len(data.compared), 'row')} is slower than in the earlier run"
