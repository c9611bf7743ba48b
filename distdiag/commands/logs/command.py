"""`distdiag logs`: which rank failed first and why, from the output of a whole job."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.errors import UsageError
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.diagnosis.job_logs.types import Logs, Request
    from distdiag.facts.logs.collect import NodeLogs
    from distdiag.output import Progress
    from distdiag.runner import Asks, Subcommand
    from distdiag.saved_facts import Gathered

_TIMEOUT_S = 3600.0


@on_hosts
def logs(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH]...", help="Log files, folders of logs, or - for stdin.", show_default=False),
    ] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Also list every failure found, in order.")] = False,
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Find the first failure in the logs of a job: its rank and its cause, apart from side effects.

    Reads the prefixes of torchrun, srun, mpirun, mpiexec, pdsh, clush, kubectl and Ray, and .gz, .xz and .zst files.
    With --hosts the paths are read on each host, and only what is found is sent. With --kube and no path: what
    kubectl logs has of all containers, before their last restart too.

    Exit status: 0 no failure, at most warnings, 1 failure explained, 2 wrong usage, 3 the logs do not show the first
    failure (a hang leaves no line at all), 130 interrupted.

    \b
    Examples:
      distdiag logs slurm-4711.out                      # one console of all ranks
      distdiag logs logs/ --timeline                    # torchrun --log-dir logs
      distdiag logs --hosts node[1-64] /tmp/job/logs    # read on each host
    """
    from distdiag import runner
    from distdiag.cluster.targets import check_paths
    from distdiag.diagnosis.job_logs.types import Request

    def request() -> Request:
        if not (paths or from_ or cluster.kube):
            raise UsageError("no log named", hint="distdiag logs FILE, a folder, or - for stdin")
        check_paths(cluster, paths or ())
        return Request(program=called_as(), cluster=cluster, paths=tuple(paths or ()), timeline=timeline)

    runner.run(subcommand(), request, runner.Options(as_json, strict, save, from_))


def subcommand() -> Subcommand[Request, NodeLogs, Logs]:
    """Return the Subcommand for the runner."""
    from distdiag import runner
    from distdiag.commands.logs.view import logs_view
    from distdiag.diagnosis.job_logs.diagnose import diagnose
    from distdiag.diagnosis.job_logs.types import COMMAND, Request
    from distdiag.facts.logs.collect import NodeLogs

    return runner.Subcommand(
        name=COMMAND,
        request=Request,
        facts=NodeLogs,
        collect=_collect,
        diagnose=diagnose,
        view=lambda request, _, report: logs_view(report, timeline=request.timeline),
        shown_as_typed=("timeline",),
    )


def _agent() -> Any:  # noqa: ANN401 - imported late
    from distdiag.cluster.start_fleet import Agent
    from distdiag.facts.logs.collect import NodeLogs

    return Agent(collect="distdiag.facts.logs.collect", facts=NodeLogs)


def _collect(request: Request, progress: Progress) -> Gathered[NodeLogs]:
    from distdiag import runner
    from distdiag.cluster.targets import find_targets
    from distdiag.facts.logs.collect import Ask, NodeLogs
    from distdiag.knowledge.known_lines import for_nodes

    of_pods = request.cluster.kube is not None and not request.paths
    if of_pods or find_targets(request.cluster, os.environ).launcher is None or not request.cluster.typed():
        return _here(request, progress)

    def plan(hosts: Mapping[str, NodeLogs], local: bool) -> Asks:
        return runner.Asks(by_host=dict.fromkeys(hosts, Ask(request.paths, for_nodes())), timeout_s=_TIMEOUT_S)

    question = runner.Question(part=NodeLogs, plan=plan, join=_join, doing="reading the logs")
    return runner.gather(request.cluster, _agent(), question, progress)


def _here(request: Request, progress: Progress) -> Gathered[NodeLogs]:
    """Read in this process, which owns stdin and pipes, and runs kubectl for pods' logs."""
    from distdiag.commands.logs import pod_logs
    from distdiag.facts.logs.collect import Reader
    from distdiag.knowledge.known_lines import for_nodes
    from distdiag.saved_facts import Gathered

    reader, interrupted = Reader(for_nodes()), False
    try:
        if request.cluster.kube is not None and not request.paths:
            pod_logs.read(request.cluster.kube, reader, progress)
        for path in request.paths:
            progress.now(f"reading {path}")
            reader.read(path)
    except KeyboardInterrupt:
        interrupted = True
    return Gathered(facts=[reader.found()], interrupted=interrupted)


def _join(host: str, first: NodeLogs, parts: Sequence[NodeLogs], why: str) -> NodeLogs | None:
    if not parts:
        return None
    events = tuple(event for part in parts for event in part.events)
    return replace(parts[0], host=host, events=events)
