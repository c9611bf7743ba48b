"""hang from its request to its report: find the processes on all nodes, ask every source at the same time, join."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag import runner
from distdiag.cluster.ship_pyspy import bring_py_spy
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.hang.collect import Part
from distdiag.commands.hang.diagnose import diagnose
from distdiag.commands.hang.types import COMMAND, NodeHang, Request
from distdiag.commands.hang.view import hang_view
from distdiag.jobs.collect import Processes
from distdiag.jobs.roles import of_job, to_sample, without_lone
from distdiag.runner import Asks, Question, Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.node import Node
    from distdiag.gathered import Gathered
    from distdiag.output import Progress

_COLLECT = "distdiag.commands.hang.collect"
_BRING_TO = 256
"""Nodes that get a copy of py-spy, 3 MB each; on a cluster it mostly lies on a shared file system."""
_REACH_SHARE = 0.35
"""Of --timeout, for each stage of reaching a host: a dead node costs this much, and the sources have the rest."""
_SPARE_S = 1.0
_ALL_SOURCES = "asking stacks, /proc, NCCL RAS, the flight recorder, the log and the kernel"


def _agent(request: Request) -> Agent:
    ask = {"pids": list(request.wanted.pids), "user": request.wanted.user}
    return Agent(collect=_COLLECT, facts=Processes, ask=ask)


def _collect(request: Request, progress: Progress) -> Gathered[NodeHang]:
    question = Question[Processes, Part, NodeHang](
        part=Part,
        plan=lambda hosts, _: _plan(request, hosts),
        join=lambda host, first, parts, why: join(host, _wanted(first, request), parts, why),
        doing="reading /proc" if request.light else _ALL_SOURCES,
        before=_bring,
    )
    limit_s = request.cluster.host_timeout_s or _REACH_SHARE * request.timeout_s
    cluster = replace(request.cluster, host_timeout_s=limit_s)
    return runner.gather(cluster, _agent(request), question, progress)


def _bring(nodes: Mapping[str, Node]) -> None:
    bring_py_spy(nodes.values(), at_most=_BRING_TO)


def _plan(request: Request, hosts: Mapping[str, Processes]) -> Asks:
    timeout_s = (1 - _REACH_SHARE) * request.timeout_s
    asks = {host: _ask(request, _wanted(processes, request), timeout_s) for host, processes in hosts.items()}
    return Asks(by_host={host: ask for host, ask in asks.items() if ask is not None}, timeout_s=timeout_s)


def _ask(request: Request, processes: Processes, timeout_s: float) -> dict[str, Any] | None:
    """Return what a node is asked; None for one with nothing of a job, and no files that were named."""
    from distdiag.knowledge.job_logs import for_nodes

    pids, once = to_sample(processes.processes, helpers=False)
    if not pids and not request.logs and not request.recorder:
        return None
    ranks = [(p.pid, p.place.rank if p.place else None) for p in processes.processes if p.pid in set(pids) - set(once)]
    return {
        "pids": pids,
        "once": once,
        "ranks": ranks,
        "launchers": [process.pid for process in processes.processes if process.kind == "launcher"],
        "logs": list(request.logs),
        "recorder": list(request.recorder),
        "patterns": for_nodes(),
        "interval_s": request.interval_s,
        "timeout_s": max(2.0, timeout_s - _SPARE_S),
        "ras_s": max(1.0, min(10.0, timeout_s / 2)),
        "light": request.light,
    }


def _wanted(processes: Processes, request: Request) -> Processes:
    return of_job(without_lone(processes) if request.ranks_only else processes, request.wanted.job)


def join(host: str, processes: Processes, parts: Sequence[Part], why: str) -> NodeHang:
    """Make one of what a node sent; of a process that was sent twice the last counts."""
    fields = ("networks", "people", "logs", "bars", "dumps", "ras", "kernel", "versions", "ended")
    return NodeHang(
        host=host,
        processes=processes,
        watched=tuple({each.pid: each for part in parts for each in part.watched}.values()),
        blocked=tuple({each.pid: each for part in parts for each in part.blocked}.values()),
        missing=why,
        **{name: tuple(each for part in parts for each in getattr(part, name)) for name in fields},
    )


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodeHang,
    collect=_collect,
    diagnose=diagnose,
    view=lambda request, _, report: hang_view(report, request),
    explain=lambda request: runner.explain(request.cluster, _agent(request)),
    shown_as_typed=("wanted", "verbose"),
)
