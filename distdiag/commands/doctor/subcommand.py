"""doctor from request to report: reads facts on all nodes in parallel, and compares clocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.cluster.start_fleet import Agent
from distdiag.cluster.targets import python_here
from distdiag.commands.doctor import paths
from distdiag.commands.doctor.collect import Arrived, Ask, Clock, Part
from distdiag.commands.doctor.diagnose import diagnose
from distdiag.commands.doctor.types import COMMAND, NodeDoctor, Request
from distdiag.commands.doctor.view import doctor_view, page_content
from distdiag.knowledge.known_lines import for_kernels
from distdiag.runner import Asks, Question, Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.output import Progress
    from distdiag.saved_facts import Gathered

_AGENT = Agent(
    collect="distdiag.commands.doctor.collect",
    facts=Arrived,
    carries=("distdiag.facts.cuda",),
    examines_python=True,
    start_s=10.0,  # an unreachable node delays the others by this much
)
_SPARE_S = 4.0


def _collect(request: Request, progress: Progress) -> Gathered[NodeDoctor]:
    def ask(*, local: bool) -> Ask:
        # On other hosts the node side itself runs in the interpreter given by --python.
        python = python_here(request.cluster.python) if local else ""
        return Ask(request.paths, request.timeout_s, python, for_kernels())

    question = Question[Arrived, Part, NodeDoctor](
        part=Part,
        plan=lambda hosts, local: Asks(
            by_host=dict.fromkeys(hosts, ask(local=local)), timeout_s=request.timeout_s + _SPARE_S
        ),
        join=lambda host, _, parts, why: NodeDoctor(host=host, missing=why, **runner.merged(parts)),
        doing="reading limits, disks, network, GPUs and versions",
        timed=_with_clock,
        together=_with_paths if request.connects else None,
    )
    return runner.gather(request.cluster, _AGENT, question, progress)


def _with_clock(part: Part, asked_at: float, read_at: float) -> Part:
    """Compare the clocks, assuming that the node read its own halfway between request and reply."""
    if part.time_s is None:
        return part
    half = max(0.0, read_at - asked_at) / 2
    return replace(part, clock=Clock(part.time_s - (asked_at + half), half))


def _with_paths(fleet: Fleet, nodes: Mapping[str, Node], facts: Sequence[NodeDoctor]) -> list[NodeDoctor]:
    """Test the paths between the nodes that sent facts, and add the results to the facts."""
    up = {node.name for node in fleet.up}
    hosts = {node.host for node in facts}
    known = {host: node for host, node in nodes.items() if host in hosts and node.name in up}
    if len(known) < 2:
        return list(facts)
    variables = {node.host: node.system.variables for node in facts if node.system is not None}
    seen = paths.PathProbe(fleet, known, variables).run()
    return [replace(node, paths=seen.get(node.host)) for node in facts]


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodeDoctor,
    collect=_collect,
    diagnose=diagnose,
    view=lambda request, _, report: doctor_view(report, verbose=request.verbose),
    page=page_content,
    shown_as_typed=("only", "ignore", "verbose"),
    findings_in_view=True,
)
