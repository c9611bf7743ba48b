"""What you type for trace blocked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.blocked.model import COMMAND, Request, Threads
from distdiag.options import JsonOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.trace.blocked.result import TraceBlocked
    from distdiag.report import Report


@on_hosts
def blocked(
    pid: Annotated[
        list[int] | None,
        typer.Option(
            "--pid", "-p", min=1, metavar="PID", help="This process, and whom it may wait for; can be repeated."
        ),
    ] = None,
    rank: Annotated[
        list[str] | None, typer.Option(metavar="RANKS", help="Only these ranks: 3, or 0-3,7; can be repeated.")
    ] = None,
    job: Annotated[
        str, typer.Option(metavar="ID", help="Only this job: torchrun's run id, MASTER_ADDR:MASTER_PORT or a SLURM id.")
    ] = "",
    user: Annotated[
        str, typer.Option(metavar="NAME", help="Only this user's processes. [default: all we may see]")
    ] = "",
    threads: Annotated[Threads, typer.Option(help="Which threads to show.")] = Threads.MAIN,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Tell on what every rank is blocked, and who is at the other end; name the one that all others wait for.

    It only reads /proc: nothing is stopped or attached to, and no tool is needed. What stands in Python or in C is
    told by pyspy-all.

    Exit status: 0 not hung, 1 somebody is waited for in vain, 2 wrong usage, 3 /proc cannot tell, or no process was
    found, 130 interrupted.
    """
    from distdiag.deliver import Output, deliver, deliver_lines

    def asked() -> Request:
        from distdiag.commands.trace.ranks import wanted

        return Request(program=called_as(), cluster=cluster, wanted=wanted(pid, rank, job, user), threads=threads)

    def run() -> Report[TraceBlocked]:
        from distdiag.commands.trace.blocked.check import check
        from distdiag.deliver import Progress, is_done_by_another

        request = asked()
        if is_done_by_another():
            raise typer.Exit(0)
        with Progress() as progress:
            return check(request, progress)

    def view(report: Report[TraceBlocked]) -> Iterable[RenderableType]:
        from distdiag.commands.trace.blocked.view import trace_blocked_view

        return trace_blocked_view(report.data)

    def commands() -> list[str]:
        from distdiag.commands.trace.blocked.check import explain

        return explain(asked())

    if cluster.explain:
        deliver_lines(COMMAND, commands, as_json=as_json)
    deliver(COMMAND, run, view, Output(json=as_json, strict=strict))
