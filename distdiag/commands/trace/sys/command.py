"""What you type for trace sys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.sys.choices import COMMAND
from distdiag.options import JsonOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.trace.sys.model import TraceSys
    from distdiag.report import Report


@on_hosts
def trace_sys(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="A job to start below strace: a script, -m MODULE, a program."),
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option("--pid", "-p", min=1, metavar="PID", help="Attach to this process; can be repeated."),
    ] = None,
    rank: Annotated[
        list[str] | None, typer.Option(metavar="RANKS", help="Attach to these ranks: 3, or 0-3,7; can be repeated.")
    ] = None,
    job: Annotated[
        str,
        typer.Option(metavar="ID", help="Attach to this job: torchrun's run id, MASTER_ADDR:MASTER_PORT, a SLURM id."),
    ] = "",
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="Stay attached so long: 5s, 500ms, 2m.")] = "5s",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KINDS", help="Only these calls: network,file,process,desc,memory,signal."),
    ] = None,
    save: Annotated[
        str, typer.Option(metavar="DIR", help="Keep the logs of strace there, on the node; named by rank.")
    ] = "",
    from_: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="PATH", help="Judge logs of strace: files or folders; can be repeated."),
    ] = None,
    report: Annotated[
        str, typer.Option(metavar="FILE", help="With -- COMMAND: write the report there, as JSON, not to stderr.")
    ] = "",
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Tell by strace what ranks do: the call each is blocked in and on which rank, errors, slow disks, loops that ask.

    It attaches to ranks that run, for a short time; or starts a job (-- COMMAND); or reads logs of strace (--from).

    While strace is attached each system call takes 75-190 times as long; computing does not. `trace blocked` tells who
    is blocked on whom without any of that. --only saves nothing of a process that runs; a job started with it is hardly
    slower.

    Of a job that is started stdout, stderr and exit status are its own; after its end the report goes to stderr. With
    --save there is none, but a log for each rank: --from DIR.

    Exit status: 0 nothing wrong, 1 a fault was found, 2 wrong usage, 3 not (all) could be traced, 130 interrupted.
    """
    from distdiag.commands.trace.sys import ask
    from distdiag.deliver import Output, deliver, deliver_lines, fail, is_done_by_another
    from distdiag.errors import DistdiagError

    typed = ask.Typed(
        command=tuple(command or ()),
        pids=tuple(pid or ()),
        ranks=tuple(rank or ()),
        job=job,
        for_=for_,
        only=tuple(only or ()),
        save=save,
        from_=tuple(from_ or ()),
        report=report,
        cluster=cluster,
        as_json=as_json,
    )

    def run() -> Report[TraceSys]:
        if typed.from_:
            return ask.judge(typed, called_as())
        if is_done_by_another():
            raise typer.Exit(0)
        return ask.attach(typed, called_as())

    def view(found: Report[TraceSys]) -> Iterable[RenderableType]:
        from distdiag.commands.trace.sys.view import trace_sys_view

        return trace_sys_view(found.data)

    def commands() -> list[str]:
        return ask.explain(typed, called_as())

    if typed.command and not typed.from_:
        try:
            from distdiag.commands.trace.sys.job import become

            become(typed, called_as())
        except DistdiagError as error:
            fail(COMMAND, error, as_json=as_json)
    if cluster.explain:
        deliver_lines(COMMAND, commands, as_json=as_json)
    deliver(COMMAND, run, view, Output(json=as_json, strict=strict))
