"""What you type for trace fds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.fds.model import COMMAND, Request
from distdiag.options import JsonOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.trace.fds.result import TraceFds
    from distdiag.report import Report


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
    from distdiag.deliver import Output, deliver, deliver_lines

    def asked() -> Request:
        from distdiag.commands.trace.ranks import wanted

        return Request(program=called_as(), cluster=cluster, wanted=wanted(pid, rank, job, ""))

    def run() -> Report[TraceFds]:
        from distdiag.commands.trace.fds.check import check
        from distdiag.deliver import Progress, is_done_by_another

        request = asked()
        if is_done_by_another():
            raise typer.Exit(0)
        with Progress() as progress:
            return check(request, progress)

    def view(report: Report[TraceFds]) -> Iterable[RenderableType]:
        from distdiag.commands.trace.fds.view import trace_fds_view

        return trace_fds_view(report.data)

    def commands() -> list[str]:
        from distdiag.commands.trace.fds.check import explain

        return explain(asked())

    if cluster.explain:
        deliver_lines(COMMAND, commands, as_json=as_json)
    deliver(COMMAND, run, view, Output(json=as_json, strict=strict))
