"""Ranks that did not run for much of the time, though the others did. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal

from distdiag.report import Finding, Fix, Level
from distdiag.workload.words import where, who

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.launch import Trace
    from distdiag.cluster.records import PausedTold
    from distdiag.workload.model import Request

_MUCH = 0.2
_OTHERS = 0.5
"""Of such a rank's share: what the others may have at most, or it is the machine that is busy."""


def paused(request: Request, traces: Sequence[Trace], told: Mapping[int, Sequence[PausedTold]]) -> list[Finding]:
    """Name ranks that were stopped, throttled or had no core; `told` is what each of them measured."""
    shares = {rank: _share(those, "paused_ns") for rank, those in told.items() if those}
    # That there is no core for anybody is the machine's business; whoever is stopped or throttled is so by himself.
    stopped = _odd({rank: share - _share(told[rank], "no_core_ns") for rank, share in shares.items()})
    throttled = [rank for rank in stopped if _share(told[rank], "throttled_ns") > shares[rank] / 3]
    named = [trace for trace in traces if trace.rank in (stopped or _odd(shares))]
    if not named:
        return []
    share = median(shares[trace.rank] for trace in named)
    why = "it was stopped" if stopped else "other programs had its cores"
    why = "its CPU quota was used up" if throttled and throttled == stopped else why
    return [
        Finding(
            id=f"{request.command}.rank-paused",
            # A busy machine is no fault of the rank.
            level=Level.FAIL if stopped else Level.WARN,
            title=f"{who(named)} did not run for {share:.0%} of the time: {why}",
            detail="Its best moments are as good as anybody's, so medians and best times do not show it; all others "
            "wait for it.",
            where=where(named),
            evidence=tuple(
                f"rank {rank}: {share:.0%} of the time not running, {_share(told[rank], 'no_core_ns'):.0%} for want of "
                f"a core, {_share(told[rank], 'throttled_ns'):.0%} by a CPU quota"
                for rank, share in sorted(shares.items(), key=lambda entry: -entry[1])[:8]
            ),
            fix=Fix(
                text="see its container's CPU quota (nr_throttled), what sends it signals, and what else runs there",
                commands=(
                    "grep -r nr_throttled /sys/fs/cgroup --include=cpu.stat | grep -v ' 0$'",
                    "ps -eo pid,stat,psr,pcpu,cmd --sort=-pcpu | head -20",
                ),
            ),
        )
    ]


def without_core(told: Mapping[int, Sequence[PausedTold]]) -> float:
    """Return the part of the time that the median rank waited for a core."""
    return median([_share(those, "no_core_ns") for those in told.values() if those] or [0.0])


def _odd(shares: Mapping[int, float]) -> list[int]:
    """List ranks with a large share, if all others have a much smaller one."""
    odd = sorted(rank for rank, share in shares.items() if share > _MUCH)
    others = [share for rank, share in shares.items() if rank not in odd]
    return odd if odd and others and max(others) < _OTHERS * min(shares[rank] for rank in odd) else []


def _share(told: Sequence[PausedTold], key: Literal["paused_ns", "no_core_ns", "throttled_ns"]) -> float:
    return sum(int(one[key]) for one in told) / max(1, sum(one["of_ns"] for one in told))
