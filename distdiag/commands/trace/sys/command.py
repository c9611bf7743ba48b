"""What you type for trace sys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.errors import UsageError
from distdiag.options import (
    FromOpt,
    JobOpt,
    JsonOpt,
    SaveOpt,
    StrictOpt,
    called_as,
    on_hosts,
    parse_duration,
    split_pids,
)

if TYPE_CHECKING:
    from distdiag.commands.trace.sys.types import Request, TraceSys
    from distdiag.report import Report

_LONGEST_S = 600.0


@on_hosts
def trace_sys(
    log: Annotated[
        list[str] | None,
        typer.Argument(metavar="PID|LOG", help="Attach to this process; or read strace logs, files or directories."),
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option("--pid", "-p", min=1, metavar="PID", help="Same as PID; repeatable."),
    ] = None,
    rank: Annotated[
        list[str] | None, typer.Option(metavar="RANKS", help="Only these ranks: 3, or 0-3,7; repeatable.")
    ] = None,
    job: JobOpt = "",
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="How long to trace: 5s, 500ms, 2m.")] = "5s",
    keep_logs: Annotated[
        str, typer.Option(metavar="DIR", help="Keep strace's logs in this directory on each node, named by rank.")
    ] = "",
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Use strace to show what each rank is doing: blocking calls and their peers, errors, slow storage, busy-waits.

    Attaches to running ranks for a short time, or reads logs that strace wrote. To trace a job from its start:

    \b
      strace -f -ff -ttt -T -yy -o DIR/trace -- python train.py
      distdiag trace sys DIR

    While strace is attached, each system call takes 75-190 times as long; computation is not slowed. `trace blocked`
    shows which rank blocks which without that cost.

    Exit status: 0 no problem found, 1 problem found, 2 wrong usage, 3 some processes could not be traced,
    130 interrupted.

    \b
    Examples:
      distdiag trace sys --rank 0-3 --for 2s
      distdiag trace sys /tmp/logs
    """
    from distdiag import runner
    from distdiag.commands.trace.ranks import wanted
    from distdiag.commands.trace.sys.attach import SUBCOMMAND
    from distdiag.commands.trace.sys.types import COMMAND, Request
    from distdiag.commands.trace.sys.view import trace_sys_view
    from distdiag.output import Output, deliver
    from distdiag.saved_facts import are_facts

    logs, own = split_pids(log or ())
    pids = (*own, *(pid or ()))

    def request() -> Request:
        return Request(
            program=called_as(),
            cluster=cluster,
            wanted=wanted(pids, tuple(rank or ()), job, ""),
            for_s=parse_duration(for_, "--for", longest_s=_LONGEST_S),
            logs=keep_logs,
        )

    chooses = bool(pids or rank or job)
    paths = [*logs, *(from_ or ())]
    if paths and not are_facts(paths):
        attaches = chooses or bool(keep_logs or save) or bool(cluster.typed())
        output = Output(json=as_json, strict=strict)
        deliver(
            COMMAND, lambda: _judge_logs(request(), paths, attaches), lambda report: trace_sys_view(report.data), output
        )

    def asked() -> Request:
        if not chooses and not from_:
            raise UsageError(
                "no process selected: strace slows processes down, so name the ranks or pids to trace",
                hint=f"{called_as()} trace sys --rank 0   (or PID, --job ID, or the logs of strace)",
            )
        return request()

    runner.run(SUBCOMMAND, asked, runner.Options(as_json, strict, save, paths))


def _judge_logs(request: Request, paths: list[str], attaches: bool) -> Report[TraceSys]:
    """Analyze existing logs. Raises DistdiagError if none of them is a log of strace."""
    from distdiag.commands.trace.sys import logs
    from distdiag.commands.trace.sys.diagnose import diagnose_logs

    if attaches:
        raise UsageError("existing logs are only read", hint="remove --keep-logs, --save, and what chooses processes")
    threads, found = logs.read(paths)
    return diagnose_logs(request, threads, found)
