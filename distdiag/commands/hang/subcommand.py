"""hang from request to report: find the ranks on all nodes, read every source concurrently, join."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.hang.diagnose import diagnose
from distdiag.commands.hang.page import content
from distdiag.commands.hang.types import COMMAND, Request
from distdiag.commands.hang.view import hang_view
from distdiag.diagnosis.stuck.types import Source
from distdiag.jobs import pictures
from distdiag.jobs.picture import Ask
from distdiag.jobs.roles import of_job, with_job_of, without_lone
from distdiag.jobs.sample_stacks import LONGEST_S, Sampling
from distdiag.jobs.types import NodePicture
from distdiag.runner import Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.jobs.collect import Processes
    from distdiag.output import Progress
    from distdiag.saved_facts import Gathered

_REACH_SHARE = 0.35
"""Share of --timeout for each stage of reaching a host: the cost of a dead node. The sources use the rest."""
_SPARE_S = 1.0


def _collect(request: Request, progress: Progress) -> Gathered[NodePicture]:
    limit_s = request.cluster.host_timeout_s or _REACH_SHARE * request.timeout_s
    cluster = replace(request.cluster, host_timeout_s=limit_s)
    timeout_s = max(2.0, (1 - _REACH_SHARE) * request.timeout_s - _SPARE_S)
    ask = Ask(
        sources=tuple(Source),
        timeout_s=timeout_s,
        sampling=Sampling(interval_s=request.interval_s, longest_s=0.0 if request.quick else LONGEST_S),
        logs=request.logs,
        recorder=request.recorder,
    )
    longest = f", sampling for up to {LONGEST_S:.0f} s while ranks do not move" if not request.quick else ""
    doing = f"reading all sources{longest}"
    finder = pictures.agent(request.wanted.pids, request.wanted.user)
    return pictures.gather(cluster, finder, ask, lambda hosts: _choose(request, hosts), progress, doing=doing)


def _choose(request: Request, hosts: Mapping[str, Processes]) -> dict[str, Processes]:
    """Return the processes of the requested job."""
    kept = {host: _wanted(processes, request) for host, processes in hosts.items()}
    return with_job_of(kept, request.wanted.pids) if request.wanted.pids else kept


def _wanted(processes: Processes, request: Request) -> Processes:
    return of_job(without_lone(processes) if request.ranks_only else processes, request.wanted.job)


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodePicture,
    collect=_collect,
    diagnose=diagnose,
    view=lambda request, _, report: hang_view(report, request),
    page=content,
    shown_as_typed=("wanted", "verbose"),
)
