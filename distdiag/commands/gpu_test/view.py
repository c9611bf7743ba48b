"""Terminal view of gpu-test."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.text import Text

from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis.wording import format_size, three_digits
from distdiag.facts.gpu.computed import BANDWIDTHS, shared
from distdiag.launch.view import log_lines, rank_table, run_lines
from distdiag.output import host_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rich.console import RenderableType

    from distdiag.commands.gpu_test.types import GpuTest
    from distdiag.report import Report


def gpu_test_view(report: Report[GpuTest]) -> Iterator[RenderableType]:
    """Yield unusable hosts, the table of ranks, then versions reported by the ranks."""
    yield from host_table(report.data.hosts)
    if not report.data.ranks:
        return
    yield rank_table(report.data)
    yield Text("\n".join(["", *run_lines(report.data), *_facts(report.data), *log_lines(report.data)]))


def _facts(data: GpuTest) -> Iterator[str]:
    capabilities = sorted({rank.capability for rank in data.ranks if rank.capability})
    if data.device == "cuda" and data.versions.torch is not None:
        yield f"compute capability {', '.join(capabilities) or 'unknown'}"
        yield f"torch's arch list: {' '.join(data.arch_list) or 'empty'}"
    if data.memory_bytes is not None:
        yield f"all_reduce of {format_size(data.size_bytes)}, every element checked"
        yield f"memory: {format_size(data.memory_bytes)} per rank written and read back"
    if data.computed:
        rates: dict[str, list[float]] = {}
        for own in data.computed.values():
            for name, rate in own.rates().items():
                rates.setdefault(name, []).append(rate)
        yield "products, each checked, TFLOP/s (median rank): " + _medians(rates.keys() - {*BANDWIDTHS}, rates, 1e12)
        yield "copies, GB/s (median rank): " + _medians(BANDWIDTHS, rates, 1e9)
        if crowded := shared({rank: own.device for rank, own in data.computed.items()}):
            yield f"{name_ranks(sorted(crowded))} share a GPU: their speeds are not compared"


def _medians(names: Iterable[str], rates: Mapping[str, list[float]], unit: float) -> str:
    """Format the median of the ranks for each name, in units per second: "float32 0.098, bfloat16 0.21"."""
    return ", ".join(f"{name} {three_digits(median(rates[name]) / unit)}" for name in rates if name in names)
