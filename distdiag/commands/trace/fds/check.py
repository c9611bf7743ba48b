"""trace fds from its request to its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.commands.trace import ranks
from distdiag.commands.trace.fds.collect import Told
from distdiag.commands.trace.fds.diagnose import diagnose
from distdiag.commands.trace.fds.model import COMMAND, Request
from distdiag.commands.trace.fds.view import trace_fds_view
from distdiag.commands.trace.nodes import Answers, about_processes, chosen_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.fds.result import TraceFds
    from distdiag.jobs.nodes import NodeStacks
    from distdiag.report import Report

_SPARE_S, _EACH_S = 15.0, 2.0
"""For a node, and for each process on it: every file system of it may have to be given up."""


def _plan(nodes: Sequence[NodeStacks], request: Request) -> dict[str, dict[str, Any]]:
    """Read the chosen ones; of all others of their jobs only the sockets, which may be the other ends."""
    chosen: dict[str, list[int]] = {}
    for one in ranks.choose(nodes, request.wanted):
        if one.process is not None:
            chosen.setdefault(one.host, []).append(one.process.pid)
    if not chosen:
        return {}
    asks = {}
    for node in nodes:
        pids = chosen.get(node.host, [])
        others = [one.pid for one in node.processes.processes if one.pid not in pids]
        if pids or others:
            asks[node.host] = {"pids": pids, "others": others, "timeout_s": _SPARE_S + _EACH_S * len(pids)}
    return asks


def _diagnose(request: Request, answers: Answers[Told]) -> Report[TraceFds]:
    return diagnose(request, answers, chosen_of(answers, request.wanted, f"{request.program} trace fds"))


SUBCOMMAND = about_processes(COMMAND, Request, Told, _plan, _diagnose, trace_fds_view)
