"""collect -> diagnose, for trace blocked: look at all processes of the jobs, on all nodes at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.commands.trace import nodes as all_nodes
from distdiag.commands.trace import ranks
from distdiag.commands.trace.blocked.collect import Told
from distdiag.commands.trace.blocked.result import LOOK_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.blocked.model import Request
    from distdiag.commands.trace.blocked.result import TraceBlocked
    from distdiag.deliver import Progress
    from distdiag.jobs.nodes import NodeStacks
    from distdiag.report import Report

_COLLECT = "distdiag.commands.trace.blocked.collect"
_SPARE_S, _EACH_S = 15.0, 2.0
"""For a node, and for each process on it: the memory of one, and every file system of it, may have to be given up."""


def check(request: Request, progress: Progress) -> Report[TraceBlocked]:
    """Look at the jobs on this node, or on all nodes that are asked for.

    Raises:
        UsageError: the options contradict each other.
        DistdiagError: there is no such process; or the node side failed on this machine.
    """
    agent = all_nodes.finder(_COLLECT, request.wanted)
    answers = all_nodes.ask(request.cluster, agent, lambda nodes: _plan(nodes, request), Told, progress)
    chosen = all_nodes.chosen_of(answers, request.wanted, f"{request.program} trace blocked")
    from distdiag.commands.trace.blocked.diagnose import diagnose

    return diagnose(request, answers, chosen)


def explain(request: Request) -> list[str]:
    """Write how the hosts would be reached."""
    return all_nodes.explain(request.cluster, all_nodes.finder(_COLLECT, request.wanted))


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
