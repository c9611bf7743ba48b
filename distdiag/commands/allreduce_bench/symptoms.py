"""What the times show whatever the hardware: a late rank, a fall at large sizes, outliers, drift. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench.words import micros, short, speed
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.allreduce_bench.model import Arrival, Request, SizeResult, Times

_ALL_WAIT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Nobody leaves these before everybody came, so who was short inside came late."""
_LATE_SHARE = 0.3
_LATE_S = 50e-6
"""A rank is late where it came later than the first by this part of the row's time, and by so much at least."""
_OTHERS_SHARE = 0.5
"""And the next latest by no more than this part of it."""
_ENOUGH_FOR_LATE = 10
_LARGE_BYTES = 2**20
_FALL = 0.6
_OUTLIERS = 3.0
_ENOUGH_FOR_P99 = 100
_DRIFT = 1.2
_UNSTEADY = 2.0


@dataclass(frozen=True)
class Late:
    """The rank that is late in most rows."""

    rank: int
    host: str
    rows: int
    of: int
    late_s: float
    share: float
    """Of the time of a row, the median over the rows."""


def late_rank(results: Sequence[SizeResult], arrivals: Sequence[Arrival]) -> Late | None:
    """Find the rank that comes late, the same one in most of the rows; None where there is none."""
    times = {(row.op, row.size_bytes): row.time_s.p50 for row in results if row.time_s and _counts(row)}
    named: list[tuple[Arrival, float]] = []
    rows = 0
    for (op, size), p50 in times.items():
        came = sorted((one for one in arrivals if _is_of(one, op, size)), key=lambda one: one.late_s)
        if len(came) < 2:
            continue
        rows += 1
        latest, next_latest = came[-1], came[-2]
        clear = latest.late_s > max(_LATE_S, _LATE_SHARE * p50)
        if clear and next_latest.late_s < _OTHERS_SHARE * latest.late_s:
            named.append((latest, latest.late_s / p50))
    for rank in {one.rank for one, _ in named}:
        mine = [(one, share) for one, share in named if one.rank == rank]
        if len(mine) > rows / 2:
            late_s, share = median(one.late_s for one, _ in mine), median(share for _, share in mine)
            return Late(rank, mine[0][0].host, len(mine), rows, late_s, share)
    return None


def _counts(row: SizeResult) -> bool:
    return row.op in _ALL_WAIT and row.iterations >= _ENOUGH_FOR_LATE


def _is_of(arrival: Arrival, op: str, size_bytes: int) -> bool:
    # A row's real size may be a little less than what was asked for.
    return arrival.op == op and arrival.size_bytes == size_bytes


def shape_findings(
    request: Request, results: Sequence[SizeResult], arrivals: Sequence[Arrival], *, whole: bool = True
) -> list[Finding]:
    """Name what the rows show; how they vary only if the run is `whole`, and no rank died."""
    late = late_rank(results, arrivals)
    found = [_straggler(request, late)] if late is not None else []
    for op in dict.fromkeys(row.op for row in results):
        mine = [row for row in results if row.op == op and row.time_s is not None]
        found += [*_fall(request, mine), *_outliers(request, mine), *_drift(request, mine)]
    return [*found, *(_unsteady(request, results) if whole else ())]


def _straggler(request: Request, late: Late) -> Finding:
    return Finding(
        id=f"{request.command}.late-rank",
        level=Level.WARN,
        title=f"rank {late.rank} ({late.host}) comes late in {late.rows} of {late.of} rows: by "
        f"{micros(late.late_s)} us, {late.share:.0%} of the time of a row",
        detail="All others wait inside the collective for it, so their time there is longer and its own is short. That "
        "is a slow rank (its CPU, its GPU, another program on it), not a slow link: a link makes all ranks slow alike.",
        where=Where(hosts=(late.host,), ranks=(late.rank,)),
        fix=Fix(
            text="see what else runs there, clocks and temperature; a slow link would show in pairs of ranks",
            commands=(request.pairs(),),
        ),
    )


def _varies(times: Times) -> bool:
    return times.mean > _UNSTEADY * times.p50 or times.iqr > times.p50


