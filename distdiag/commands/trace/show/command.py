"""What you type for trace show."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.show.types import Request
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts


@on_hosts
def trace_show(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR|FILES]...", help="Directories or files that trace py wrote. [default: its default directory]"
        ),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Lines to show per thread.")] = 5,
    grep: Annotated[
        str,
        typer.Option(
            metavar="PATTERN", help="Show the recorded lines that match; a line reads 'file:line function source'."
        ),
    ] = "",
    count: Annotated[str, typer.Option(metavar="PATTERN", help="Count the recorded lines that match, per rank.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="Show all runs, not only the newest.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every rank and every thread.")] = False,
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show the last lines that each rank executed, grouped by place; find the stuck ranks.

    Reads what `distdiag trace py` records, of a running job or of a killed one.

    Exit status: 0 still running, or finished normally, 1 stuck or crashed rank found, 2 wrong usage, 3 the lines
    cannot decide, 130 interrupted.

    \b
    Examples:
      distdiag trace show                            # the newest run on this host
      distdiag trace show --hosts gpu[01-08] --last 20
      distdiag trace show --count 'all_reduce'       # calls per rank
    """
    from distdiag import runner
    from distdiag.cluster.targets import check_paths
    from distdiag.commands.trace.show.check import SUBCOMMAND

    def request() -> Request:
        if not from_:
            check_paths(cluster, paths or (), hint="give what `distdiag trace py` wrote, or leave it out")
        return Request(
            program=called_as(),
            cluster=cluster,
            paths=tuple(paths or ()),
            last=last,
            grep=_pattern("--grep", grep),
            count=_pattern("--count", count),
            all_runs=all_,
            verbose=verbose,
        )

    runner.run(SUBCOMMAND, request, runner.Options(as_json, strict, save, from_, cluster.explain))


def _pattern(option: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is not a regular expression: {error}", param_hint=option) from error
    return text
