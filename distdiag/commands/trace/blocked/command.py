"""What you type for trace blocked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.blocked.types import COMMAND, Request, Threads
from distdiag.commands.trace.ranks import choose, wanted
from distdiag.jobs.sample_waits import SAMPLED_S
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.blocked.types import TraceBlocked
    from distdiag.commands.trace.nodes import Answers, NodeAnswer
    from distdiag.jobs.sample_waits import Reply
    from distdiag.jobs.types import NodeStacks
    from distdiag.report import Report
    from distdiag.runner import Subcommand

_SPARE_S, _EACH_S = 15.0, 2.0
"""Seconds for a node, and for each process on it: reading its memory or a file system of it may time out."""


@on_hosts
def blocked(
    pid: Annotated[
        list[int] | None,
        typer.Option("--pid", "-p", min=1, metavar="PID", help="This process, and what it waits for; repeatable."),
    ] = None,
    rank: Annotated[
        list[str] | None, typer.Option(metavar="RANKS", help="Only these ranks: 3, or 0-3,7; repeatable.")
    ] = None,
    job: Annotated[
        str, typer.Option(metavar="ID", help="Only this job: torchrun's run id, MASTER_ADDR:MASTER_PORT or a SLURM id.")
    ] = "",
    user: Annotated[
        str, typer.Option(metavar="NAME", help="Only processes of this user. [default: all that are visible]")
    ] = "",
    threads: Annotated[Threads, typer.Option(help="Which threads to show.")] = Threads.MAIN,
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show what every rank is blocked on and which process has the other end, and name the rank that blocks the others.

    It only reads /proc: no process is paused or traced, and no tool is needed. For Python or C stacks, use pyspy-all.

    Exit status: 0 no hang seen, 1 a rank blocks the others, 2 wrong usage, 3 /proc cannot decide, or no process
    found, 130 interrupted.

    \b
    Examples:
      distdiag trace blocked                         # every rank on this host
      distdiag trace blocked --hosts gpu[01-08]
      distdiag trace blocked --rank 3 --threads all
    """
    from distdiag import runner

    def request() -> Request:
        return Request(program=called_as(), cluster=cluster, wanted=wanted(pid, rank, job, user), threads=threads)

    runner.run(subcommand(), request, runner.Options(as_json, strict, save, from_, cluster.explain))


def _plan(nodes: Sequence[NodeStacks], request: Request) -> dict[str, dict[str, Any]]:
    """Ask about all processes of jobs: the selected processes may wait for any of them."""
    chosen = choose(nodes, request.wanted)
    if not chosen:
        return {}
    asks = {}
    for node in nodes:
        own = (choice.process.pid for choice in chosen if choice.host == node.host and choice.process is not None)
        pids = list(dict.fromkeys((*own, *(process.pid for process in node.processes.processes))))
        if pids:
            asks[node.host] = {"pids": pids, "interval_s": SAMPLED_S, "timeout_s": _SPARE_S + _EACH_S * len(pids)}
    return asks


def subcommand() -> Subcommand[Request, NodeAnswer[Reply], TraceBlocked]:
    """Return the subcommand for the runner."""
    from distdiag.commands.trace.blocked.diagnose import diagnose
    from distdiag.commands.trace.blocked.view import trace_blocked_view
    from distdiag.commands.trace.nodes import about_processes
    from distdiag.jobs.sample_waits import Reply

    def judge(request: Request, answers: Answers[Reply]) -> Report[TraceBlocked]:
        return diagnose(request, answers, choose(answers.nodes, request.wanted))

    return about_processes(COMMAND, Request, Reply, _plan, judge, trace_blocked_view)
