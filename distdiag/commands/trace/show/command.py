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
        typer.Argument(metavar="[DIR|FILES]...", help="Where lines were kept. [default: where trace py keeps them]"),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Lines to show of a thread.")] = 5,
    grep: Annotated[
        str, typer.Option(metavar="PATTERN", help="Show the lines kept that match: file:line function source.")
    ] = "",
    count: Annotated[
        str, typer.Option(metavar="PATTERN", help="Count per rank how often, of the lines kept, such were executed.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on showing new last lines of a job that runs.")] = False,
    all_: Annotated[bool, typer.Option("--all", help="All runs, not only the newest.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every rank, every thread.")] = False,
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show the last lines that each rank executed, by place, and name the rank that is not where the others are.

    Reads what `distdiag trace py` keeps, of a job that runs or of one that was killed.

    Exit status: 0 it goes on or came to its end, 1 a stuck rank was found, 2 wrong usage, 3 the lines cannot decide,
    130 interrupted.
    """
    from distdiag import runner
    from distdiag.commands.trace.show.check import SUBCOMMAND

    def asked() -> Request:
        return Request(
            program=called_as(),
            cluster=cluster,
            paths=tuple(paths or ()),
            last=last,
            grep=_pattern("--grep", grep),
            count=_pattern("--count", count),
            all_runs=all_,
            verbose=verbose,
            follow=follow,
        )

    if follow and (as_json or from_):
        raise typer.BadParameter(
            "--follow shows lines as they come; it has no --json and no --from", param_hint="--follow"
        )
    runner.run(SUBCOMMAND, asked, runner.Options(as_json, strict, save, from_, cluster.explain))


def _pattern(option: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is no regular expression: {error}", param_hint=option) from error
    return text
