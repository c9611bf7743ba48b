"""What the commands of `trace` do on all nodes: find the processes that may belong to jobs, then ask about some."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from distdiag.cluster import access
from distdiag.cluster.access import Agent, open_fleet
from distdiag.cluster.node import decode
from distdiag.cluster.rows import HostState, Refusal
from distdiag.cluster.targets import describe, find_targets
from distdiag.commands.trace import ranks
from distdiag.errors import DistdiagError
from distdiag.jobs.collect import Processes
from distdiag.jobs.nodes import NodeStacks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.cluster.rows import Row
    from distdiag.cluster.targets import Cluster, Targets
    from distdiag.commands.trace.ranks import Chosen, Wanted
    from distdiag.deliver import Progress

Told = TypeVar("Told")
_UNFINISHED = "not finished when interrupted"


@dataclass(kw_only=True)
class Answers(Generic[Told]):
    """What came: the processes of every node, and by host what was told when asked about them.

    `missing`: by host, why not all was told. `rows` and `refusals`: of the hosts that could not be used.
    """

    nodes: list[NodeStacks] = field(default_factory=list)
    told: dict[str, list[Told]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    interrupted: bool = False


def ask(
    cluster: Cluster,
    agent: Agent,
    plan: Callable[[Sequence[NodeStacks]], Mapping[str, dict[str, Any]]],
    told: type[Told],
    progress: Progress,
) -> Answers[Told]:
    """Find the processes, here or on all nodes that are meant, and ask about those that `plan` chooses.

    Args:
        cluster: which nodes.
        agent: what runs there: a collect whose facts() are distdiag.jobs.collect.facts, and which has a more().
        plan: from the processes of all nodes, by host what more() is to be asked; "timeout_s" of it is how long it may
            take. A host that is left out is not asked.
        told: the type of what more() tells.
        progress: where it is said how far it is.

    Raises:
        UsageError: the options contradict each other.
        DistdiagError: the node side failed on this machine; or what `plan` raises.
    """
    targets = find_targets(cluster, os.environ)
    answers = Answers[Told]()
    with open_fleet(cluster, targets, agent) as fleet:
        try:
            reach(fleet, targets, progress)
            by_host = take_processes(fleet, targets, answers)
            _ask_all(fleet, by_host, plan(answers.nodes), told, answers, progress)
        except KeyboardInterrupt:
            if not answers.nodes:
                raise
            answers.interrupted = True
        answers.rows = () if targets.launcher is None else fleet.rows
        answers.refusals = dict(fleet.refusals)
    return answers


def finder(collect: str, wanted: Wanted) -> Agent:
    """Say what runs on the nodes: a collect that begins with the processes there."""
    return Agent(collect=collect, ask={"pids": list(wanted.pids), "user": wanted.user})


def explain(cluster: Cluster, agent: Agent) -> list[str]:
    """Write how the hosts would be reached."""
    return access.explain(cluster, find_targets(cluster, os.environ), agent)


def chosen_of(answers: Answers[Told], wanted: Wanted, command: str) -> list[Chosen]:
    """Give the processes that were meant. Raises DistdiagError if there is none, and no other reason for that."""
    chosen = ranks.choose(answers.nodes, wanted)
    if not chosen and not answers.refusals and not answers.interrupted:
        raise ranks.nobody(answers.nodes, wanted, command)
    return list(chosen)


def reach(fleet: Fleet, targets: Targets, progress: Progress) -> None:
    """Log in to the nodes, and say how far that is."""
    if targets.launcher is not None:
        progress.news(f"reaching {describe(targets)}")
    fleet.gather(lambda now: progress.now(f"{len(now.up)} of {len(now.hosts)} hosts reached"))


def take_processes(fleet: Fleet, targets: Targets, answers: Answers[Told]) -> dict[str, Node]:
    """Take what the nodes told of their processes, by host; a second name of the same machine adds nothing."""
    by_host = {}
    for node in fleet.machines(local=targets.launcher is None):
        try:
            facts = node.facts(Processes)
        except DistdiagError as error:
            fleet.refuse(node.name, Refusal(state=HostState.NONSENSE, stage="facts", message=str(error)), node.began)
            continue
        host = facts.host if targets.launcher is None else node.host
        answers.nodes.append(NodeStacks(host, facts, ()))
        by_host[host] = node
    return by_host


def _ask_all(
    fleet: Fleet,
    by_host: Mapping[str, Node],
    asks: Mapping[str, dict[str, Any]],
    type_: type[Told],
    answers: Answers[Told],
    progress: Progress,
) -> None:
    """Ask all nodes at the same time."""
    hosts = {by_host[host].name: host for host in asks}
    for host, ask in asks.items():
        by_host[host].order("collect", ask=ask)
        answers.missing[host] = _UNFINISHED
    timeout_s = max((ask["timeout_s"] for ask in asks.values()), default=0.0)
    nodes = [by_host[host] for host in asks]
    for node, facts, why in fleet.more_from(nodes, timeout_s, lambda names: progress.now(f"waiting for {names[:4]}")):
        host = hosts[node.name]
        if why is None:
            try:
                answers.told.setdefault(host, []).append(decode(facts, type_, host))
            except DistdiagError as error:
                answers.missing[host] = str(error)
        elif why or answers.missing[host] == _UNFINISHED:
            answers.missing[host] = why
    answers.missing = {host: why for host, why in answers.missing.items() if why}
