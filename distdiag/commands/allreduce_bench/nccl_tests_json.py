"""The JSON of nccl-tests -J. What is not used is not read, above all its `env`, which may hold secrets."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from dataclasses import replace
from typing import Annotated

import msgspec  # noqa: TID253 - this module is only imported when there is a file to read

from distdiag.commands.allreduce_bench.earlier import (
    GIGA,
    LARGEST,
    Baseline,
    Earlier,
    Found,
    known,
    names_of,
    number,
    op_in,
    unfilled,
)

_IQR_OF_SIGMA = 1.35
"""The inter-quartile range of a normal distribution, in standard deviations."""
Text = Annotated[str, msgspec.Meta(max_length=200)]
Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Number = float | str | None
"""nccl-tests writes the string "nan" for a number that is none."""


class Half(msgspec.Struct):
    """What was measured out-of-place, or in-place; times in microseconds, bandwidths in GB/s."""

    time: _Number = None
    cpu_time: _Number = None
    alg_bw: _Number = None
    bus_bw: _Number = None
    nwrong: _Number = None


class PerIter(msgspec.Struct):
    """The times of single iterations, as far as they were told."""

    skipped_iterations: Size = 0
    cv_pct: _Number = None
    times_us: list[float | str] = []


class _NcclResult(msgspec.Struct):
    size: Size
    type: Text
    redop: str = ""
    out_of_place: Half | None = None
    in_place: Half | None = None
    out_of_place_per_iter: PerIter | None = None
    in_place_per_iter: PerIter | None = None


class _Device(msgspec.Struct):
    group: int = 0
    pid: int = 0
    hostname: str = ""
    device_info: str = ""


class _Config(msgspec.Struct):
    nthreads: _Count = 1
    ngpus: _Count = 1
    devices: list[_Device] = []


class Nccl(msgspec.Struct):
    """The document."""

    args: list[str] = []
    config: _Config = msgspec.field(default_factory=_Config)
    results: list[_NcclResult] = []


def read_nccl(document: Nccl, path: str) -> Baseline:
    """Take what makes sense; the collective is told by the program, or else by the name of the file."""
    op = op_in(os.path.basename("".join(document.args[:1]))) or op_in(os.path.basename(path))
    found = Found()
    for one in document.results:
        if not found.takes(op, one.redop):
            continue
        row = unfilled(op, one.size, one.type)
        add_half(row, one.out_of_place, one.out_of_place_per_iter, found)
        add_half(replace(row, in_place=True), one.in_place, one.in_place_per_iter, found)
    config = document.config
    # Of each process only the first GPU is listed.
    processes = Counter(group for group, _, _ in {(one.group, one.hostname, one.pid) for one in config.devices})
    return Baseline(
        rows=found.precise(),
        made_by="nccl-tests",
        world_size=max(processes.values()) * config.nthreads * config.ngpus if processes else None,
        device=names_of([one.device_info for one in config.devices]),
        notes=found.notes(),
    )


def add_half(row: Earlier, half: Half | None, per_iter: PerIter | None, found: Found) -> None:
    """Fill in what was measured out-of-place or in-place, and take it."""
    if half is None:
        return
    if half.cpu_time is not None:
        found.passed["its time is that of the CPU (-C 1)"] += 1
        return
    mean_us = number(half.time)
    if not _agree(row.size_bytes, mean_us, number(half.alg_bw)):
        found.passed["its size, time and bandwidth do not agree"] += 1
        return
    found.wrong += number(half.nwrong) > 0
    p50_us, spread = _middle(mean_us, per_iter or PerIter(), found)
    row = replace(
        row,
        p50_s=p50_us * 1e-6,
        spread=spread,
        busbw_bytes_per_s=number(half.bus_bw) * GIGA * mean_us / (p50_us or math.nan),
    )
    found.add(row)


def _agree(size_bytes: int, mean_us: float, algbw: float) -> bool:
    """See that algbw (in GB/s) is size over time: in a torn line other words stand in their places.

    Until June 2020 it held the factor (n - 1) / n for some collectives, and it is printed with two decimals.
    """
    rate = size_bytes / (mean_us * 1e3) if mean_us > 0 else math.nan
    return 0.45 * rate - 0.02 <= algbw <= 1.1 * rate + 0.02


def _middle(mean_us: float, per_iter: PerIter, found: Found) -> tuple[float, float | None]:
    """Give the median of the iterations, and how they spread; the mean where they were not told."""
    times_us = [one for one in map(number, per_iter.times_us[per_iter.skipped_iterations :]) if one > 0]
    if len(times_us) < 2:
        found.means = True
        # A coefficient of variation alone: the times are taken to be of a normal distribution.
        return mean_us, known(_IQR_OF_SIGMA * number(per_iter.cv_pct) / 100)
    low, p50_us, high = statistics.quantiles(times_us, method="inclusive")
    return p50_us, known((high - low) / p50_us)
