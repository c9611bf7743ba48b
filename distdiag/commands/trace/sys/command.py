"""What you type for trace sys."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.sys.choices import COMMAND
from distdiag.options import JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts


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
    logs: Annotated[
        str, typer.Option(metavar="DIR", help="Write the logs of strace there, on the node; named by rank.")
    ] = "",
    payload: Annotated[
        int,
        typer.Option(
            min=0,
            max=65536,
            metavar="BYTES",
            help="With --logs, keep so many bytes of what each call reads, writes or sends: passwords and tokens too.",
        ),
    ] = 0,
    save: SaveOpt = "",
    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="PATH", help="Judge facts that --save wrote, or logs of strace; can be repeated."
        ),
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
    --logs there is none, but a log for each rank: --from DIR.

    Exit status: 0 nothing wrong, 1 a fault was found, 2 wrong usage, 3 not (all) could be traced, 130 interrupted.
    """
    from distdiag import runner
    from distdiag.commands.trace.sys import ask
    from distdiag.commands.trace.sys.check import SUBCOMMAND
    from distdiag.commands.trace.sys.view import trace_sys_view
    from distdiag.deliver import Output, deliver, fail
    from distdiag.errors import DistdiagError, UsageError
    from distdiag.gathered import are_facts

    typed = ask.Typed(
        command=tuple(command or ()),
        pids=tuple(pid or ()),
        ranks=tuple(rank or ()),
        job=job,
        for_=for_,
        only=tuple(only or ()),
        logs=logs,
        payload_bytes=payload,
        from_=tuple(from_ or ()),
        report=report,
        cluster=cluster,
        as_json=as_json,
    )

    if typed.command and not typed.from_:
        try:
            from distdiag.commands.trace.sys.job import become

            if save:
                raise UsageError("--save is for processes that run", hint="--logs DIR keeps the logs of a job's ranks")
            become(typed, called_as())
        except DistdiagError as error:
            fail(COMMAND, error, as_json=as_json)
    if typed.from_ and not are_facts(typed.from_):
        deliver(
            COMMAND,
            lambda: ask.judge(typed, called_as()),
            lambda report: trace_sys_view(report.data),
            Output(json=as_json, strict=strict),
        )
    runner.run(
        SUBCOMMAND,
        lambda: ask.request_of(typed, called_as()),
        runner.Options(as_json, strict, save, from_, cluster.explain),
    )
