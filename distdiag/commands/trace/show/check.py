"""trace show from its request to its report; with --follow the nodes are polled."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.trace.show.classify import find_runs, newest, position_of
from distdiag.commands.trace.show.collect import Ask, NodeLines
from distdiag.commands.trace.show.diagnose import diagnose
from distdiag.commands.trace.show.types import COMMAND, Request
from distdiag.commands.trace.show.view import trace_show_view
from distdiag.commands.trace.show.wording import clock, does
from distdiag.output import emit
from distdiag.runner import Asks, Question, Subcommand

if TYPE_CHECKING:
    from distdiag.gathered import Gathered
    from distdiag.output import Progress

_AGENT = Agent(collect="distdiag.commands.trace.show.collect", facts=NodeLines)
_PATIENCE_S = 60.0
_FOLLOW_S = 0.5
_LINES_FOR_PLACE = 5


def _collect(request: Request, progress: Progress) -> Gathered[NodeLines]:
    shown: dict[tuple[str, int], tuple[object, ...]] = {}
    question = Question[NodeLines, NodeLines, NodeLines](
        part=NodeLines,
        plan=lambda hosts, local: Asks(by_host=dict.fromkeys(hosts, _ask(request, local=local)), timeout_s=_PATIENCE_S),
        join=lambda host, _, parts, why: replace(parts[-1], host=host) if parts and not why else None,
    )
    return runner.gather(
        request.cluster, _AGENT, question, progress, lambda gathered: request.follow and _follow(gathered, shown)
    )


def _follow(gathered: Gathered[NodeLines], shown: dict[tuple[str, int], tuple[object, ...]]) -> bool:
    """Print each rank's last line if it changed; return whether any rank is still running."""
    states = []
    for member in (member for run in newest(find_runs(gathered.facts)) for member in run.members):
        position, process = position_of(member), member.process
        line = position.line
        states.append(process.state)
        if line is None:
            continue
        place = (line.file, line.line, process.state, line.at_s)
        if shown.get((member.host, process.pid)) != place:
            shown[member.host, process.pid] = place
            rank = f"rank {member.rank}" if member.rank is not None else f"pid {process.pid}"
            state = "" if process.state == "running" else f" ({process.state})"
            emit(f"{clock(line.at_s)}  {rank}  {does(position)}{state}\n")
    if states and "running" not in states:
        return False
    time.sleep(_FOLLOW_S)
    return True


def _ask(request: Request, *, local: bool) -> Ask:
    paths = [os.path.abspath(path) if local else path for path in request.paths]
    # Placing a rank also needs the library lines after the user's last line, even with a small --last.
    return Ask(paths, max(request.last, _LINES_FOR_PLACE), request.grep, request.count)


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodeLines,
    collect=_collect,
    diagnose=diagnose,
    view=lambda request, gathered, _: trace_show_view(request, gathered.facts),
    explain=lambda request: runner.explain(request.cluster, _AGENT),
    shown_as_typed=("last", "all_runs", "verbose"),
)
