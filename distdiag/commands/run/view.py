"""How the job ended, a line for each group of ranks, and where its output is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.diagnosis.wording import counted, format_duration
from distdiag.facts.programs import signal_name
from distdiag.output import Whole, Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.run.types import RankRun, Run


def run_view(data: Run) -> Iterator[RenderableType]:
    """Draw the job's end, its ranks folded by how they ended, and the folder."""
    status = "still running" if data.status is None else status_text(data.status)
    restarts = f", {counted(data.generations - 1, 'restart')}" if data.generations > 1 else ""
    yield Wrapped(f"{counted(data.world, 'rank')}, {format_duration(data.took_s)}, {status}{restarts}", margin=0)
    if data.ranks:
        yield ""
        table = plain_table(
            Column("ranks", overflow="fold"),
            Column("hosts", overflow="fold"),
            Column("generation", justify="right"),
            Column("ended with", no_wrap=True),
            Column("at", justify="right", no_wrap=True),
        )
        groups: dict[tuple[int, str], list[RankRun]] = {}
        for rank in sorted(data.ranks, key=lambda rank: (rank.generation, rank.ended_s or 1e18)):
            groups.setdefault((rank.generation, _end(rank)), []).append(rank)
        for (generation, end), ranks in groups.items():
            at = "" if ranks[0].ended_s is None else f"{ranks[0].ended_s:.2f} s"
            hosts = fold({rank.host for rank in ranks})
            table.add_row(fold_ranks(rank.rank for rank in ranks), hosts, str(generation), end, at)
        yield table
    if data.folder:
        yield ""
        yield Whole(f"output of each rank: {data.folder}/output.HOST")


def status_text(status: int) -> str:
    """Format an exit status: "exit status 1", "SIGKILL"."""
    return signal_name(-status) if status < 0 else f"exit status {status}"


def _end(rank: RankRun) -> str:
    if rank.ended_s is None:
        return "not ended"
    end = "unknown status" if rank.status is None else status_text(rank.status)
    return f"{end}, out of memory" if rank.oom else end
