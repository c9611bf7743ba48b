"""The job of a bundle: the requested one, or the only one with ranks. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.bundle.types import OnHost, TakenJob
from distdiag.errors import UsageError
from distdiag.jobs.roles import find_jobs, is_called, is_lone, of_interest, short_name
from distdiag.jobs.types import NodeStacks, summarize

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.bundle.types import Request
    from distdiag.jobs.collect import Process, Processes
    from distdiag.jobs.types import Job

_SHOWN, _PIDS = 4, 16


def taken_job(request: Request, hosts: Iterable[Processes]) -> TakenJob | None:
    """Return the job to read; None without ranks. Raises UsageError if several are possible.

    Stacks, command lines and variables of another user or job must not be sent by mistake.
    """
    nodes = [NodeStacks(processes.host, processes, ()) for processes in hosts]
    jobs = [job for job in of_interest(find_jobs(nodes)) if not is_lone(job)]
    named = request.job or request.cluster.slurm_job
    called = [job for job in jobs if named and is_called(job, named)]
    found = called if called or request.job else jobs
    if len(found) > 1 and not request.job and not (_is_one(found) and found == jobs):
        raise _several(found)
    return _taken(found, jobs, request.job, nodes) if found else None


def _is_one(jobs: Sequence[Job]) -> bool:
    """Return whether the jobs are one, split by rendezvous address: the ranks are disjoint and complete."""
    ranks = [(job, member) for job in jobs for member in job.members if member.process is not None]
    alike = {(job.launcher, job.world_size, member.process.command) for job, member in ranks if member.process}
    return len(alike) == 1 and sorted(member.rank or 0 for _, member in ranks) == list(range(jobs[0].world_size or 0))


def _several(jobs: Sequence[Job]) -> UsageError:
    titles = "; ".join(summarize(job).title() for job in jobs[:_SHOWN])
    names = [f"--job {shlex.quote(name)}" for job in jobs[:_SHOWN] if (name := short_name(job, jobs))]
    more = f"; and {len(jobs) - _SHOWN} more" if len(jobs) > _SHOWN else ""
    return UsageError(
        f"{len(jobs)} jobs are running; a bundle covers a single job: {titles}{more}",
        hint=f"name one: {' or '.join(names)}" if names else "select one by --user",
    )


def _taken(found: Sequence[Job], jobs: Sequence[Job], named: str, nodes: Sequence[NodeStacks]) -> TakenJob:
    processes = [process for job in found for process in _processes(job)]
    above = {pid for process in processes for pid in process.above}
    members = [member for job in found for member in job.members if member.pid]
    on_hosts = (
        OnHost(
            host=node.host,
            ranks=tuple(member.pid for member in members if member.host == node.host and member.pid),
            launchers=tuple(p.pid for p in node.processes.processes if p.kind == "launcher" and p.pid in above),
        )
        for node in nodes
    )
    return TakenJob(
        name=named or (short_name(found[0], jobs) if len(found) == 1 else ""),
        title="; ".join(replace(summarize(job), hosts=()).title() for job in found),
        processes=tuple(each for each in on_hosts if each.ranks or each.launchers),
        has_gpu=any(process.gpu for process in processes),
    )


def _processes(job: Job) -> list[Process]:
    heads = [member.process for member in job.members if member.process is not None]
    return [*heads, *(helper.process for member in job.members for helper in member.helpers)]


def in_words(host: OnHost) -> str:
    """Format the processes read on a host: "pids 4711, 4712; launcher 4700"."""
    words = []
    for noun, plural, pids in (("pid", "pids", host.ranks), ("launcher", "launchers", host.launchers)):
        if pids:
            more = f" and {len(pids) - _PIDS} more" if len(pids) > _PIDS else ""
            words.append(f"{noun if len(pids) == 1 else plural} {', '.join(map(str, pids[:_PIDS]))}{more}")
    return "; ".join(words)
