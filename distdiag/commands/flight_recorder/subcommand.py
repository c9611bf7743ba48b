"""flight-recorder from request to report."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.flight_recorder.view import flight_recorder_view
from distdiag.diagnosis.flight_recorder.diagnose import diagnose
from distdiag.diagnosis.flight_recorder.types import COMMAND, Request
from distdiag.facts.recorder.collect import Ask, NodeDumps
from distdiag.runner import Asks, Question, Subcommand

if TYPE_CHECKING:
    from distdiag.output import Progress
    from distdiag.saved_facts import Gathered

_AGENT = Agent(collect="distdiag.facts.recorder.collect", facts=NodeDumps)
_SPARE_S = 600.0
"""Thousands of large dumps on a slow file system."""


def _collect(request: Request, progress: Progress) -> Gathered[NodeDumps]:
    question = Question[NodeDumps, NodeDumps, NodeDumps](
        part=NodeDumps,
        plan=lambda hosts, local: Asks(
            by_host=dict.fromkeys(hosts, _ask(request, local=local)), timeout_s=_SPARE_S + request.wait_s
        ),
        join=lambda host, _, parts, __: NodeDumps(**{**runner.merged(parts), "host": host}),
        doing="triggering the dumps" if request.trigger else "reading the dumps",
    )
    return runner.gather(request.cluster, _AGENT, question, progress)


def _ask(request: Request, *, local: bool) -> Ask:
    paths = [os.path.abspath(path) if local else path for path in request.paths]
    return Ask(paths, request.trigger, request.wait_s)


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodeDumps,
    collect=_collect,
    diagnose=diagnose,
    view=lambda request, _, report: flight_recorder_view(report.data, verbose=request.verbose),
    shown_as_typed=("verbose",),
)
