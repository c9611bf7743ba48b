"""The command line of pyspy-all."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.pyspy_all.types import Request, Threads
from distdiag.options import HtmlOpt, JobOpt, JsonOpt, SaveOpt, StrictOpt, UserOpt, called_as, on_hosts


@on_hosts
def pyspy_all(
    process: Annotated[
        list[int] | None, typer.Argument(min=1, metavar="PID", help="Only this process and its children.")
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option("--pid", "-p", min=1, metavar="PID", help="Same as PID; repeatable."),
    ] = None,
    job: JobOpt = "",
    user: UserOpt = "",
    native: Annotated[
        bool, typer.Option("--native", help="Include C frames; pauses each process for about a second.")
    ] = False,
    samples: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Samples per process.")] = 2,
    interval: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=3600.0,
            metavar="SECONDS",
            help="Time between samples. [default: 1; with 15 or more samples 0.25 if the job steps that fast]",
        ),
    ] = None,
    threads: Annotated[Threads, typer.Option(help="Which threads to show.")] = Threads.MAIN,
    sample_timeout: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Time limit for one sample of one process.")
    ] = 5.0,
    save: SaveOpt = "",
    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Analyze facts saved with --save, or text or JSON from py-spy dump; repeatable.",
        ),
    ] = None,
    html: HtmlOpt = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show library frames and every process.")] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show what every rank of a running job is doing, grouped by stack; find the stuck ranks.

    Ranks are found automatically, on this host or on all --hosts. Sampling does not pause them, except with --native.

    Exit status: 0 no hang seen, 1 stuck rank found, 2 wrong usage, 3 stacks cannot decide or are unreadable,
    130 interrupted.

    \b
    Examples:
      distdiag pyspy-all                             # every rank on this host
      distdiag pyspy-all --hosts gpu[01-64] --save run1
      distdiag pyspy-all --from run1 --html run1.html  # a call tree
    """
    from distdiag import runner
    from distdiag.commands.pyspy_all.subcommand import SUBCOMMAND

    def request() -> Request:
        from distdiag.diagnosis.slow_ranks import ENOUGH

        return Request(
            program=called_as(),
            cluster=cluster,
            pids=(*(process or ()), *(pid or ())),
            job=job,
            user=user,
            native=native,
            samples=samples,
            interval_s=1.0 if interval is None else interval,
            is_quick=interval is None and samples >= ENOUGH and not native,
            threads=threads,
            verbose=verbose,
            timeout_s=sample_timeout,
        )

    options = runner.Options(as_json, strict, save, from_, html=html)
    runner.run(SUBCOMMAND, request, options)
