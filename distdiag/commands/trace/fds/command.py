"""What you type for trace fds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.errors import UsageError
from distdiag.options import FromOpt, JobOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.commands.trace.fds.collect import Reply
    from distdiag.commands.trace.fds.diagnose import Request, TraceFds
    from distdiag.commands.trace.nodes import NodeAnswer
    from distdiag.jobs.collect import Processes
    from distdiag.jobs.types import NodeStacks
    from distdiag.output import Progress
    from distdiag.report import Report
    from distdiag.runner import Asks, Subcommand
    from distdiag.saved_facts import Gathered

_COLLECT = "distdiag.commands.trace.fds.collect"
_SPARE_S, _EACH_S = 15.0, 2.0
"""Seconds for a node, and for each process on it: every file system of it may time out."""


@on_hosts
def fds(
    pid: Annotated[
        list[int] | None, typer.Argument(min=1, metavar="[PID]...", help="Processes to read.", show_default=False)
    ] = None,
    more_pids: Annotated[
        list[int] | None, typer.Option("--pid", "-p", min=1, metavar="PID", help="Same as PID; repeatable.")
    ] = None,
    rank: Annotated[
        list[str] | None, typer.Option(metavar="RANKS", help="Only these ranks: 3, or 0-3,7; repeatable.")
    ] = None,
    job: JobOpt = "",
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show what the file descriptors of processes or ranks point to, and which process has the other end.

    Connections lead to ranks, pipes to processes; deleted files are shown with the disk space that they still use.

    Exit status: 0 read, also with warnings, 2 wrong usage, 3 permission denied, or no process found, 130 interrupted.

    \b
    Examples:
      distdiag trace fds 4711
      distdiag trace fds --rank 3 --hosts gpu[01-08]
    """
    from distdiag import runner
    from distdiag.commands.trace.fds.diagnose import Request
    from distdiag.commands.trace.ranks import wanted

    def request() -> Request:
        pids = [*(pid or ()), *(more_pids or ())]
        if not (pids or rank or job or from_):
            raise UsageError("no process selected", hint="distdiag trace fds PID, or --rank 0-3, or --job ID")
        return Request(program=called_as(), cluster=cluster, wanted=wanted(pids, rank, job, ""))

    runner.run(subcommand(), request, runner.Options(as_json, strict, save, from_))


def _plan(nodes: Sequence[NodeStacks], request: Request) -> Asks:
    """Read the selected processes; of the rest of the job, only sockets, as possible other ends."""
    from distdiag.commands.trace.fds.collect import Ask
    from distdiag.commands.trace.ranks import choose
    from distdiag.runner import Asks

    chosen: dict[str, list[int]] = {}
    for choice in choose(nodes, request.wanted):
        if choice.process is not None:
            chosen.setdefault(choice.host, []).append(choice.process.pid)
    asks = {}
    for node in nodes if chosen else ():
        pids = chosen.get(node.host, [])
        others = [process.pid for process in node.processes.processes if process.pid not in pids]
        if pids or others:
            asks[node.host] = Ask(pids, others)
    return Asks(by_host=asks, timeout_s=_SPARE_S + _EACH_S * max(map(len, chosen.values()), default=0))


def subcommand() -> Subcommand[Request, NodeAnswer[Reply], TraceFds]:
    """Return the subcommand for the runner."""
    from distdiag import runner
    from distdiag.commands.trace import nodes
    from distdiag.commands.trace.fds.collect import Reply
    from distdiag.commands.trace.fds.diagnose import COMMAND, Request, diagnose
    from distdiag.commands.trace.fds.view import trace_fds_view
    from distdiag.jobs.types import NodeStacks

    def collect(request: Request, progress: Progress) -> Gathered[NodeAnswer[Reply]]:
        def plan(hosts: Mapping[str, Processes], _: bool) -> Asks:
            return _plan([NodeStacks(host, own, ()) for host, own in hosts.items()], request)

        return nodes.gather(request, progress, _COLLECT, Reply, plan)

    def judge(request: Request, gathered: Gathered[NodeAnswer[Reply]]) -> Report[TraceFds]:
        answers = nodes.answers_of(gathered)
        return diagnose(request, answers, nodes.chosen_of(answers, request.wanted, f"{request.program} {COMMAND}"))

    return runner.Subcommand(
        name=COMMAND,
        request=Request,
        facts=nodes.NodeAnswer[Reply],
        collect=collect,
        diagnose=judge,
        view=lambda _, __, report: trace_fds_view(report.data),
    )
