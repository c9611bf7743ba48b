"""What the ranks told -> rows with times and bandwidths. Pure.

Statistics as nccl-tests has them (src/common.cu): p50 = sorted[n / 2], p99 by nearest rank; the time of an iteration is
the slowest rank's. Bandwidth = size / time, never a mean of bandwidths: 19 times 1 ms and once 20 ms are not 64 GB/s.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench.formulas import bus_factor, is_in_place, shape_of
from distdiag.commands.allreduce_bench.model import Arrival, SizeResult, Times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.launch import Trace
    from distdiag.cluster.records import RowTold
    from distdiag.commands.allreduce_bench.model import Request, Stat

_ENOUGH_FOR_DRIFT = 20


def rows_of(request: Request, rows: Sequence[tuple[str, int]], traces: Sequence[Trace]) -> tuple[SizeResult, ...]:
    """Give a row for each collective and size that rank 0 told the times of, or why there are none."""
    told = [_told(trace) for trace in traces]
    world_size = len(traces)
    found = []
    for number, (op, size_bytes) in enumerate(rows, 1):
        mine = [one[number] for one in told if number in one]
        first = told[0].get(number) if told else None
        if first is not None:
            found.append(_row(request, op, size_bytes, world_size, (first, mine)))
    return tuple(found)


def arrivals_of(rows: Sequence[tuple[str, int]], traces: Sequence[Trace]) -> tuple[Arrival, ...]:
    """Give for each row and rank how it came to the collective."""
    return tuple(
        Arrival(
            rank=trace.rank,
            host=trace.host,
            op=op,
            size_bytes=size_bytes,
            inside_s=row["inside_ns"] * 1e-9,
            late_s=row["late_ns"] * 1e-9,
        )
        for number, (op, size_bytes) in enumerate(rows, 1)
        for trace in traces
        if (row := _told(trace).get(number)) is not None and "inside_ns" in row
    )


def times_of(seconds: Sequence[float]) -> Times:
    """Give the statistics of at least one time."""
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


def bandwidths(op: str, size_bytes: int, world_size: int, seconds: float) -> tuple[float, float]:
    """Give algbw and busbw in bytes per second."""
    algbw = size_bytes / seconds
    return algbw, algbw * bus_factor(op, world_size)


def chosen(times: Times, stat: Stat) -> float:
    """Give the time that stands for a row."""
    return float(getattr(times, stat))


def _told(trace: Trace) -> dict[int, RowTold]:
    return {event.payload["row"]["number"]: event.payload["row"] for event in trace.events if "row" in event.payload}


def _row(
    request: Request, op: str, size_bytes: int, world_size: int, told: tuple[RowTold, list[RowTold]]
) -> SizeResult:
    first, all_ranks = told
    shape = shape_of(op, size_bytes, request.dtype, world_size)
    seconds = [one * 1e-9 for one in first.get("times_ns", ())]
    times = times_of(seconds) if seconds else None
    algbw, busbw = bandwidths(op, shape.size_bytes, world_size, chosen(times, request.stat)) if times else (None, None)
    wrong = [count for row in all_ranks if (count := row.get("wrong")) is not None]
    return SizeResult(
        op=op,
        size_bytes=shape.size_bytes,
        count=shape.count,
        dtype=request.dtype,
        in_place=is_in_place(op, request.in_place),
        iterations=len(seconds),
        time_s=times,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=busbw,
        wrong=sum(wrong) if wrong else None,
        drift=_drift(seconds),
        skipped=str(first.get("skipped", "")),
    )


def _drift(seconds: list[float]) -> float | None:
    quarter = len(seconds) // 4
    if len(seconds) < _ENOUGH_FOR_DRIFT:
        return None
    return times_of(seconds[-quarter:]).p50 / times_of(seconds[:quarter]).p50


def _nearest(ordered: list[float], percent: int) -> float:
    return ordered[max(0, min(len(ordered) - 1, math.ceil(len(ordered) * percent / 100) - 1))]
