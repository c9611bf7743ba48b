"""trace blocked from its request to its report: all processes of the jobs are looked at, on all nodes at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.commands.trace import ranks
from distdiag.commands.trace.blocked.collect import Told
from distdiag.commands.trace.blocked.diagnose import diagnose
from distdiag.commands.trace.blocked.model import COMMAND, Request
from distdiag.commands.trace.blocked.result import LOOK_S
from distdiag.commands.trace.blocked.view import trace_blocked_view
from distdiag.commands.trace.nodes import Answers, about_processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.blocked.result import TraceBlocked
    from distdiag.jobs.nodes import NodeStacks
    from distdiag.report import Report

_SPARE_S, _EACH_S = 15.0, 2.0
"""For a node, and for each process on it: the memory of one, and every file system of it, may have to be given up."""


def _plan(nodes: Sequence[NodeStacks], request: Request) -> dict[str, dict[str, Any]]:
    """Look at all processes of jobs, whoever was chosen: the chosen may wait for any of them."""
    chosen = ranks.choose(nodes, request.wanted)
    if not chosen:
        return {}
    asks = {}
    for node in nodes:
        own = (one.process.pid for one in chosen if one.host == node.host and one.process is not None)
        pids = list(dict.fromkeys((*own, *(one.pid for one in node.processes.processes))))
        if pids:
            asks[node.host] = {"pids": pids, "interval_s": LOOK_S, "timeout_s": _SPARE_S + _EACH_S * len(pids)}
    return asks


def _diagnose(request: Request, answers: Answers[Told]) -> Report[TraceBlocked]:
    return diagnose(request, answers, ranks.choose(answers.nodes, request.wanted))


SUBCOMMAND = about_processes(COMMAND, Request, Told, _plan, _diagnose, trace_blocked_view)
