"""Findings about bandwidth: a late rank, a drop at large sizes, slow for the hardware, slower than an earlier run.
Pure."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench.types import GIGA, Compared, Expectation
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import counted, format_size
from distdiag.knowledge.bandwidth import tables
from distdiag.knowledge.busbw import Case, Judgement
from distdiag.launch.types import Device
from distdiag.report import Finding, Level, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.allreduce_bench.types import Arrival, Baseline, Request, SizeResult, Times
    from distdiag.launch.record import Inventory, Plan


def speed(bytes_per_s: float) -> str:
    """Format a bandwidth with its unit."""
    return f"{number(bytes_per_s)} GB/s"


def number(bytes_per_s: float) -> str:
    """Format a bandwidth in GB/s (1e9 bytes/s) without the unit."""
    value = bytes_per_s / GIGA
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def micros(seconds: float) -> str:
    """Format seconds as microseconds, with a decimal below a thousand."""
    value = seconds * 1e6
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def short(size_bytes: int) -> str:
    """Format a size in one word: 64MiB."""
    return format_size(size_bytes).replace(" ", "")


def format_row(row: SizeResult) -> str:
    """Format a row in a line."""
    if row.time_s is None or row.busbw_bytes_per_s is None:
        return f"{row.op} {short(row.size_bytes)}: not measured: {row.skipped}"
    wrong = f", {row.wrong} WRONG elements" if row.wrong else ""
    return (
        f"{row.op} {short(row.size_bytes)}: busbw {speed(row.busbw_bytes_per_s)}, p50 "
        f"{micros(row.time_s.p50)} us of {counted(row.iterations, 'iteration')}{wrong}"
    )


_ALL_WAIT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""No rank leaves these before every rank has entered, so a short time inside means a late entry."""
_LATE_SHARE = 0.3
_LATE_S = 50e-6
"""Least delay after the first rank, absolute and relative to the row's time, to count as late."""
_OTHERS_SHARE = 0.5
"""Largest delay of the next latest rank, relative to that of the late rank."""
_ENOUGH_FOR_LATE = 10
_OUTLIERS = 3.0
_ENOUGH_FOR_P99 = 100
_UNSTEADY = 2.0


def shape_findings(
    request: Request, results: Sequence[SizeResult], arrivals: Sequence[Arrival], *, whole: bool = True
) -> list[Finding]:
    """Return findings from the rows; about their variation only if the run is `whole`: no rank died."""
    found = _late_rank(request, results, arrivals)
    for op in dict.fromkeys(row.op for row in results):
        found += _outliers([row for row in results if row.op == op])
    return [*found, *(_unsteady(request, results) if whole else ())]


def _late_rank(request: Request, results: Sequence[SizeResult], arrivals: Sequence[Arrival]) -> list[Finding]:
    """Return a finding for the rank that is late in most rows, if any."""
    named: list[tuple[Arrival, float]] = []
    rows = 0
    for row in results:
        mine = [each for each in arrivals if (each.op, each.size_bytes) == (row.op, row.size_bytes)]
        if row.time_s is None or row.op not in _ALL_WAIT or row.iterations < _ENOUGH_FOR_LATE or len(mine) < 2:
            continue
        rows += 1
        *_, next_latest, latest = sorted(mine, key=lambda arrival: arrival.late_s)
        clear = latest.late_s > max(_LATE_S, _LATE_SHARE * row.time_s.p50)
        if clear and next_latest.late_s < _OTHERS_SHARE * latest.late_s:
            named.append((latest, latest.late_s / row.time_s.p50))
    rank, count = Counter(arrival.rank for arrival, _ in named).most_common(1)[0] if named else (0, 0)
    if count <= rows / 2:
        return []
    late = [(arrival, share) for arrival, share in named if arrival.rank == rank]
    host = late[0][0].host
    words = {"rank": rank, "host": host, "rows": count, "of": rows, "pairs": request.pairs()}
    words |= {
        "late": micros(median(each.late_s for each, _ in late)),
        "share": f"{median(share for _, share in late):.0%}",
    }
    return [finding("allreduce-bench.late-rank", words, where=Where(hosts=(host,), ranks=(rank,)))]


