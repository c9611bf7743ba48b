"""Table and lines about the ranks, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from distdiag.cluster.hosts import fold, fold_ranks_within, fold_within
from distdiag.output import plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.launch.types import RankResult, RunFacts

_ROOM = 100
"""Maximum length of a list of ranks or hosts; longer ones are counted."""
_COLOURS = {"ok": "green", "failed": "red", "died": "red", "missing": "red", "lost": "red", "waiting": "yellow"}


def rank_table(data: RunFacts) -> Table:
    """Return one row per group of ranks with equal results; hosts with equal ranks fold."""
    table = plain_table(
        Column("rank", overflow="fold"),
        Column("host", overflow="fold"),
        Column("local rank", overflow="fold"),
        Column("device", overflow="fold"),
        Column("stage", no_wrap=True),
        Column("status", no_wrap=True),
        Column("seconds", justify="right", no_wrap=True),
    )
    groups: dict[tuple[str, ...], list[RankResult]] = {}
    hosts: dict[str, list[RankResult]] = {}
    for rank in data.ranks:
        hosts.setdefault(rank.host, []).append(rank)
    for host, mine in hosts.items():
        fared = tuple((rank.local_rank, rank.device_name or "-", rank.stage, rank.status) for rank in mine)
        alike = fared if len({cells[1:] for cells in fared}) == 1 else (host, *fared)
        for rank in mine:
            groups.setdefault((str(alike), rank.device_name or "-", rank.stage, rank.status), []).append(rank)
    for (_, device, stage, status), group in groups.items():
        seconds = sorted(rank.elapsed_s for rank in group)
        low, high = f"{seconds[0]:.1f}", f"{seconds[-1]:.1f}"
        table.add_row(
            fold_ranks_within((rank.rank for rank in group), _ROOM),
            fold_within((rank.host for rank in group), _ROOM),
            fold_ranks_within((rank.local_rank for rank in group), _ROOM),
            device,
            stage,
            Text(status, style=_COLOURS[status]),
            low if low == high else f"{low}-{high}",
        )
    return table


def run_lines(data: RunFacts) -> Iterator[str]:
    """Yield lines about the rendezvous and the software."""
    versions = data.versions
    yield f"backend {data.backend} on {data.device}, world size {data.world_size}"
    if data.rendezvous is not None:
        rendezvous = data.rendezvous
        interfaces = fold(dict.fromkeys(rendezvous.interfaces.values())) or "an unknown interface"
        yield f"rendezvous at {rendezvous.address} port {rendezvous.port} ({rendezvous.host}) over {interfaces}"
        yield f"{rendezvous.paths_open} of {rendezvous.paths_tried} tested paths between nodes are open"
    if versions.torch is None:
        yield "versions: unknown (no rank got past startup)"
    else:
        platform = f"ROCm {versions.hip}" if versions.hip else f"CUDA {versions.cuda or 'none'}"
        yield f"python {versions.python}, torch {versions.torch}, {platform}, NCCL {versions.nccl or 'none'}"


def log_lines(data: RunFacts) -> Iterator[str]:
    """Yield the directories of the ranks' output."""
    for host, folder in data.log_dirs.items():
        yield f"logs of the ranks on {host}: {folder}"
