"""pyspy-all from request to report: find the processes on all nodes, sample concurrently, judge."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.pyspy_all import dumps
from distdiag.commands.pyspy_all.diagnose import diagnose
from distdiag.commands.pyspy_all.page import content
from distdiag.commands.pyspy_all.types import COMMAND, Request, Threads
from distdiag.commands.pyspy_all.view import pyspy_all_view
from distdiag.diagnosis.stuck.types import OF_PROCESSES
from distdiag.errors import UsageError
from distdiag.jobs import pictures
from distdiag.jobs.picture import Ask
from distdiag.jobs.roles import find_jobs, job_options, of_interest, of_job, without_lone
from distdiag.jobs.sample_stacks import Sampling
from distdiag.jobs.types import NodePicture, NodeStacks
from distdiag.runner import Subcommand
from distdiag.saved_facts import Foreign

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.jobs.collect import Processes
    from distdiag.output import Progress
    from distdiag.saved_facts import Gathered

_SPARE_S = 20.0
_LONGEST_S = 11.0
"""Maximum time to sample unmoved ranks beyond --samples."""
_NAMED = 4


def _collect(request: Request, progress: Progress) -> Gathered[NodePicture]:
    sampling = Sampling(
        samples=request.samples,
        interval_s=request.interval_s,
        is_quick=request.is_quick,
        sample_s=request.timeout_s,
        longest_s=_LONGEST_S,
        native=request.native,
        all_threads=request.threads is Threads.ALL,
    )
    ask = Ask(sources=OF_PROCESSES, timeout_s=_SPARE_S + sampling.takes_s(), sampling=sampling)
    return pictures.gather(
        request.cluster,
        pictures.agent(request.pids, request.user),
        ask,
        lambda hosts: _choose(request, hosts),
        progress,
        doing="sampling {processes}",
    )


def _choose(request: Request, hosts: Mapping[str, Processes]) -> dict[str, Processes]:
    """Choose the processes to sample. Raises UsageError if that would pause several jobs."""
    if request.native and not request.pids and not request.job:
        _refuse_several_jobs(hosts)
    return {host: _only_wanted(processes, request) for host, processes in hosts.items()}


def _refuse_several_jobs(hosts: Mapping[str, Processes]) -> None:
    """Refuse to pause several jobs. Raises UsageError."""
    jobs = of_interest(find_jobs(NodeStacks(host, processes, ()) for host, processes in hosts.items()))
    if len(jobs) > 1:
        raise UsageError(
            f"--native pauses each process for about a second, and {len(jobs)} jobs are running",
            hint=f"name one: {' or '.join([*job_options(jobs)[:_NAMED], '--pid PID'])}",
        )


def _only_wanted(facts: Processes, request: Request) -> Processes:
    """Keep the processes of the requested job or pids, including helpers."""
    kept = of_job(without_lone(facts) if request.ranks_only else facts, request.job, strict=request.native)
    if request.pids:
        pids = set(request.pids)
        own = tuple(process for process in kept.processes if process.pid in pids or pids & set(process.above))
        kept = replace(kept, processes=own)
    return kept


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodePicture,
    collect=_collect,
    diagnose=diagnose,
    view=lambda request, _, report: pyspy_all_view(report, request),
    page=content,
    shown_as_typed=("job", "threads", "verbose"),
    foreign=Foreign(dumps.of_file, dumps.as_nodes, lambda request: replace(request, samples=1, interval_s=0.0)),
)
