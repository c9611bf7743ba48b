"""gpu-test for people: columns, units, folding; nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.commands.gpu_test.words import amount
from distdiag.deliver import host_table, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from distdiag.commands.gpu_test.model import GpuTest, RankResult
    from distdiag.report import Report

_COLOURS = {"ok": "green", "failed": "red", "died": "red", "missing": "red", "lost": "red", "waiting": "yellow"}


def gpu_test_view(report: Report[GpuTest]) -> Iterator[RenderableType]:
    """The hosts that could not be used, the table of ranks, then the versions that the ranks reported."""
    yield from host_table(report.data.hosts)
    if not report.data.ranks:
        return
    yield _rank_table(report.data)
    yield Text("\n".join(_facts(report.data)))


def _rank_table(data: GpuTest) -> Table:
    table = plain_table(
        Column("rank", overflow="fold"),
        Column("host", overflow="fold"),
        Column("local rank", overflow="fold"),
        Column("device", overflow="fold"),
        Column("reached", no_wrap=True),
        Column("status", no_wrap=True),
        Column("seconds", justify="right", no_wrap=True),
    )
    groups: dict[tuple[str, ...], list[RankResult]] = {}
    for host, mine in _by_host(data.ranks).items():
        # Hosts whose ranks all fared the same fold into one row.
        fared = tuple((rank.local_rank, rank.device_name or "-", rank.stage, rank.status) for rank in mine)
        alike = fared if len({one[1:] for one in fared}) == 1 else (host, *fared)
        for rank in mine:
            groups.setdefault((str(alike), rank.device_name or "-", rank.stage, rank.status), []).append(rank)
    for (_, device, stage, status), group in groups.items():
        seconds = sorted(rank.elapsed_s for rank in group)
        low, high = f"{seconds[0]:.1f}", f"{seconds[-1]:.1f}"
        table.add_row(
            fold_ranks(rank.rank for rank in group),
            fold(dict.fromkeys(rank.host for rank in group)),
            fold_ranks(rank.local_rank for rank in group),
            device,
            stage,
            Text(status, style=_COLOURS[status]),
            low if low == high else f"{low}-{high}",
        )
    return table


def _by_host(ranks: Iterable[RankResult]) -> dict[str, list[RankResult]]:
    hosts: dict[str, list[RankResult]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return hosts


def _facts(data: GpuTest) -> Iterator[str]:
    versions = data.versions
    yield ""
    yield f"backend {data.backend} on {data.device}, world size {data.world_size}"
    if data.rendezvous is not None:
        meet = data.rendezvous
        through = fold(dict.fromkeys(meet.interfaces.values())) or "unknown"
        yield f"rendezvous at {meet.address} port {meet.port} ({meet.host}), through {through}"
        yield f"{meet.ways_open} of {meet.ways_tried} ways between nodes tried are open"
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
    for host, folder in data.log_dirs.items():
        yield f"logs of the ranks on {host}: {folder}"
