"""trace blocked from its request to its report: read all processes of jobs, judge the ranks as hang does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.trace.blocked.diagnose import diagnose
from distdiag.commands.trace.blocked.types import COMMAND, Request
from distdiag.commands.trace.blocked.view import trace_blocked_view
from distdiag.commands.trace.ranks import choose
from distdiag.diagnosis.stuck.types import OF_PROCESSES
from distdiag.jobs import pictures
from distdiag.jobs.picture import Ask
from distdiag.jobs.roles import of_job
from distdiag.jobs.sample_stacks import Sampling
from distdiag.jobs.types import NodePicture, NodeStacks
from distdiag.runner import Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.jobs.collect import Processes
    from distdiag.output import Progress
    from distdiag.saved_facts import Gathered

_LONGEST_S = 11.0
"""Maximum sampling time for ranks without progress."""
_SPARE_S = 20.0


def _collect(request: Request, progress: Progress) -> Gathered[NodePicture]:
    sampling = Sampling(longest_s=_LONGEST_S)
    ask = Ask(sources=OF_PROCESSES, timeout_s=_SPARE_S + sampling.takes_s(), sampling=sampling, waits_of_all=True)
    return pictures.gather(
        request.cluster,
        pictures.agent(request.wanted.pids, request.wanted.user),
        ask,
        lambda hosts: _chosen(request, hosts),
        progress,
        doing="reading the processes",
    )


def _chosen(request: Request, hosts: Mapping[str, Processes]) -> Mapping[str, Processes]:
    """Return the processes of the selected jobs if a selected process exists: it may wait for any of its job."""
    nodes = [NodeStacks(host, processes, ()) for host, processes in hosts.items()]
    if not choose(nodes, request.wanted):
        return {}
    name = "" if request.wanted.pids else request.wanted.job
    return {host: of_job(processes, name) for host, processes in hosts.items()}


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodePicture,
    collect=_collect,
    diagnose=diagnose,
    view=lambda _, __, report: trace_blocked_view(report.data),
    shown_as_typed=("threads",),
)
