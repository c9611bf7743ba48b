"""How the commands of `trace` collect: find the processes that may belong to jobs, then ask nodes about some."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distdiag import runner
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.trace import ranks
from distdiag.diagnosis.process_index import ProcessIndex
from distdiag.ids import Id
from distdiag.jobs.collect import Ask, Processes
from distdiag.jobs.types import NodeStacks
from distdiag.report import Finding, Level, Where
from distdiag.runner import Asks, Question, Subcommand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.console import RenderableType

    from distdiag.cluster.host_results import HostError, HostResult
    from distdiag.commands.trace.ranks import Chosen, Wanted
    from distdiag.output import Progress
    from distdiag.report import Report
    from distdiag.saved_facts import Gathered

Reply = TypeVar("Reply")
Data = TypeVar("Data")
AnyRequest = Any
"""A request: each command has its own."""


@dataclass(frozen=True, kw_only=True)
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


def incomplete(answers: Answers[Any]) -> list[Finding]:
    """Report hosts with incomplete replies."""
    return [
        Finding(
            id=Id.TRACE_INCOMPLETE,
            level=Level.UNKNOWN,
            title=f"incomplete facts from {host}: {why}",
            where=Where(hosts=(host,)),
        )
        for host, why in answers.missing.items()
    ]


def about_processes(
    name: str,
    request: type[Any],
    reply: type[Reply],
    plan: Callable[[Sequence[NodeStacks], AnyRequest], Asks],
    diagnose: Callable[[AnyRequest, Answers[Reply]], Report[Data]],
    view: Callable[[Data], Iterable[RenderableType]],
) -> Subcommand[Any, NodeAnswer[Reply], Data]:
    """Return a subcommand that reads some processes of each node.

    Args:
        name: of the command; nodes run jobs.collect.facts and the more() of its folder's collect.
        request: the type of its request.
        reply: the type of more()'s replies.
        plan: from the processes of all nodes, by host the argument of more().
        diagnose: judges; pure. May raise DistdiagError if no selected process exists.
        view: renders the report's data.
    """
    module = f"distdiag.commands.{name.replace(' ', '.')}.collect"

    def collect(request: AnyRequest, progress: Progress) -> Gathered[NodeAnswer[Reply]]:
        question = Question[Processes, Reply, NodeAnswer[Reply]](
            part=reply,
            plan=lambda hosts, _: plan([NodeStacks(host, own, ()) for host, own in hosts.items()], request),
            join=lambda host, first, parts, _: NodeAnswer(host=host, processes=first, replies=tuple(parts)),
        )
        return runner.gather(request.cluster, finder(module, request.wanted), question, progress)

    return Subcommand(
        name=name,
        request=request,
        facts=NodeAnswer[reply],  # type: ignore[valid-type]
        collect=collect,
        diagnose=lambda request, gathered: diagnose(request, answers_of(gathered)),
        view=lambda _, __, report: view(report.data),
        explain=lambda request: runner.explain(request.cluster, finder(module, request.wanted)),
        shown_as_typed=("threads",) if "threads" in request.__dataclass_fields__ else (),
    )


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