def _unsteady(request: Request, results: Sequence[SizeResult]) -> list[Finding]:
    """Report rows whose mean is far above their median, and so carry less over time than the median suggests."""
    rows = [(row, row.time_s) for row in results if row.time_s is not None and row.iterations >= _ENOUGH_FOR_LATE]
    bad = [(row, times) for row, times in rows if times.mean > _UNSTEADY * times.p50 or times.iqr > times.p50]
    if not bad or len(bad) <= len(rows) / 2:
        return []
    worst, times = max(bad, key=lambda each: each[0].size_bytes)
    over_time = (worst.algbw_bytes_per_s or 0.0) * getattr(times, request.stat) / times.mean
    words = {name: micros(getattr(times, name)) for name in ("mean", "p50", "iqr")}
    return [
        finding(
            "allreduce-bench.unsteady",
            {**words, "number": len(bad), "of": len(rows), "row": f"{worst.op} of {short(worst.size_bytes)}"},
            over_time=speed(over_time),
            again=request.again(stat="mean"),
        )
    ]


def _outliers(rows: list[SizeResult]) -> list[Finding]:
    timed = [(row, row.time_s) for row in rows if row.time_s is not None and row.iterations >= _ENOUGH_FOR_P99]
    row, times = max(timed, key=lambda each: each[1].p99 / each[1].p50, default=(None, None))
    if row is None or times is None or times.p99 <= _OUTLIERS * times.p50:
        return []
    words = {"op": row.op, "size": short(row.size_bytes), "times": f"{times.p99 / times.p50:.0f}"}
    return [finding("allreduce-bench.outliers", words, p99=micros(times.p99), p50=micros(times.p50))]


_LARGE_IN_A_NODE_BYTES = 128 * 2**20
_LARGE_BETWEEN_NODES_BYTES = 512 * 2**20
"""Smaller sizes measure latency more than bandwidth; see knowledge.busbw.Case."""


def expectation(
    plan: Plan, scene: Inventory, device_name: str | None, results: Sequence[SizeResult]
) -> Expectation | None:
    """Judge the largest all_reduce; None if none was measured."""
    sizes = [(row.size_bytes, row.busbw_bytes_per_s) for row in results if row.op == "all_reduce"]
    size_bytes, busbw = max(((size, busbw) for size, busbw in sizes if busbw is not None), default=(0, None))
    if busbw is None:
        return None
    case = Case(
        busbw=busbw,
        device_name=device_name if plan.device is Device.CUDA else None,
        world_size=plan.nproc,
        nodes=len(plan.machines),
        nic_bytes_per_s=_nic_rate(plan, scene),
    )
    return expected_of(case, size_bytes)


def expected_of(found: Case, size_bytes: int) -> Expectation:
    """Judge an all_reduce of this size; on GPUs, sizes too small to judge are unknown."""
    least = _LARGE_BETWEEN_NODES_BYTES if found.nodes > 1 else _LARGE_IN_A_NODE_BYTES
    too_small = size_bytes < least and found.device_name is not None
    small = f"the largest all_reduce, {short(size_bytes)}, is too small to judge: use {short(least)} or more"
    return Expectation(
        judgement=Judgement.UNKNOWN if too_small else found.judgement,
        size_bytes=size_bytes,
        expected_busbw_bytes_per_s=found.bar.expected if found.bar else None,
        percent_of_link=found.percent_of_link,
        percent_of_nic=found.percent_of_nic,
        lines=(small,) if too_small else found.lines,
        source=found.bar.source if found.bar else tables().sources["busbw"],
    )


def _nic_rate(plan: Plan, scene: Inventory) -> float | None:
    """Return the line rate of a node's active RDMA ports per GPU, in bytes/s, the lowest of all nodes."""
    rates = []
    for place in scene.places:
        ranks = sum(share.nproc for share in plan.shares if share.node == place.node)
        if not place.facts.rdma_bits_per_s:
            return None
        rates.append(place.facts.rdma_bits_per_s / 8 / max(ranks, place.facts.gpus.visible or 0, 1))
    return min(rates, default=None)


def hardware_findings(request: Request, found: Expectation | None) -> list[Finding]:
    """Return a finding if the bandwidth is below expectation."""
    if found is None or found.judgement not in (Judgement.LOW, Judgement.BAD):
        return []
    verdict = "bandwidth-bad" if found.judgement == Judgement.BAD else "bandwidth-low"
    words = {"size": short(found.size_bytes), "again": request.again(nccl_debug=""), "pairs": request.pairs()}
    evidence = (*found.lines, f"source: {found.source}")
    return [finding(f"allreduce-bench.{verdict}", words, evidence=evidence)]


