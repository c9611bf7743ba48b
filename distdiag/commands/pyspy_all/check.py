"""collect -> diagnose, for pyspy-all: find the processes on all nodes, look at them at the same time, judge."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distdiag import deliver
from distdiag.cluster import access
from distdiag.cluster.access import Agent, open_fleet
from distdiag.cluster.node import decode
from distdiag.cluster.rows import HostState, Refusal
from distdiag.cluster.targets import describe, find_targets
from distdiag.cluster.toolbox import bring_py_spy
from distdiag.commands.pyspy_all.model import Request, Threads
from distdiag.errors import DistdiagError
from distdiag.jobs.collect import Processes, Watched
from distdiag.jobs.nodes import NodeStacks
from distdiag.jobs.roles import answers_to, to_look_at

if TYPE_CHECKING:
    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.cluster.targets import Targets
    from distdiag.commands.pyspy_all.result import PySpyAll
    from distdiag.deliver import Progress
    from distdiag.jobs.collect import Process
    from distdiag.report import Report

_COLLECT = "distdiag.commands.pyspy_all.collect"
_BRING_TO = 256
"""Nodes that py-spy is brought to, 3 MB each; on a cluster it mostly lies on a shared file system."""
_SPARE_S = 10.0


@dataclass
class _Seen:
    """What came from one node so far."""

    host: str
    processes: Processes
    todo: int
    watched: dict[int, Watched] = field(default_factory=dict)
    missing: str = "not finished when interrupted"


def check(request: Request, progress: Progress) -> tuple[Report[PySpyAll], list[NodeStacks]]:
    """Look at the jobs on this node, or on all nodes that are asked for; the facts are given back for --save.

    Raises:
        UsageError: the options contradict each other.
        DistdiagError: the node side failed on this machine.
    """
    targets = find_targets(request.cluster, os.environ)
    with open_fleet(request.cluster, targets, _agent(request)) as fleet:
        if targets.launcher is not None:
            progress.news(f"reaching {describe(targets)}")
        # What judges and draws is loaded while the nodes have their hands full.
        from distdiag.commands.pyspy_all.diagnose import diagnose

        deliver.load()
        seen: dict[str, _Seen] = {}
        interrupted = False
        try:
            fleet.gather(lambda now: progress.now(f"{len(now.up)} of {len(now.hosts)} hosts reached"))
            seen = _processes(fleet, targets, request)
            _look(fleet, seen, request, progress)
        except KeyboardInterrupt:
            if not seen:
                raise
            interrupted = True
        nodes = [NodeStacks(one.host, one.processes, tuple(one.watched.values()), one.missing) for one in seen.values()]
        rows = () if targets.launcher is None else fleet.rows
        report = diagnose(request, nodes, rows=rows, refusals=dict(fleet.refusals), interrupted=interrupted)
    return report, nodes


def explain(request: Request) -> list[str]:
    """Write how the hosts would be reached."""
    return access.explain(request.cluster, find_targets(request.cluster, os.environ), _agent(request))


def _agent(request: Request) -> Agent:
    return Agent(collect=_COLLECT, ask={"pids": list(request.pids), "user": request.user})


def _processes(fleet: Fleet, targets: Targets, request: Request) -> dict[str, _Seen]:
    """Take what the nodes told of their processes; a second name of the same machine adds nothing."""
    seen = {}
    for node in fleet.machines(local=targets.launcher is None):
        try:
            facts = node.facts(Processes)
        except DistdiagError as error:
            fleet.refuse(node.name, Refusal(state=HostState.NONSENSE, stage="facts", message=str(error)), node.began)
            continue
        host = facts.host if targets.launcher is None else node.host
        seen[node.name] = _Seen(host, _only_wanted(facts, request), 0)
    return seen


def _only_wanted(facts: Processes, request: Request) -> Processes:
    """Keep the processes of the job or the pids that were asked for, with all that belongs to them."""
    kept = list(facts.processes)
    if request.job:
        named = {one.pid for one in kept if answers_to(one.job, request.job)}
        parents = {one.parent for one in kept if one.pid in named}
        kept = [one for one in kept if one.pid in named or named & set(one.above) or _is_beside(one, parents)]
        kept += [one for one in facts.processes if one.store and one.pid in parents and one not in kept]
    if request.pids:
        pids = set(request.pids)
        kept = [one for one in kept if one.pid in pids or pids & set(one.above)]
    return Processes(
        host=facts.host,
        user=facts.user,
        ptrace_scope=facts.ptrace_scope,
        may_trace=facts.may_trace,
        processes=tuple(kept),
        asked_missing=facts.asked_missing,
    )


def _is_beside(one: Process, parents: set[int]) -> bool:
    return one.parent in parents and (one.hidden or one.state == "Z")


def _look(fleet: Fleet, seen: dict[str, _Seen], request: Request, progress: Progress) -> None:
    """Look at all processes of all nodes at the same time."""
    nodes = [node for node in fleet.up if node.name in seen]
    bring_py_spy((node for node in nodes if seen[node.name].processes.processes), at_most=_BRING_TO)
    busy: dict[str, Node] = {}
    for node in nodes:
        pids, once = to_look_at(seen[node.name].processes.processes, helpers=request.helpers)
        seen[node.name].missing = ""
        if pids:
            node.order("collect", ask=_ask(request, pids, once))
            seen[node.name].missing = "not finished when interrupted"
            seen[node.name].todo = len(pids)
            busy[node.name] = node
    total = sum(one.todo for one in seen.values())
    if total:
        progress.news(f"looking at {total} processes on {len(busy)} host{'s' if len(busy) > 1 else ''}")

    def tell(names: list[str]) -> None:
        done = sum(len(one.watched) for one in seen.values())
        progress.now(f"{done} of {total} processes looked at; waiting for {', '.join(names[:4])}")

    broken: set[str] = set()
    timeout_s = _SPARE_S + request.samples * (2 * request.timeout_s + request.interval_s)
    for node, facts, why in fleet.more_from(busy.values(), timeout_s, tell):
        if why is None:
            try:
                watched = decode(facts, Watched, node.host)
                seen[node.name].watched[watched.pid] = watched
            except DistdiagError as error:
                broken.add(node.name)
                seen[node.name].missing = str(error)
        elif node.name not in broken:
            seen[node.name].missing = why


def _ask(request: Request, pids: list[int], once: list[int]) -> dict[str, object]:
    return {
        "pids": pids,
        "once": once,
        "samples": request.samples,
        "interval_s": request.interval_s,
        "timeout_s": request.timeout_s,
        "native": request.native,
        "counters": True,
        "all_threads": request.threads is Threads.ALL,
    }
