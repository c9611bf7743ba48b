"""pyspy-all from its request to its report: find the processes on all nodes, sample them at the same time, judge."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.cluster.ship_pyspy import bring_py_spy
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.pyspy_all import dumps
from distdiag.commands.pyspy_all.diagnose import diagnose
from distdiag.commands.pyspy_all.types import COMMAND, Request, Threads
from distdiag.commands.pyspy_all.view import pyspy_all_view
from distdiag.gathered import Foreign
from distdiag.jobs.collect import Processes, Watched
from distdiag.jobs.roles import answers_to, to_sample
from distdiag.jobs.types import NodeStacks
from distdiag.runner import Asks, Question, Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.cluster.node import Node
    from distdiag.commands.pyspy_all.types import PySpyAll
    from distdiag.gathered import Gathered
    from distdiag.jobs.collect import Process
    from distdiag.output import Progress
    from distdiag.report import Report

_COLLECT = "distdiag.jobs.sample_stacks"
_BRING_TO = 256
"""Nodes that py-spy is copied to, 3 MB each; on a cluster it is mostly on a shared file system."""
_SPARE_S = 20.0


def _agent(request: Request) -> Agent:
    return Agent(collect=_COLLECT, facts=Processes, ask={"pids": list(request.pids), "user": request.user})


def _collect(request: Request, progress: Progress) -> Gathered[NodeStacks]:
    def before(nodes: Mapping[str, Node]) -> None:
        bring_py_spy(nodes.values(), at_most=_BRING_TO)

    question = Question[Processes, Watched, NodeStacks](
        part=Watched,
        plan=lambda hosts, local: _plan(request, hosts),
        join=lambda host, first, parts, why: NodeStacks(host, _only_wanted(first, request), tuple(parts), why),
        doing="sampling the processes",
        before=before,
    )
    return runner.gather(request.cluster, _agent(request), question, progress)


def _plan(request: Request, hosts: Mapping[str, Processes]) -> Asks:
    asks = {}
    for host, processes in hosts.items():
        pids, once = to_sample(_only_wanted(processes, request).processes, helpers=request.helpers)
        if pids:
            asks[host] = _ask(request, pids, once)
    timeout_s = _SPARE_S + (request.samples + 1) * (2 * request.timeout_s + request.interval_s)
    return Asks(by_host=asks, timeout_s=timeout_s)


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


def _only_wanted(facts: Processes, request: Request) -> Processes:
    """Keep the processes of the requested job or pids, with their children, launchers and stores."""
    kept = list(facts.processes)
    if request.job:
        named = {process.pid for process in kept if answers_to(process.job, request.job)}
        parents = {process.parent for process in kept if process.pid in named}
        kept = [
            process
            for process in kept
            if process.pid in named or named & set(process.above) or _is_beside(process, parents)
        ]
        kept += [
            process for process in facts.processes if process.store and process.pid in parents and process not in kept
        ]
    if request.pids:
        pids = set(request.pids)
        kept = [process for process in kept if process.pid in pids or pids & set(process.above)]
    return Processes(
        host=facts.host,
        user=facts.user,
        ptrace_scope=facts.ptrace_scope,
        may_trace=facts.may_trace,
        processes=tuple(kept),
        asked_missing=facts.asked_missing,
        asked_unseen=facts.asked_unseen,
    )


def _is_beside(process: Process, parents: set[int]) -> bool:
    return process.parent in parents and (process.hidden or process.state == "Z")


def _diagnose(request: Request, gathered: Gathered[NodeStacks]) -> Report[PySpyAll]:
    known = {node.host for node in gathered.facts}
    unread = [_unread(host, why) for host, why in gathered.missing.items() if host not in known]
    return diagnose(
        request,
        [*gathered.facts, *unread],
        rows=gathered.rows,
        refusals=gathered.refusals,
        interrupted=gathered.interrupted,
    )


def _unread(host: str, why: str) -> NodeStacks:
    """Return a node without facts for a file that could not be read."""
    nothing = Processes(host, -1, None, may_trace=False, processes=(), asked_missing=())
    return NodeStacks(host, nothing, (), why)


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodeStacks,
    collect=_collect,
    diagnose=_diagnose,
    view=lambda request, _, report: pyspy_all_view(report, request),
    explain=lambda request: runner.explain(request.cluster, _agent(request)),
    shown_as_typed=("job", "threads", "helpers", "tree", "groups", "verbose"),
    foreign=Foreign(dumps.of_file, dumps.as_nodes, lambda request: replace(request, samples=1, interval_s=0.0)),
)
