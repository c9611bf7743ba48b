"""gpu-test for people: columns, units, folding; nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from distdiag.cluster.hosts import fold_ranks
from distdiag.commands.gpu_test.words import amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.gpu_test.model import GpuTest, RankResult
    from distdiag.report import Report

_COLOURS = {"ok": "green", "failed": "red", "died": "red", "missing": "red", "waiting": "yellow"}


def gpu_test_view(report: Report[GpuTest]) -> Iterator[RenderableType]:
    """The table of ranks, then the versions that the ranks reported."""
    if not report.data.ranks:
        return
    yield _rank_table(report.data)
    yield Text("\n".join(_facts(report.data)))


def _rank_table(data: GpuTest) -> Table:
    table = Table(
        Column("rank", overflow="fold"),
        Column("host", overflow="fold"),
        Column("local rank", overflow="fold"),
        Column("device", overflow="fold"),
        Column("reached", no_wrap=True),
        Column("status", no_wrap=True),
        Column("seconds", justify="right", no_wrap=True),
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )
    groups: dict[tuple[str, ...], list[RankResult]] = {}
    for rank in data.ranks:
        groups.setdefault((rank.host, rank.device_name or "-", rank.stage, rank.status), []).append(rank)
    for (host, device, stage, status), group in groups.items():
        seconds = sorted(rank.elapsed_s for rank in group)
        low, high = f"{seconds[0]:.1f}", f"{seconds[-1]:.1f}"
        table.add_row(
            fold_ranks(rank.rank for rank in group),
            host,
            fold_ranks(rank.local_rank for rank in group),
            device,
            stage,
            Text(status, style=_COLOURS[status]),
            low if low == high else f"{low}-{high}",
        )
    return table


def _facts(data: GpuTest) -> Iterator[str]:
    versions = data.versions
    yield ""
    yield f"backend {data.backend} on {data.device}, world size {data.world_size}"
    if versions.torch is None:
        yield "versions: no rank came far enough to tell"
    else:
        platform = f"ROCm {versions.hip}" if versions.hip else f"CUDA {versions.cuda or 'none'}"
        yield f"python {versions.python}, torch {versions.torch}, {platform}, NCCL {versions.nccl or 'none'}"
    capabilities = sorted({rank.capability for rank in data.ranks if rank.capability})
    if data.device == "cuda" and versions.torch is not None:
        yield f"compute capability {', '.join(capabilities) or 'unknown'}"
        yield f"torch's arch list: {' '.join(data.arch_list) or 'empty'}"
    if data.memory_bytes is not None:
        yield f"all_reduce of {amount(data.size_bytes)}, every element checked"
        yield f"memory of each rank: {amount(data.memory_bytes)} written and read back"
    if data.log_dir is not None:
        yield f"logs of the ranks: {data.log_dir}"
