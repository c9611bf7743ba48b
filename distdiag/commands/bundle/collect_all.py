"""Collection of a bundle: the facts of its commands, one after another, then bundle's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distdiag import runner
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.bundle.collect import Ask, Part
from distdiag.commands.bundle.find_job import taken_job
from distdiag.commands.bundle.parts import PARTS
from distdiag.commands.bundle.types import NodeDetails
from distdiag.errors import DistdiagError, Interrupted, UsageError
from distdiag.jobs import collect as processes_of
from distdiag.jobs.collect import Processes
from distdiag.jobs.roles import of_job, to_sample, without_lone
from distdiag.runner import Asks, Question
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.cluster.targets import Cluster
    from distdiag.commands.bundle import parts
    from distdiag.commands.bundle.types import Request, TakenJob
    from distdiag.output import Progress
    from distdiag.report import Report

_COLLECT = "distdiag.commands.bundle.collect"
_REACH_SHARE = 0.15
"""Share of --timeout for each stage of reaching a host, which every part repeats."""
_OWN_SHARE = 0.2
_TAIL_BYTES = 256 * 2**10
_ALL_TAILS_BYTES = 4 * 2**20


@dataclass(kw_only=True)
class Collected:
    """The unredacted facts of one command. `error`: why it has none."""

    part: parts.Part
    request: Any
    gathered: Gathered[Any]
    report: Report[Any] | None = None
    error: str = ""


def agent(request: Request) -> Agent:
    """Return the agent that reads bundle's own facts."""
    return Agent(collect=_COLLECT, facts=Processes, ask=processes_of.Ask(user=request.user))


def find_job(request: Request, progress: Progress) -> TakenJob | None:
    """Find the job on the nodes.

    Raises:
        UsageError: several jobs; or contradictory options.
        Interrupted: by Ctrl-C.
        DistdiagError: the agent failed on this machine.
    """
    gathered = runner.gather_once(_bounded(request), agent(request), progress)
    if gathered.interrupted:
        raise Interrupted
    return taken_job(request, gathered.facts)


def collect(request: Request, progress: Progress) -> tuple[Gathered[NodeDetails], list[Collected]]:
    """Collect all facts; an interrupt ends it with the facts so far.

    Raises:
        UsageError: contradictory options.
        DistdiagError: the agent failed on this machine.
    """
    cluster = _bounded(request)
    collected: list[Collected] = []
    details = Gathered[NodeDetails](interrupted=True)
    for part in PARTS:  # stacks first: these change
        collected.append(_part(part, request, cluster, progress))
        if collected[-1].gathered.interrupted:
            return details, collected
    details = _details(request, cluster, progress)
    return details, collected


def _bounded(request: Request) -> Cluster:
    limit_s = request.cluster.host_timeout_s or max(2.0, _REACH_SHARE * request.timeout_s)
    return replace(request.cluster, host_timeout_s=limit_s)


def _part(part: parts.Part, request: Request, cluster: Cluster, progress: Progress) -> Collected:
    subcommand = part.subcommand()
    asked = part.request(subcommand.request(program=request.program, cluster=request.cluster), request)
    progress.news(f"collecting the facts of {part.name}")
    try:
        gathered = subcommand.collect(replace(asked, cluster=cluster), progress)
    except UsageError:
        raise
    except DistdiagError as error:  # the other commands are useful without it
        return Collected(part=part, request=asked, gathered=Gathered(), error=str(error))
    report = subcommand.diagnose(asked, gathered)
    return Collected(part=part, request=asked, gathered=gathered, report=report)


def _details(request: Request, cluster: Cluster, progress: Progress) -> Gathered[NodeDetails]:
    question = Question[Processes, Part, NodeDetails](
        part=Part,
        plan=lambda hosts, _: _plan(request, hosts),
        join=lambda host, _, parts, why: NodeDetails(host=host, missing=why, **runner.merged(parts)),
        doing="reading limits, settings and the ends of logs",
    )
    return runner.gather(cluster, agent(request), question, progress)


def _plan(request: Request, hosts: Mapping[str, Processes]) -> Asks:
    return Asks(
        by_host={host: _ask(request, processes) for host, processes in hosts.items()},
        timeout_s=max(5.0, _OWN_SHARE * request.timeout_s),
    )


def _ask(request: Request, on_host: Processes) -> Ask:
    processes = of_job(without_lone(on_host), request.job, strict=True).processes
    sampled = set(to_sample(processes)[0])
    ranks = [process for process in processes if process.pid in sampled]
    above = {pid for process in ranks for pid in process.above}
    return Ask(
        ranks=[(process.pid, process.place.rank if process.place else None) for process in ranks],
        launchers=[p.pid for p in processes if p.kind == "launcher" and p.pid in above],
        logs=request.logs,
        tail_bytes=_TAIL_BYTES,
        most_bytes=_ALL_TAILS_BYTES,
    )
