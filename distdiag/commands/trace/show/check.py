"""trace show from its request to its report."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.trace.show.collect import Ask, NodeLines
from distdiag.commands.trace.show.diagnose import diagnose
from distdiag.commands.trace.show.types import COMMAND, Request
from distdiag.commands.trace.show.view import trace_show_view
from distdiag.runner import Asks, Question, Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.output import Progress
    from distdiag.saved_facts import Gathered

_AGENT = Agent(collect="distdiag.commands.trace.show.collect", facts=NodeLines)
_PATIENCE_S = 60.0
_LINES_FOR_PLACE = 5
"""Placing a rank also needs the library lines after the user's last line, even with a small --last."""


def _collect(request: Request, progress: Progress) -> Gathered[NodeLines]:
    def plan(hosts: Mapping[str, NodeLines], local: bool) -> Asks:
        paths = [os.path.abspath(path) if local else path for path in request.paths]
        # Placing a rank also needs the library lines after the user's last line, even with a small --last.
        ask = Ask(paths, max(request.last, _LINES_FOR_PLACE), request.grep, request.count)
        return Asks(by_host=dict.fromkeys(hosts, ask), timeout_s=_PATIENCE_S)

    question = Question[NodeLines, NodeLines, NodeLines](
        part=NodeLines,
        plan=plan,
        join=lambda host, _, parts, why: replace(parts[-1], host=host) if parts and not why else None,
    )
    return runner.gather(request.cluster, _AGENT, question, progress)


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
