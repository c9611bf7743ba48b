"""Runs allreduce-bench on ranks; repeated runs are judged together, and compared with an earlier run if given."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag import __version__
from distdiag.commands.allreduce_bench import diagnose, earlier, table
from distdiag.commands.allreduce_bench.diagnose import rows_for, rows_of
from distdiag.commands.allreduce_bench.findings import format_row
from distdiag.commands.allreduce_bench.formulas import BOTH_WAYS, ONLY_IN_PLACE
from distdiag.commands.allreduce_bench.types import Bench, FaultKind, Request
from distdiag.commands.allreduce_bench.view import bench_view
from distdiag.diagnosis.wording import counted
from distdiag.errors import UsageError
from distdiag.facts.process.rank_identity import identify
from distdiag.launch import rank_report, runner
from distdiag.launch.record import Job, SavedRun
from distdiag.report import Level
from distdiag.saved_facts import Gathered, are_facts, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.allreduce_bench.types import Baseline
    from distdiag.launch.rank_runs import Run
    from distdiag.launch.record import Allocation, Plan
    from distdiag.output import Progress
    from distdiag.report import Report
    from distdiag.runner import Subcommand


def job_of(request: Request) -> Job[Request, Bench]:
    """Return the job of the ranks and its diagnosis. Raises UsageError for contradictory options."""
    _check_forms(request)
    return Job(
        request=request,
        rank="distdiag.commands.allreduce_bench.rank",
        config=_config,
        diagnose=diagnose.diagnose,
        data=Bench,
        report_progress=_RowReporter(request).report,
    )


def _check_forms(request: Request) -> None:
    if request.in_place is None:
        return
    bad = [op for op in request.ops if op not in BOTH_WAYS and (op in ONLY_IN_PLACE) is not request.in_place]
    if bad:
        form, other = ("an in-place", "out of place") if request.in_place else ("an out-of-place", "in place")
        raise UsageError(
            f"torch has no {form.partition(' ')[2]} form of {', '.join(bad)}",
            hint=f"it runs {other}: leave the option out, or choose {' or '.join(BOTH_WAYS)}",
        )


def _config(request: Request, plan: Plan, share: Allocation, rank: int) -> dict[str, object]:
    fault = request.fault
    rows = rows_for(request, plan.device)
    row = int(fault.place or 1) if fault is not None else 1
    if row > len(rows):
        raise UsageError(
            f"--inject names row {row}, but there are {counted(len(rows), 'row')}", hint=f"use 1 to {len(rows)}"
        )
    mine = fault is not None and rank in fault.ranks
    return {
        "rows": [{"op": op, "size_bytes": size} for op, size in rows],
        "dtype": request.dtype,
        "warmup": request.warmup,
        "iterations": request.iterations,
        "min_time_s": request.min_time_s,
        "in_place": request.in_place,
        "check": request.check,
        "sharing": share.sharing,
        "local_world_size": share.local_world_size,
        "fault": {"kind": fault.kind, "row": row} if fault is not None and mine else None,
    }


class _RowReporter:
    """Reports each row once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._reported = 0
        self._so_far = ""

    def report(self, run: Run, progress: Progress) -> str:
        """Report new rows; return the last row and the count."""
        traces = list(run.traces.values())
        if len(rank_report.payloads(traces[:1], "row")) > self._reported:
            device = str(rank_report.started(traces[:1])["device"])
            rows = rows_for(self._request, device.partition(":")[0])
            measured = rows_of(self._request, rows, traces)
            for row in measured[self._reported :]:
                progress.news(format_row(row))
            self._reported = len(measured)
            self._so_far = f"{len(measured)} of {len(rows)} rows, {format_row(measured[-1])}"
        return self._so_far


_REPEATS = 3


def subcommand() -> Subcommand[Request, SavedRun, Bench]:
    """Return the command."""
    made = runner.subcommand(Request.command, Request, job_of, lambda _, report: bench_view(report))
    return replace(
        made,
        collect=_collect,
        diagnose=_diagnose,
        shown_as_typed=("stat", "baseline"),
    )


def _collect(request: Request, progress: Progress) -> Gathered[SavedRun]:
    """Measure; repeat rows that were slower than in the earlier run: only rows that stay slower count.

    Two identical runs differ by more than the spread of their iterations, since the placement of memory and cores
    varies.
    """
    if table.is_alone(request):
        return Gathered(facts=[])
    me = identify(os.environ)
    runs = [runner.carry_out(job_of(request), progress)]
    try:
        while (me is None or me.world_size == 1) and len(runs) <= _REPEATS:  # a launcher's other ranks have exited
            again = _slower(request, _judged(request, runs))
            if again is None:
                break
            progress.news(f"measuring {counted(len(again.ops), 'operation')} with slower rows again")
            run = runner.carry_out(job_of(again), progress)
            if rank_report.report_of(job_of(again), run).interrupted:
                return Gathered(facts=runs, interrupted=True)
            runs.append(run)
    except KeyboardInterrupt:
        return Gathered(facts=runs, interrupted=True)
    return Gathered(facts=runs)


def _diagnose(request: Request, gathered: Gathered[SavedRun]) -> Report[Bench]:
    report = _judged(request, gathered.facts)
    if not gathered.interrupted:
        return report
    once = f"{request.command}.slower"  # not measured again
    found = tuple(replace(each, level=Level.WARN) if each.id == once else each for each in report.findings)
    return replace(report, findings=found, interrupted=True)


def _judged(request: Request, runs: Sequence[SavedRun]) -> Report[Bench]:
    if not runs:
        return table.judge(request)
    report = rank_report.report_of(job_of(request), runs[0])
    for run in runs[1:]:
        again = _slower(request, report)
        if again is None:  # compared with another run than at the time of measurement
            break
        report = diagnose.repeated(request, report, rank_report.report_of(job_of(again), run).data)
    return report


def _slower(request: Request, report: Report[Bench]) -> Request | None:
    """Return a request for the rows slower than in the earlier run, None if none."""
    slower = [row for row in report.data.compared if row.slower]
    if not slower or report.interrupted:
        return None
    again = request.fault if request.fault is not None and request.fault.kind == FaultKind.SLOW else None
    ops = tuple(dict.fromkeys(row.op for row in slower))
    sizes = tuple(dict.fromkeys(row.size_bytes for row in slower))
    return replace(request, ops=ops, sizes=sizes, fault=again)


def read_baseline(compare: str) -> Baseline | None:
    """Read the run to compare with. Raises UsageError, DistdiagError."""
    me = identify(os.environ)
    if not compare or (me is not None and me.rank != 0):  # rank 0 reads it, on its own node
        return None
    if not are_facts([compare]):
        return earlier.read(compare)
    request, gathered = read([compare], Request.command, (Request, SavedRun))
    assert request is not None
    return earlier.checked(earlier.of_run(_judged(request, gathered.facts).data, __version__), compare)
