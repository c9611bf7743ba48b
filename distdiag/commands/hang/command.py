"""The command line of hang."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.hang.types import Request, Wanted
from distdiag.options import (
    FromOpt,
    HtmlOpt,
    JobOpt,
    JsonOpt,
    SaveOpt,
    StrictOpt,
    UserOpt,
    called_as,
    on_hosts,
)


@on_hosts
def hang(
    process: Annotated[
        list[int] | None,
        typer.Argument(min=1, metavar="PID", help="Only the job of this process: its launcher, a rank or a helper."),
    ] = None,
    pid: Annotated[
        list[int] | None, typer.Option("--pid", "-p", min=1, metavar="PID", help="Same as PID; repeatable.")
    ] = None,
    job: JobOpt = "",
    user: UserOpt = "",
    logs: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="More log files or folders on the hosts."),
    ] = None,
    recorder: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Flight recorder dumps on the hosts, or their folder."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=5.0, max=3600.0, metavar="SECONDS", help="Overall time limit.")] = 60.0,
    quick: Annotated[bool, typer.Option("--quick", help="Take only two samples.")] = False,
    save: SaveOpt = "",
    from_: FromOpt = None,
    html: HtmlOpt = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every rank.")] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Diagnose a stuck job: which rank is stuck, where and why.

    Reads all nodes at once: stacks, /proc, GPU load, NCCL RAS, flight recorder dumps, the job's log, the kernel and
    known bugs of versions; samples for up to 31 s while ranks do not move. The job needs no preparation and is not
    stopped.

    Exit status: 0 not hung (or merely slow), 1 hung, 2 wrong usage, 3 the evidence cannot decide, 130 interrupted.

    \b
    Examples:
      distdiag hang                                    # the job on this node
      distdiag hang 4711                               # the job of process 4711
      distdiag hang --slurm-job 4711 --html hang.html  # all nodes of a SLURM job
      while distdiag hang --save facts; do sleep 60; done  # until it hangs
    """
    from distdiag import runner
    from distdiag.commands.hang.subcommand import SUBCOMMAND

    def request() -> Request:
        return Request(
            program=called_as(),
            cluster=cluster,
            wanted=Wanted(job=job, pids=(*(process or ()), *(pid or ())), user=user),
            logs=tuple(logs or ()),
            recorder=tuple(recorder or ()),
            timeout_s=timeout,
            quick=quick,
            verbose=verbose,
        )

    options = runner.Options(as_json, strict, save, from_, html=html)
    runner.run(SUBCOMMAND, request, options)
