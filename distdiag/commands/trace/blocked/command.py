"""What you type for trace blocked."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.blocked.types import Request, Threads
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts


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
    save: SaveOpt = "",
    from_: FromOpt = None,
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
    from distdiag import runner
    from distdiag.commands.trace.blocked.diagnose import SUBCOMMAND
    from distdiag.commands.trace.ranks import wanted

    def request() -> Request:
        return Request(program=called_as(), cluster=cluster, wanted=wanted(pid, rank, job, user), threads=threads)

    runner.run(SUBCOMMAND, request, runner.Options(as_json, strict, save, from_, cluster.explain))
