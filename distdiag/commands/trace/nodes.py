"""How the commands of `trace` collect: find the processes that may belong to jobs, then ask nodes about some."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distdiag import runner
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.trace import ranks
from distdiag.diagnosis.process_index import ProcessIndex, not_found, ranks_not_found
from distdiag.diagnosis.verdicts import finding
from distdiag.jobs.collect import Ask, Processes
from distdiag.jobs.types import NodeStacks
from distdiag.record import record
from distdiag.report import Where
from distdiag.runner import Asks, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.host_results import HostError, HostResult
    from distdiag.cluster.node import Node
    from distdiag.commands.trace.ranks import Chosen, Wanted
    from distdiag.output import Progress
    from distdiag.report import Finding
    from distdiag.saved_facts import Gathered

Reply = TypeVar("Reply")
AnyRequest = Any
"""A request: each command has its own."""


@record(kw_only=True)
class NodeAnswer(Generic[Reply]):
    """What one node sent: its processes, and its replies about the selected ones."""

    host: str
    processes: Processes
    replies: tuple[Reply, ...] = ()


@dataclass(kw_only=True)
class Answers(Generic[Reply]):
    """The answers of all nodes: processes, and by host the replies about the selected ones.

    `missing`: by host, why replies are incomplete. `rows` and `refusals`: of the unusable hosts.
    """

    nodes: list[NodeStacks] = field(default_factory=list)
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rows: Sequence[HostResult] = ()
    refusals: Mapping[str, HostError] = field(default_factory=dict)
    interrupted: bool = False


def answers_of(gathered: Gathered[NodeAnswer[Reply]]) -> Answers[Reply]:
    """Join the answers of all nodes."""
    return Answers(
        nodes=[NodeStacks(answer.host, answer.processes, ()) for answer in gathered.facts],
        replies={answer.host: list(answer.replies) for answer in gathered.facts if answer.replies},
        missing=gathered.missing,
        rows=gathered.rows,
        refusals=gathered.refusals,
        interrupted=gathered.interrupted,
    )


def incomplete(answers: Answers[Any], wanted: Wanted, chosen: Sequence[Chosen]) -> list[Finding]:
    """Report hosts with incomplete replies, and what was requested and not found."""
    jobs = {} if wanted.pids else {id(each.job): each.job for each in chosen if each.job is not None}
    found = {key: {each.rank for each in chosen if each.job is job} for key, job in jobs.items()}
    return [
        *not_found(answers.nodes, wanted.pids),
        *(
            each
            for key, job in jobs.items()
            for each in ranks_not_found(job, sorted(set(wanted.ranks) - found[key]) if wanted.ranks else job.unseen)
        ),
        *(
            finding("trace-incomplete", where=Where(hosts=(host,)), host=host, why=why)
            for host, why in answers.missing.items()
        ),
    ]


def gather(
    request: AnyRequest,
    progress: Progress,
    collect: str,
    reply: type[Reply],
    plan: Callable[[Mapping[str, Processes], bool], Asks],
    together: Callable[[Fleet, Mapping[str, Node], Sequence[NodeAnswer[Reply]]], list[NodeAnswer[Reply]]] | None = None,
) -> Gathered[NodeAnswer[Reply]]:
    """Ask all nodes for their processes, then some about the selected ones: `plan` and `together` as in Question."""
    question = Question[Processes, Reply, NodeAnswer[Reply]](
        part=reply,
        plan=plan,
        join=lambda host, first, parts, _: NodeAnswer(host=host, processes=first, replies=tuple(parts)),
        together=together,
    )
    return runner.gather(request.cluster, finder(collect, request.wanted), question, progress)


def index_of(answers: Answers[Any]) -> ProcessIndex:
    """Index all processes and the ends of their descriptors, from the replies of each host."""
    ends = {
        host: (
            [network for reply in replies for network in reply.networks],
            [person for reply in replies for person in reply.peer_processes],
        )
        for host, replies in answers.replies.items()
    }
    return ProcessIndex(answers.nodes, ends)


def finder(collect: str, wanted: Wanted) -> Agent:
    """Return the agent that runs on the nodes: a collect that begins with the processes there."""
    return Agent(collect=collect, facts=Processes, ask=Ask(wanted.pids, wanted.user))


def chosen_of(answers: Answers[Reply], wanted: Wanted, command: str) -> list[Chosen]:
    """Return the selected processes. Raises DistdiagError if none exists and every host was read."""
    chosen = ranks.choose(answers.nodes, wanted)
    if not chosen and not answers.refusals and not answers.interrupted:
        raise ranks.none_found(answers.nodes, wanted, command)
    return list(chosen)
