"""Findings about bandwidth: a late rank, a drop at large sizes, slow for the hardware, slower than an earlier run.
Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench.formulas import ITEM_BYTES
from distdiag.commands.allreduce_bench.types import GIGA, Compared, Expectation
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import counted, format_size
from distdiag.knowledge.bandwidth import tables, training_lines, zero3_rule
from distdiag.knowledge.busbw import Case, Judgement, Setting
from distdiag.launch.types import Device
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.allreduce_bench.earlier import Baseline, Earlier
    from distdiag.commands.allreduce_bench.types import Arrival, Request, SizeResult, Times
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
    """Return the rank that is late in most rows, if any."""
    times = {(row.op, row.size_bytes): row.time_s.p50 for row in results if row.time_s and _counts(row)}
    named: list[tuple[Arrival, float]] = []
    rows = 0
    for (op, size), p50 in times.items():
        entered = sorted((arrival for arrival in arrivals if _is_of(arrival, op, size)), key=_lateness)
        if len(entered) < 2:
            continue
        rows += 1
        latest, next_latest = entered[-1], entered[-2]
        clear = latest.late_s > max(_LATE_S, _LATE_SHARE * p50)
        if clear and next_latest.late_s < _OTHERS_SHARE * latest.late_s:
            named.append((latest, latest.late_s / p50))
    for rank in {arrival.rank for arrival, _ in named}:
        mine = [(arrival, share) for arrival, share in named if arrival.rank == rank]
        if len(mine) > rows / 2:
            late_s, share = median(arrival.late_s for arrival, _ in mine), median(share for _, share in mine)
            return Late(rank, mine[0][0].host, len(mine), rows, late_s, share)
    return None


def _counts(row: SizeResult) -> bool:
    return row.op in _ALL_WAIT and row.iterations >= _ENOUGH_FOR_LATE


def _lateness(arrival: Arrival) -> float:
    return arrival.late_s


def _is_of(arrival: Arrival, op: str, size_bytes: int) -> bool:
    # A row's real size may be slightly below the requested size.
    return arrival.op == op and arrival.size_bytes == size_bytes


def shape_findings(
    request: Request, results: Sequence[SizeResult], arrivals: Sequence[Arrival], *, whole: bool = True
) -> list[Finding]:
    """Return findings from the rows; about their variation only if the run is `whole`: no rank died."""
    late = late_rank(results, arrivals)
    found = [_straggler(request, late)] if late is not None else []
    for op in dict.fromkeys(row.op for row in results):
        mine = [row for row in results if row.op == op and row.time_s is not None]
        found += _outliers(mine)
    return [*found, *(_unsteady(request, results) if whole else ())]


def _straggler(request: Request, late: Late) -> Finding:
    words = {"rank": late.rank, "host": late.host, "rows": late.rows, "of": late.of, "late": micros(late.late_s)}
    where = Where(hosts=(late.host,), ranks=(late.rank,))
    return finding("allreduce-bench.late-rank", words, where=where, share=f"{late.share:.0%}", pairs=request.pairs())


def _varies(times: Times) -> bool:
    return times.mean > _UNSTEADY * times.p50 or times.iqr > times.p50


def _unsteady(request: Request, results: Sequence[SizeResult]) -> list[Finding]:
    """Report rows whose mean is far above their median, and so carry less over time than the median suggests."""
    rows = [row for row in results if row.time_s is not None and row.iterations >= _ENOUGH_FOR_LATE]
    bad = [row for row in rows if row.time_s is not None and _varies(row.time_s)]
    if not bad or len(bad) <= len(rows) / 2:
        return []
    worst = max(bad, key=lambda row: row.size_bytes)
    assert worst.time_s is not None
    over_time = (worst.algbw_bytes_per_s or 0.0) * getattr(worst.time_s, request.stat) / worst.time_s.mean
    words = {name: micros(getattr(worst.time_s, name)) for name in ("mean", "p50", "iqr")}
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
    largest = _largest(results)
    if largest is None or largest.busbw_bytes_per_s is None:
        return None
    nodes = len(plan.machines)
    setting = Setting(
        device_name=device_name if plan.device is Device.CUDA else None,
        world_size=plan.nproc,
        nodes=nodes,
        ranks_per_node=plan.nproc // nodes,
        nic_bytes_per_s=nic_rate(plan, scene),
    )
    return expected_of(setting, largest.size_bytes, largest.busbw_bytes_per_s)


def expected_of(setting: Setting, size_bytes: int, busbw_bytes_per_s: float) -> Expectation:
    """Judge an all_reduce of this size; on GPUs, sizes too small to judge are unknown."""
    least = _LARGE_BETWEEN_NODES_BYTES if setting.nodes > 1 else _LARGE_IN_A_NODE_BYTES
    found = Case(busbw=busbw_bytes_per_s, setting=setting)
    too_small = size_bytes < least and setting.device_name is not None
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


def nic_rate(plan: Plan, scene: Inventory) -> float | None:
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


def training(request: Request, plan: Plan, scene: Inventory, results: Sequence[SizeResult]) -> tuple[str, ...]:
    """Return the implications for a model of --params, in lines; empty without that option."""
    largest = _largest(results)
    if request.params is None or largest is None or not largest.algbw_bytes_per_s or plan.nproc < 2:
        return ()
    lines = training_lines(request.params, ITEM_BYTES[request.dtype], largest.algbw_bytes_per_s)
    nodes = len(plan.machines)
    if nodes < 2:
        return lines
    rate = nic_rate(plan, scene)
    return (*lines, zero3_rule(rate * 8 * plan.nproc / nodes if rate is not None else None, plan.nproc))


def _largest(results: Sequence[SizeResult]) -> SizeResult | None:
    rows = [row for row in results if row.op == "all_reduce" and row.time_s is not None]
    return max(rows, key=lambda row: row.size_bytes, default=None)


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
        if before is not None and row.time_s is not None:
            found.append(_compared(row, before))
    return tuple(found)


def _compared(row: SizeResult, before: Earlier) -> Compared:
    assert row.time_s is not None
    spread = max(row.time_s.iqr / row.time_s.p50, before.spread or 0.0)
    band = min(_BAND_MOST, max(_BAND_LEAST, _SPREADS * spread))
    ratio = row.time_s.p50 / before.p50_s
    return Compared(
        op=row.op,
        size_bytes=row.size_bytes,
        dtype=row.dtype,
        in_place=row.in_place,
        earlier_p50_s=before.p50_s,
        p50_s=row.time_s.p50,
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
    fix = Fix(text="check whether a rank is reported as late, or test pairs of ranks", commands=(request.pairs(),))
    if level is Level.FAIL and no_core > _BUSY and worst.ratio < _NEVER_BUSY:
        level = Level.UNKNOWN
        words["no_core"] = f"{no_core:.0%}"
        fix = Fix(text="compare again when these cores are free", commands=(request.again(),))
    found = finding("allreduce-bench.slower", words, level=level, evidence=baseline.notes)
    return [replace(found, fix=fix)]


def _content(baseline: Baseline) -> str:
    ops = ", ".join(dict.fromkeys(f"{row.op} ({row.dtype})" for row in baseline.rows))
    sizes = ",".join(dict.fromkeys(short(row.size_bytes) for row in baseline.rows))
    ranks = "" if baseline.world_size is None else f", {baseline.world_size} ranks"
    return f"{ops}, --sizes {sizes}{ranks}"
