"""What you type for trace show."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.show.types import COMMAND, Request
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.commands.trace.show.collect import NodeLines
    from distdiag.commands.trace.show.types import TraceShow
    from distdiag.output import Progress
    from distdiag.runner import Asks, Subcommand
    from distdiag.saved_facts import Gathered

_PATIENCE_S = 60.0
_LINES_FOR_PLACE = 5


@on_hosts
def trace_show(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR|FILES]...", help="Directories or files that trace py wrote. [default: its default directory]"
        ),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Lines to show per thread.")] = 5,
    count: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="Count the recorded lines that match, per rank; a line reads 'file:line function source'.",
        ),
    ] = "",
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

    def request() -> Request:
        if not from_:
            check_paths(cluster, paths or (), hint="give what `distdiag trace py` wrote, or leave it out")
        return Request(
            program=called_as(),
            cluster=cluster,
            paths=tuple(paths or ()),
            last=last,
            count=_pattern(count),
            all_runs=all_,
            verbose=verbose,
        )

    runner.run(_subcommand(), request, runner.Options(as_json, strict, save, from_))


def _subcommand() -> Subcommand[Request, NodeLines, TraceShow]:
    from distdiag import runner
    from distdiag.cluster.start_fleet import Agent
    from distdiag.commands.trace.show.collect import Ask, NodeLines
    from distdiag.commands.trace.show.diagnose import diagnose
    from distdiag.commands.trace.show.view import trace_show_view

    agent = Agent(collect="distdiag.commands.trace.show.collect", facts=NodeLines)

    def collect(request: Request, progress: Progress) -> Gathered[NodeLines]:
        def plan(hosts: Mapping[str, NodeLines], local: bool) -> Asks:
            paths = [os.path.abspath(path) if local else path for path in request.paths]
            # Placing a rank also needs the library lines after the user's last line, even with a small --last.
            ask = Ask(paths, max(request.last, _LINES_FOR_PLACE), request.count)
            return runner.Asks(by_host=dict.fromkeys(hosts, ask), timeout_s=_PATIENCE_S)

        def join(host: str, _: NodeLines, parts: Sequence[NodeLines], why: str) -> NodeLines | None:
            return replace(parts[-1], host=host) if parts and not why else None

        question = runner.Question[NodeLines, NodeLines, NodeLines](part=NodeLines, plan=plan, join=join)
        return runner.gather(request.cluster, agent, question, progress)

    return runner.Subcommand(
        name=COMMAND,
        request=Request,
        facts=NodeLines,
        collect=collect,
        diagnose=diagnose,
        view=lambda request, gathered, _: trace_show_view(request, gathered.facts),
        shown_as_typed=("last", "all_runs", "verbose"),
    )


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is not a regular expression: {error}", param_hint="--count") from error
    return text
