"""What you type for trace fds."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.fds.model import Request
from distdiag.errors import UsageError
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts


@on_hosts
def fds(
    pid: Annotated[
        list[int] | None, typer.Argument(min=1, metavar="PID", help="These processes.", show_default=False)
    ] = None,
    rank: Annotated[
        list[str] | None, typer.Option(metavar="RANKS", help="These ranks: 3, or 0-3,7; can be repeated.")
    ] = None,
    job: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="All of this job, or its --rank: torchrun's run id, MASTER_ADDR:MASTER_PORT or a SLURM id.",
        ),
    ] = "",
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Tell what the file descriptors of a process, or of ranks, point to, and who has the other ends.

    Connections lead to ranks, pipes to processes; deleted files are shown with the disk space that they still take.

    Exit status: 0 read, also with warnings, 2 wrong usage, 3 not ours to read, or no process was found,
    130 interrupted.
    """
    from distdiag import runner
    from distdiag.commands.trace.fds.check import SUBCOMMAND
    from distdiag.commands.trace.ranks import wanted

    def asked() -> Request:
        if not (pid or rank or job or from_):
            raise UsageError("say of which process", hint="distdiag trace fds PID, or --rank 0-3, or --job ID")
        return Request(program=called_as(), cluster=cluster, wanted=wanted(pid, rank, job, ""))

    runner.run(SUBCOMMAND, asked, runner.Options(as_json, strict, save, from_, cluster.explain))
