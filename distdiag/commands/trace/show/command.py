"""What you type for trace show."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.show.model import COMMAND, Request
from distdiag.options import JsonOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.trace.show.collect import NodeLines
    from distdiag.commands.trace.show.result import TraceShow
    from distdiag.report import Report


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
        str, typer.Option(metavar="PATTERN", help="Count per rank how often lines that match were executed.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on showing new last lines of a job that runs.")] = False,
    all_: Annotated[bool, typer.Option("--all", help="All runs, not only the newest.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every rank, every thread.")] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show the last lines that each rank executed, by place, and name the rank that is not where the others are.

    Reads what `distdiag trace py` keeps, of a job that runs or of one that was killed.

    Exit status: 0 it goes on or came to its end, 1 an odd rank was found, 2 wrong usage, 3 the lines cannot decide,
    130 interrupted.
    """
    from distdiag.deliver import Output, Progress, deliver, deliver_lines, is_done_by_another

    seen: list[NodeLines] = []

    def asked() -> Request:
        from distdiag.training.lines.settings import default_folder

        return Request(
            program=called_as(),
            cluster=cluster,
            paths=tuple(paths or (default_folder(),)),
            last=last,
            grep=_pattern("--grep", grep),
            count=_pattern("--count", count),
            all_runs=all_,
            verbose=verbose,
            follow=follow,
        )

    def run() -> Report[TraceShow]:
        from distdiag.commands.trace.show import check

        if is_done_by_another():
            raise typer.Exit(0)
        interrupted = False
        with Progress() as progress:
            if follow:
                try:
                    check.follow(asked(), progress, typer.echo)
                except KeyboardInterrupt:
                    interrupted = True
            report, nodes = check.check(asked(), progress)
        seen.extend(nodes)
        return replace(report, interrupted=report.interrupted or interrupted)

    def view(report: Report[TraceShow]) -> Iterable[RenderableType]:
        from distdiag.commands.trace.show.view import trace_show_view

        return trace_show_view(asked(), seen)

    def commands() -> list[str]:
        from distdiag.commands.trace.show.check import explain

        return explain(asked())

    if follow and as_json:
        raise typer.BadParameter("--follow shows lines as they come; it has no --json", param_hint="--follow")
    if cluster.explain:
        deliver_lines(COMMAND, commands, as_json=as_json)
    deliver(COMMAND, run, view, Output(json=as_json, strict=strict))


def _pattern(option: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is no regular expression: {error}", param_hint=option) from error
    return text
