"""pyspy-all from its request to its report: find the processes on all nodes, sample them at the same time, judge."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.cluster.ship_pyspy import bring_py_spy
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.pyspy_all import dumps
from distdiag.commands.pyspy_all.diagnose import diagnose
from distdiag.commands.pyspy_all.types import COMMAND, Request, Threads
from distdiag.commands.pyspy_all.view import pyspy_all_view
from distdiag.errors import UsageError
from distdiag.gathered import Foreign
from distdiag.jobs.collect import Processes, Watched
from distdiag.jobs.roles import find_jobs, of_interest, of_job, short_name, to_sample, without_lone
from distdiag.jobs.types import NodeStacks
from distdiag.runner import Asks, Question, Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.cluster.node import Node
    from distdiag.commands.pyspy_all.types import PySpyAll
    from distdiag.gathered import Gathered
    from distdiag.output import Progress
    from distdiag.report import Report

_COLLECT = "distdiag.jobs.sample_stacks"
_BRING_TO = 256
"""Nodes that py-spy is copied to, 3 MB each; on a cluster it is mostly on a shared file system."""
_SPARE_S = 20.0
_NAMED = 4


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
    """Choose what to sample. Raises UsageError if that would pause several jobs."""
    if request.native and not request.pids and not request.job:
        _refuse_several_jobs(hosts)
    asks = {}
    for host, processes in hosts.items():
        pids, once = to_sample(_only_wanted(processes, request).processes, helpers=request.helpers)
        if pids:
            asks[host] = _ask(request, pids, once)
    timeout_s = _SPARE_S + (request.samples + 1) * (2 * request.timeout_s + request.interval_s)
    return Asks(by_host=asks, timeout_s=timeout_s)


def _refuse_several_jobs(hosts: Mapping[str, Processes]) -> None:
    """Refuse to pause jobs of which only one may be meant. Raises UsageError."""
    jobs = of_interest(find_jobs(NodeStacks(host, processes, ()) for host, processes in hosts.items()))
    if len(jobs) > 1:
        named = sorted(f"--job {shlex.quote(name)}" for job in jobs if (name := short_name(job, jobs)))
        raise UsageError(
            f"--native pauses each process for about a second, and {len(jobs)} jobs are running",
            hint=f"name one: {' or '.join([*named[:_NAMED], '--pid PID'])}",
        )


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
    """Keep the processes of the requested job or pids, with all that belongs to them."""
    kept = of_job(without_lone(facts) if request.ranks_only else facts, request.job, strict=request.native)
    if request.pids:
        pids = set(request.pids)
        own = tuple(process for process in kept.processes if process.pid in pids or pids & set(process.above))
        kept = replace(kept, processes=own)
    return kept


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
