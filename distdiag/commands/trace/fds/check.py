"""collect -> diagnose, for trace fds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.commands.trace import nodes as all_nodes
from distdiag.commands.trace import ranks
from distdiag.commands.trace.fds.collect import Told
from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.fds.model import Request
    from distdiag.commands.trace.fds.result import TraceFds
    from distdiag.deliver import Progress
    from distdiag.jobs.nodes import NodeStacks
    from distdiag.report import Report

_COLLECT = "distdiag.commands.trace.fds.collect"
_SPARE_S, _EACH_S = 15.0, 2.0
"""For a node, and for each process on it: every file system of it may have to be given up."""


def check(request: Request, progress: Progress) -> Report[TraceFds]:
    """Read what the chosen processes have open, on this node or on all that are asked for.

    Raises:
        UsageError: nobody is named, or the options contradict each other.
        DistdiagError: there is no such process; or the node side failed on this machine.
    """
    if not (request.wanted.pids or request.wanted.ranks or request.wanted.job):
        raise UsageError("say of which process", hint="distdiag trace fds PID, or --rank 0-3, or --job ID")
    agent = all_nodes.finder(_COLLECT, request.wanted)
    answers = all_nodes.ask(request.cluster, agent, lambda nodes: _plan(nodes, request), Told, progress)
    chosen = all_nodes.chosen_of(answers, request.wanted, f"{request.program} trace fds")
    from distdiag.commands.trace.fds.diagnose import diagnose

    return diagnose(request, answers, chosen)


def explain(request: Request) -> list[str]:
    """Write how the hosts would be reached."""
    return all_nodes.explain(request.cluster, all_nodes.finder(_COLLECT, request.wanted))


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
