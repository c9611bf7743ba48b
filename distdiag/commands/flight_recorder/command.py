"""The command line of flight-recorder."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.diagnosis.flight_recorder.types import COMMAND, Request
from distdiag.errors import UsageError
from distdiag.options import FromOpt, HtmlOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts


@on_hosts
def flight_recorder(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR|FILES]...", help="Dumps, or directories of dumps.", show_default=False),
    ] = None,
    how: Annotated[bool, typer.Option("--how", help="Print the settings that make jobs write dumps; exit.")] = False,
    trigger: Annotated[
        bool, typer.Option("--trigger", help="Make a running job write its dumps first, through its trigger pipes.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=1.0, max=600.0, metavar="SECONDS", help="Maximum time to wait for triggered dumps.")
    ] = 20.0,
    html: HtmlOpt = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every rank.")] = False,
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Compare the PyTorch flight recorder dumps of all ranks: show who is stuck, in which collective, and why.

    Reads pickle and JSON dumps of NCCL, XCCL and Gloo. Never runs code from a dump.

    Exit status: 0 warnings only, 1 a fault was found, 2 wrong usage, 3 the dumps cannot decide (every collective has
    ended, or the dump that would decide is missing), 130 interrupted.

    \b
    Examples:
      distdiag flight-recorder --how                            # how to get dumps
      distdiag flight-recorder /shared/fr --html fr.html
      distdiag flight-recorder --hosts node[1-64] /tmp/fr
    """
    from distdiag import runner
    from distdiag.cluster.targets import check_paths
    from distdiag.commands.flight_recorder.subcommand import SUBCOMMAND
    from distdiag.output import deliver_lines

    if how:
        from distdiag.commands.flight_recorder.how import lines

        deliver_lines(COMMAND, lambda: lines(called_as()), as_json=as_json)

    def request() -> Request:
        if not (paths or trigger or from_):
            raise UsageError(
                "no dumps given", hint="give a directory or files; flight-recorder --how shows how to get them"
            )
        if not (from_ or trigger):
            check_paths(cluster, paths or (), hint="how to get dumps: distdiag flight-recorder --how")
        return Request(
            program=called_as(),
            cluster=cluster,
            paths=tuple(paths or ()),
            trigger=trigger,
            wait_s=wait,
            verbose=verbose,
        )

    options = runner.Options(as_json, strict, save, from_, html=html)
    runner.run(SUBCOMMAND, request, options)
