"""This run beside an earlier one, row by row. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench.model import Compared
from distdiag.commands.allreduce_bench.words import micros, short
from distdiag.report import Finding, Fix, Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.allreduce_bench.earlier import Baseline, Earlier
    from distdiag.commands.allreduce_bench.model import Request, SizeResult

_BAND_LEAST, _BAND_MOST = 0.1, 0.5
_SPREADS = 3.0
"""A median moves between runs by more than its iterations tell: by so many of their inter-quartile ranges, here and
there. Not beyond half of the time: what takes twice as long is never noise."""
_BUSY = 0.05
_NEVER_BUSY = 10
"""So many times as long is nothing that other programs on the cores do."""
_WORSE_ROWS = 1 / 3
"""One row beyond its band can be chance; so many of them are not."""


def compare(baseline: Baseline, results: Sequence[SizeResult]) -> tuple[Compared, ...]:
    """Put each row that both have beside the earlier one; the other form (in place or not) is the next best."""
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
    """Say why the times of two runs do not compare at all; empty if they do."""
    if baseline.world_size is not None and baseline.world_size != world_size:
        return f"the earlier run had {baseline.world_size} ranks and this one has {world_size}: times do not compare"
    if baseline.device and baseline.device != device:
        return f"the earlier run was on {baseline.device} and this one is on {device}: times do not compare"
    return ""


def comparison_findings(
    request: Request, baseline: Baseline, why: str, compared: Sequence[Compared], no_core: float = 0.0
) -> list[Finding]:
    """Say whether this run is slower than the earlier one; `why`: they do not compare; `no_core`: see model.Bench."""
    if why or not compared:
        words = why or "no row of this run is in the earlier one: other sizes, collectives or types"
        return [_finding(request, "compare-differs", Level.UNKNOWN, words, baseline)]
    slower = sorted((row for row in compared if row.slower), key=lambda row: -row.ratio)
    if not slower:
        return []
    worst = slower[0]
    words = (
        f"{len(slower)} of {len(compared)} rows take longer than in the earlier run: {worst.op} of "
        f"{short(worst.size_bytes)} {worst.ratio:.2f} times as long ({micros(worst.p50_s)} us, before "
        f"{micros(worst.earlier_p50_s)} us)"
    )
    level = Level.FAIL if len(slower) >= _WORSE_ROWS * len(compared) else Level.WARN
    if level is Level.FAIL and no_core > _BUSY and worst.ratio < _NEVER_BUSY:
        level = Level.UNKNOWN
        words += f"; but ranks waited for a core {no_core:.0%} of the time, as other programs have them"
    return [_finding(request, "slower", level, words, baseline)]


def _finding(request: Request, name: str, level: Level, title: str, baseline: Baseline) -> Finding:
    return Finding(
        id=f"{request.command}.{name}",
        level=level,
        title=title,
        detail=f"The earlier run was made by {baseline.made_by}"
        + (f" on {baseline.device}" if baseline.device else "")
        + f". Noise is what each row's own iterations show, {_BAND_LEAST:.0%} at least, {_BAND_MOST:.0%} at most.",
        evidence=baseline.notes,
        fix=Fix(
            text="the rows were measured again and stayed so: see whether a rank is named as late, or measure pairs of "
            "ranks",
            commands=(request.pairs(),),
        )
        if level in (Level.FAIL, Level.WARN)
        else Fix(text="compare again when these cores are free", commands=(request.again(),))
        if name == "slower"
        else Fix(text=f"it has {_content(baseline)}"),
    )


def _content(baseline: Baseline) -> str:
    ops = ", ".join(dict.fromkeys(f"{row.op} ({row.dtype})" for row in baseline.rows))
    sizes = ",".join(dict.fromkeys(short(row.size_bytes) for row in baseline.rows))
    ranks = "" if baseline.world_size is None else f", {baseline.world_size} ranks"
    return f"{ops}, --sizes {sizes}{ranks}"
