"""Runs cuda-env: collects from all nodes in parallel, diagnoses, formats the result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.cluster.start_fleet import Agent
from distdiag.cluster.targets import python_here
from distdiag.commands.cuda_env.collect import Arrived, Ask, CudaFacts
from distdiag.commands.cuda_env.diagnose import diagnose
from distdiag.commands.cuda_env.types import COMMAND, Request
from distdiag.commands.cuda_env.view import cuda_env_view
from distdiag.output import say
from distdiag.runner import Asks, Question, Subcommand
from distdiag.users_python import users_python

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.types import CudaEnv
    from distdiag.output import Progress
    from distdiag.report import Report
    from distdiag.saved_facts import Gathered

_SPARE_S = 20.0
_FOLDER = "distdiag.commands.cuda_env"
_AGENT = Agent(
    collect=f"{_FOLDER}.collect",
    facts=Arrived,
    carries=(f"{_FOLDER}.ask_torch", "distdiag.facts.cuda"),
    examines_python=True,
)


def _collect(request: Request, progress: Progress) -> Gathered[CudaFacts]:
    question = Question[Arrived, CudaFacts, CudaFacts](
        part=CudaFacts,
        plan=lambda hosts, local: Asks(
            by_host=dict.fromkeys(hosts, _ask(request, local=local)), timeout_s=_SPARE_S + 2 * request.timeout_s
        ),
        join=lambda host, _, parts, why: replace(parts[-1], host=host) if parts and not why else None,
        doing="examining the environment",
        each_name=True,
    )
    return runner.gather(request.cluster, _AGENT, question, progress)


def _ask(request: Request, *, local: bool) -> Ask:
    """Return the collect module's options. On other hosts the agent itself runs in the interpreter of --python."""
    if not local:
        return Ask(request.goal, request.timeout_s)
    python, chosen = (python_here(request.python), "") if request.python else users_python()
    return Ask(request.goal, request.timeout_s, python, chosen)


def prepared(request: Request, gathered: Gathered[CudaFacts]) -> Gathered[CudaFacts]:
    """Apply --gpu, and number the nodes that several files give the same name."""
    count: dict[str, int] = {}
    facts = []
    for node in gathered.facts:
        number = count[node.host] = count.get(node.host, 0) + 1
        host = node.host if number == 1 else f"{node.host}#{number}"
        facts.append(replace(node, host=host, meant=request.gpus or node.meant))
    return replace(gathered, facts=facts)


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=CudaFacts,
    collect=_collect,
    diagnose=lambda request, gathered: diagnose(request, prepared(request, gathered)),
    view=lambda request, _, report: cuda_env_view(report, request),
    shown_as_typed=("goal", "only", "ignore", "gpus", "verbose"),
    findings_in_view=True,
)


def export_lines(request: Request, options: runner.Options) -> list[str]:
    """Collect, diagnose and return the lines for eval. Raises UsageError, DistdiagError."""
    return exports(SUBCOMMAND.diagnose(*runner.facts_of(SUBCOMMAND, request, options)))


def exports(report: Report[CudaEnv]) -> list[str]:
    """Format the lines for eval; print problems that variables cannot fix to stderr, with their commands."""
    lines = [f"export {name}={value}" if value else f"unset {name}" for name, value in report.data.exports.items()]
    for step in report.data.steps:
        say(f"distdiag: variables cannot fix {step.id}: {step.title}")
        for command in step.commands:
            say(f"    {command}")
    if not lines:
        say("distdiag: no variable needs to change")
    return lines
