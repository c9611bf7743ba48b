"""Words that view, progress and findings of allreduce-bench share. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench.model import GIGA, Unit
from distdiag.workload.words import amount

if TYPE_CHECKING:
    from distdiag.commands.allreduce_bench.model import SizeResult

_BITS = 8


def speed(bytes_per_s: float, unit: Unit = Unit.GBPS_BYTES) -> str:
    """Write a bandwidth with its unit."""
    return f"{number(bytes_per_s, unit)} {'Gb/s' if unit is Unit.GBPS else 'GB/s'}"


def number(bytes_per_s: float, unit: Unit) -> str:
    """Write a bandwidth without its unit."""
    value = bytes_per_s / GIGA * (_BITS if unit is Unit.GBPS else 1)
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def micros(seconds: float) -> str:
    """Write microseconds, with a decimal below a thousand."""
    value = seconds * 1e6
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def short(size_bytes: int) -> str:
    """Write a size in one word: 64MiB."""
    return amount(size_bytes).replace(" ", "")


def row_in_words(row: SizeResult, unit: Unit) -> str:
    """Say a row in a line."""
    if row.time_s is None or row.busbw_bytes_per_s is None:
        return f"{row.op} {short(row.size_bytes)}: not measured: {row.skipped}"
    wrong = f", {row.wrong} WRONG elements" if row.wrong else ""
    return (
        f"{row.op} {short(row.size_bytes)}: busbw {speed(row.busbw_bytes_per_s, unit)}, p50 "
        f"{micros(row.time_s.p50)} us of {row.iterations} iterations{wrong}"
    )
