"""What you type for trace blocked."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.blocked.types import Request, Threads
from distdiag.options import FromOpt, JobOpt, JsonOpt, SaveOpt, StrictOpt, UserOpt, called_as, on_hosts


@on_hosts
def blocked(
    process: Annotated[
        list[int] | None, typer.Argument(min=1, metavar="PID", help="Only this process, and what it waits for.")
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option("--pid", "-p", min=1, metavar="PID", help="Same as PID; repeatable."),
    ] = None,
    rank: Annotated[
        list[str] | None, typer.Option(metavar="RANKS", help="Only these ranks: 3, or 0-3,7; repeatable.")
    ] = None,
    job: JobOpt = "",
    user: UserOpt = "",
    threads: Annotated[Threads, typer.Option(help="Which threads to show.")] = Threads.MAIN,
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show what every rank waits for, which process has the other end, and which rank blocks the others.

    The verdict is that of hang from the processes alone: /proc and stacks. No process is paused. For the stacks, use
    pyspy-all.

    Exit status: 0 no hang seen, 1 a rank blocks the others, 2 wrong usage, 3 the processes alone cannot decide, or none
    was found, 130 interrupted.

    \b
    Examples:
      distdiag trace blocked                         # every rank on this host
      distdiag trace blocked --hosts gpu[01-08]
      distdiag trace blocked --rank 3 --threads all
    """
    from distdiag import runner
    from distdiag.commands.trace.blocked.subcommand import SUBCOMMAND
    from distdiag.commands.trace.ranks import wanted

    def request() -> Request:
        return Request(
            program=called_as(),
            cluster=cluster,
            wanted=wanted((*(process or ()), *(pid or ())), rank, job, user),
            threads=threads,
        )

    runner.run(SUBCOMMAND, request, runner.Options(as_json, strict, save, from_))
