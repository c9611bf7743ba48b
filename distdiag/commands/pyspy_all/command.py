"""What you type for pyspy-all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.pyspy_all.model import COMMAND, Request, Threads
from distdiag.options import JsonOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.pyspy_all.result import PySpyAll
    from distdiag.report import Report


@on_hosts
def pyspy_all(
    pid: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="PID", help="Look at this process and its children; can be repeated."),
    ] = None,
    job: Annotated[
        str, typer.Option(metavar="ID", help="Only this job: torchrun's run id, MASTER_ADDR:MASTER_PORT or a SLURM id.")
    ] = "",
    user: Annotated[
        str, typer.Option(metavar="NAME", help="Only this user's processes. [default: all we may see]")
    ] = "",
    native: Annotated[bool, typer.Option("--native", help="C frames too: pauses each process for a second.")] = False,
    samples: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Looks at each process.")] = 2,
    interval: Annotated[float, typer.Option(min=0.0, max=3600.0, metavar="SECONDS", help="Between the looks.")] = 1.0,
    threads: Annotated[Threads, typer.Option(help="Which threads to show.")] = Threads.MAIN,
    helpers: Annotated[bool, typer.Option("--helpers", help="Show DataLoader workers and other helpers too.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="One call tree of all ranks instead of the groups.")] = False,
    groups: Annotated[
        str, typer.Option(metavar="GROUPS", help="Parallel groups, to say what odd ranks share: tp=0-1/2-3;pp=0,2/1,3.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Longest time for one look at one process.")
    ] = 5.0,
    save: Annotated[str, typer.Option(metavar="DIR", help="Keep what was seen, a file for each host.")] = "",
    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="PATH", help="Judge saved dumps: --save's, or py-spy's text or JSON; can be repeated."
        ),
    ] = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="Write a page to look at in a browser.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show library frames and every process.")] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show where every rank of a running job stands, folded, and name the rank that is not where the others are.

    It finds the ranks by itself, here or on all hosts, and looks at each without stopping it.

    Exit status: 0 not hung, 1 an odd rank was found, 2 wrong usage, 3 stacks cannot decide or were not read,
    130 interrupted.
    """
    from distdiag.deliver import Output, deliver, deliver_lines

    def asked() -> Request:
        from distdiag.commands.pyspy_all.grouping import parse_groups

        return Request(
            program=called_as(),
            cluster=cluster,
            pids=tuple(pid or ()),
            job=job,
            user=user,
            native=native,
            samples=samples,
            interval_s=interval,
            threads=threads,
            helpers=helpers,
            tree=tree,
            verbose=verbose,
            groups=parse_groups(groups),
            timeout_s=timeout,
        )

    def run() -> Report[PySpyAll]:
        from distdiag.commands.pyspy_all import keep
        from distdiag.deliver import is_done_by_another

        files = keep.Files(save=save, saved=tuple(from_ or ()), html=html)
        if not files.saved and is_done_by_another():
            raise typer.Exit(0)
        return keep.answer(asked(), files, strict=strict)

    def view(report: Report[PySpyAll]) -> Iterable[RenderableType]:
        from distdiag.commands.pyspy_all.view import pyspy_all_view

        return pyspy_all_view(report, asked())

    def commands() -> list[str]:
        from distdiag.commands.pyspy_all.check import explain

        return explain(asked())

    if cluster.explain:
        deliver_lines(COMMAND, commands, as_json=as_json)
    deliver(COMMAND, run, view, Output(json=as_json, strict=strict))