def _unsteady(request: Request, results: Sequence[SizeResult]) -> list[Finding]:
    """Rows whose mean is far from their median: what they carry over time is not what the median says."""
    rows = [row for row in results if row.time_s is not None and row.iterations >= _ENOUGH_FOR_LATE]
    bad = [row for row in rows if row.time_s is not None and _varies(row.time_s)]
    if not bad or len(bad) <= len(rows) / 2:
        return []
    worst = max(bad, key=lambda row: row.size_bytes)
    assert worst.time_s is not None
    over_time = (worst.algbw_bytes_per_s or 0.0) * getattr(worst.time_s, request.stat) / worst.time_s.mean
    return [
        Finding(
            id=f"{request.command}.unsteady",
            level=Level.WARN,
            title=f"the times of {len(bad)} of {len(rows)} rows vary so much that a median says little: {worst.op} of "
            f"{short(worst.size_bytes)} has a mean of {micros(worst.time_s.mean)} us, a median of "
            f"{micros(worst.time_s.p50)} us and quartiles {micros(worst.time_s.iqr)} us apart; over time algbw is "
            f"{speed(over_time, request.unit)}",
            detail="A job gets the mean. Ranks that are stopped or throttled, other programs on the same cores, or a "
            "link that comes and goes look so.",
            fix=Fix(
                text="have the bandwidth of the mean shown; see what else runs on these cores",
                commands=(
                    request.again(stat="mean"),
                    "grep -r nr_throttled /sys/fs/cgroup --include=cpu.stat | grep -v ' 0$'",
                ),
            ),
        )
    ]


def _fall(request: Request, rows: list[SizeResult]) -> list[Finding]:
    large = [row for row in rows if row.size_bytes >= _LARGE_BYTES and row.busbw_bytes_per_s]
    if len(large) < 3:
        return []
    best = max(large, key=lambda row: row.busbw_bytes_per_s or 0.0)
    last = max(large, key=lambda row: row.size_bytes)
    assert best.busbw_bytes_per_s is not None
    assert last.busbw_bytes_per_s is not None
    if last.busbw_bytes_per_s >= _FALL * best.busbw_bytes_per_s:
        return []
    on_cpu = " On the CPU that is what caches do." if last.size_bytes <= 2**28 else ""
    return [
        _info(
            request,
            "falls",
            f"{last.op} gets slower where it should get faster: {speed(last.busbw_bytes_per_s, request.unit)} at "
            f"{short(last.size_bytes)}, {speed(best.busbw_bytes_per_s, request.unit)} at {short(best.size_bytes)}",
            "Memory that is paged or far away (NUMA), a link that loses packets, or a switch that is full shows so."
            + on_cpu,
        )
    ]


def _outliers(request: Request, rows: list[SizeResult]) -> list[Finding]:
    bad = [
        row
        for row in rows
        if row.time_s is not None and row.iterations >= _ENOUGH_FOR_P99 and row.time_s.p99 > _OUTLIERS * row.time_s.p50
    ]
    if not bad:
        return []
    worst = max(bad, key=lambda row: row.time_s.p99 / row.time_s.p50 if row.time_s else 0.0)
    assert worst.time_s is not None
    return [
        _info(
            request,
            "outliers",
            f"{worst.op}: one call in a hundred takes {worst.time_s.p99 / worst.time_s.p50:.0f} times as long as the "
            f"others ({short(worst.size_bytes)}: p99 {micros(worst.time_s.p99)} us, p50 {micros(worst.time_s.p50)} us)",
            "Other programs on the same CPUs or link, or retransmissions; a training step waits for the slowest.",
        )
    ]


def _drift(request: Request, rows: list[SizeResult]) -> list[Finding]:
    bad = [row for row in rows if row.drift is not None and row.drift > _DRIFT and row.size_bytes >= _LARGE_BYTES]
    # One row can be chance: somebody else came meanwhile.
    if len(bad) < 2:
        return []
    worst = max(bad, key=lambda row: row.drift or 0.0)
    return [
        _info(
            request,
            "drift",
            f"{worst.op} got slower while it was measured, in {len(bad)} rows: by {(worst.drift or 1) - 1:.0%} at "
            f"{short(worst.size_bytes)}",
            "Throttling (heat, power) looks so, and so does somebody else who came to the link.",
        )
    ]


def _info(request: Request, name: str, title: str, detail: str) -> Finding:
    return Finding(id=f"{request.command}.{name}", level=Level.INFO, title=title, detail=detail)