_BAND_LEAST, _BAND_MOST = 0.1, 0.5
_SPREADS = 3.0
"""Tolerance of a median between runs, in inter-quartile ranges of the noisier run: medians vary between runs more than
iterations do. At most half of the time: a doubling is not noise."""
_BUSY = 0.05
_NEVER_BUSY = 10
"""A slowdown by this factor is not explained by other programs on the cores."""
_WORSE_ROWS = 1 / 3
"""A single row beyond its band can be chance; this share of rows is not."""


def compare(baseline: Baseline, results: Sequence[SizeResult]) -> tuple[Compared, ...]:
    """Compare each row common to both runs, preferring the same form (in place or not)."""
    earlier = {(row.op, row.size_bytes, row.dtype, row.in_place): row for row in baseline.rows}
    found = []
    for row in results:
        key = (row.op, row.size_bytes, row.dtype)
        before = earlier.get((*key, row.in_place)) or earlier.get((*key, not row.in_place))
        if before is not None and before.time_s is not None and row.time_s is not None:
            found.append(_compared(row, row.time_s, before.time_s))
    return tuple(found)


def _compared(row: SizeResult, now: Times, before: Times) -> Compared:
    spread = max(now.iqr / now.p50, before.iqr / before.p50)
    band = min(_BAND_MOST, max(_BAND_LEAST, _SPREADS * spread))
    ratio = now.p50 / before.p50
    return Compared(
        op=row.op,
        size_bytes=row.size_bytes,
        dtype=row.dtype,
        in_place=row.in_place,
        earlier_p50_s=before.p50,
        p50_s=now.p50,
        ratio=ratio,
        band=band,
        slower=ratio > 1 + band,
    )


def differs(baseline: Baseline, world_size: int, device: str) -> str:
    """Return why the times of two runs are not comparable, else ""."""
    if baseline.world_size is not None and baseline.world_size != world_size:
        return f"{counted(world_size, 'rank')} now, {baseline.world_size} in the earlier run"
    if baseline.device and baseline.device != device:
        return f"on {device} now, on {baseline.device} in the earlier run"
    return ""


def comparison_findings(
    request: Request, baseline: Baseline, why: str, compared: Sequence[Compared], no_core: float = 0.0
) -> list[Finding]:
    """Return findings for rows slower than in the earlier run; `why`: not comparable; `no_core`: see types.Bench."""
    words = {"made_by": baseline.made_by, "device": baseline.device or ""}
    words |= {"least": f"{_BAND_LEAST:.0%}", "most": f"{_BAND_MOST:.0%}"}
    if why or not compared:
        words["why"] = why or "no row of this run is in the earlier run: other sizes, collectives or types"
        differs = "allreduce-bench.compare-differs"
        return [finding(differs, words, content=_content(baseline), evidence=baseline.notes)]
    slower = sorted((row for row in compared if row.slower), key=lambda row: -row.ratio)
    if not slower:
        return []
    worst = slower[0]
    words |= {
        "number": f"{len(slower)} of {counted(len(compared), 'row')}",
        "row": f"{worst.op} of {short(worst.size_bytes)}",
        "ratio": f"{worst.ratio:.2f}",
        "p50": micros(worst.p50_s),
        "earlier": micros(worst.earlier_p50_s),
    }
    level = Level.FAIL if len(slower) >= _WORSE_ROWS * len(compared) else Level.WARN
    words |= {"fix": "check whether a rank is reported as late, or test pairs of ranks", "command": request.pairs()}
    if level is Level.FAIL and no_core > _BUSY and worst.ratio < _NEVER_BUSY:
        level = Level.UNKNOWN
        words |= {"no_core": f"{no_core:.0%}", "fix": "compare again when these cores are free"}
        words["command"] = request.again()
    return [finding("allreduce-bench.slower", words, level=level, evidence=baseline.notes)]


def _content(baseline: Baseline) -> str:
    ops = ", ".join(dict.fromkeys(f"{row.op} ({row.dtype})" for row in baseline.rows))
    sizes = ",".join(dict.fromkeys(short(row.size_bytes) for row in baseline.rows))
    ranks = "" if baseline.world_size is None else f", {baseline.world_size} ranks"
    return f"{ops}, --sizes {sizes}{ranks}"
