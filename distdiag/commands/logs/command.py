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
    from distdiag.facts.logs.collect import NodeLogs, Reader
    from distdiag.facts.logs.scan import Event
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
    rank: Annotated[
        list[str] | None,
        typer.Option(metavar="RANKS", help="Print only the lines of these ranks, and exit: 3, or 0-3,7; repeatable."),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="DIR", help="Write the lines of each rank to a file in DIR, and exit.")
    ] = "",
    timeline: Annotated[bool, typer.Option("--timeline", help="Also list every failure found, in order.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep reading a growing log; report failures as they come, until Ctrl-C.")
    ] = False,
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
    from distdiag.commands.logs import separate
    from distdiag.diagnosis.job_logs.types import Request

    if (rank or split) and not from_:
        separate.deliver_streams(paths or [], rank or [], split, has_hosts=bool(cluster.typed()), as_json=as_json)

    def request() -> Request:
        if not (paths or from_ or cluster.kube):
            raise UsageError("no log named", hint="distdiag logs FILE, a folder, or - for stdin")
        if follow and cluster.typed():
            raise UsageError(
                "--follow reads logs of this machine", hint="leave out --hosts, or log in and follow there"
            )
        check_paths(cluster, paths or ())
        return Request(program=called_as(), cluster=cluster, paths=tuple(paths or ()), timeline=timeline, follow=follow)

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

    reader, interrupted = Reader(for_nodes(), follow=request.follow), False
    if request.follow:
        reader.scan.news = lambda event: _tell(reader, event, progress)
    try:
        if request.cluster.kube is not None and not request.paths:
            pod_logs.read(request.cluster.kube, reader, progress)
        for path in request.paths:
            progress.now(f"reading {path}")
            reader.read(path)
    except KeyboardInterrupt:
        interrupted = True
    return Gathered(facts=[reader.found()], interrupted=interrupted)


def _tell(reader: Reader, event: Event, progress: Progress) -> None:
    """Report a failure in a growing log at once."""
    if event.id == "exception" and event.text.endswith("ChildFailedError:"):
        return
    stream = reader.scan.streams[event.stream]
    rank = next((rank for rank in (event.rank, stream.rank, stream.local) if rank is not None), None)
    who = f"rank {rank}: " if rank is not None else ""
    progress.news(f"{who}{event.text.partition(chr(10))[0][:200]}")


def _join(host: str, first: NodeLogs, parts: Sequence[NodeLogs], why: str) -> NodeLogs | None:
    if not parts:
        return None
    events = tuple(event for part in parts for event in part.events)
    return replace(parts[0], host=host, events=events)
