"""What allreduce-bench does with ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.commands.allreduce_bench import diagnose
from distdiag.commands.allreduce_bench.diagnose import rows_for
from distdiag.commands.allreduce_bench.formulas import BOTH_WAYS, ONLY_IN_PLACE
from distdiag.commands.allreduce_bench.measured import rows_of
from distdiag.commands.allreduce_bench.words import row_in_words
from distdiag.errors import UsageError
from distdiag.workload.job import Job

if TYPE_CHECKING:
    from distdiag.cluster.launch import Run
    from distdiag.commands.allreduce_bench.model import Bench, Request
    from distdiag.deliver import Progress
    from distdiag.workload.record import Plan, Share


def job_of(request: Request) -> Job[Request, Bench]:
    """Say what the benchmark runs and means. Raises UsageError where the request contradicts itself."""
    _check_forms(request)
    return Job(
        request=request,
        rank="distdiag.commands.allreduce_bench.rank",
        config=_config,
        diagnose=diagnose.diagnose,
        no_data=diagnose.no_data,
        tell=_Teller(request).tell,
    )


def _check_forms(request: Request) -> None:
    if request.in_place is None:
        return
    bad = [op for op in request.ops if op not in BOTH_WAYS and (op in ONLY_IN_PLACE) is not request.in_place]
    if bad:
        form, other = ("an in-place", "out of place") if request.in_place else ("an out-of-place", "in place")
        raise UsageError(
            f"torch has no {form.partition(' ')[2]} form of {', '.join(bad)}",
            hint=f"it works {other}: leave the option out, or choose {' or '.join(BOTH_WAYS)}",
        )


def _config(request: Request, plan: Plan, share: Share, rank: int) -> dict[str, Any]:
    fault = request.fault
    rows = rows_for(request, plan.device)
    if fault is not None and fault.row > len(rows):
        raise UsageError(f"--inject names row {fault.row}, and there are {len(rows)}", hint=f"1 to {len(rows)}")
    mine = fault is not None and fault.rank == rank
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
        "fault": {"kind": fault.kind, "row": fault.row} if fault is not None and mine else None,
    }


class _Teller:
    """Says each row as soon as it is measured."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._told = 0
        self._so_far = ""

    def tell(self, run: Run, progress: Progress) -> str:
        """Say what is new; gives the last row and how many there are."""
        zero = run.traces[0]
        if sum("row" in event.payload for event in zero.events) <= self._told:
            return self._so_far
        device = str(next(event.payload["started"]["device"] for event in zero.events if "started" in event.payload))
        rows = rows_for(self._request, device.partition(":")[0])
        measured = rows_of(self._request, rows, list(run.traces.values()))
        if not measured:
            return self._so_far
        for row in measured[self._told :]:
            progress.news(row_in_words(row, self._request.unit))
        self._told = len(measured)
        self._so_far = f"{len(measured)} of {len(rows)} rows, {row_in_words(measured[-1], self._request.unit)}"
        return self._so_far
