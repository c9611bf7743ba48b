"""Which processes a command of `trace` is about: --pid, --rank and --job, on all nodes. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks, name_ranks
from distdiag.diagnosis.wording import format_hosts, listed
from distdiag.errors import DistdiagError, UsageError
from distdiag.jobs.roles import find_jobs, is_called, job_options, launcher_name, of_interest, short_name, without_ranks
from distdiag.options import parse_ranks
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.jobs.collect import Process
    from distdiag.jobs.types import Job, Member, NodeStacks

_SHOWN = 4


@record(kw_only=True)
class Wanted:
    """The selected processes; all jobs if every field is empty."""

    pids: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    job: str = ""
    user: str = ""


@record(kw_only=True)
class Chosen:
    """A selected process and its role in the job. `rank` and `job` are None if unknown.

    `process`: None for a rank that has exited. `member`: its rank, or with `is_helper` the rank it works for.
    """

    host: str
    rank: int | None
    process: Process | None
    job: Job | None = None
    member: Member | None = None
    is_helper: bool = False


def wanted(pids: Iterable[int] | None, ranks: Iterable[str] | None, job: str, user: str) -> Wanted:
    """Join the options. Raises UsageError."""
    chosen = Wanted(pids=tuple(pids or ()), ranks=parse_ranks(ranks or ()), job=job, user=user)
    if chosen.pids and chosen.ranks:
        raise UsageError("--pid and --rank are mutually exclusive", hint="pass one of them")
    return chosen


def jobs_on(nodes: Sequence[NodeStacks], wanted: Wanted) -> list[Job]:
    """Find the selected jobs: the job of --job, else all running jobs."""
    found = find_jobs(nodes, whole=not wanted.user)
    if wanted.job:
        return [job for job in found if is_called(job, wanted.job)]
    return of_interest(found)


def choose(nodes: Sequence[NodeStacks], wanted: Wanted) -> list[Chosen]:
    """Select processes: those of --pid of any kind, else the ranks of the selected jobs, limited to --rank.

    An empty selection is no error here: an unreachable host may be the reason.
    """
    if wanted.pids:
        members = {
            (member.host, process.pid): (job, member, process is not member.process)
            for job in find_jobs(nodes, whole=False)
            for member in job.members
            for process in _processes(member)
        }
        return [_by_pid(node, process, members) for node in nodes for process in _asked(node, wanted.pids)]
    return [
        Chosen(host=member.host, rank=member.rank, process=member.process, job=job, member=member)
        for job in jobs_on(nodes, wanted)
        for member in job.members
        if not wanted.ranks or member.rank in wanted.ranks
    ]


def refuse_several_jobs(chosen: Sequence[Chosen], wanted: Wanted) -> None:
    """Refuse an ambiguous rank number, for commands that slow or pause ranks. Raises UsageError."""
    if not wanted.ranks:
        return
    by_rank: dict[int, list[Chosen]] = {}
    for choice in chosen:
        if choice.rank is not None and choice.job is not None and choice.process is not None:
            by_rank.setdefault(choice.rank, []).append(choice)
    shared = {rank: own for rank, own in by_rank.items() if len(own) > 1}
    if not shared:
        return
    jobs = {choice.job.name: choice.job for own in shared.values() for choice in own if choice.job is not None}
    options = dict.fromkeys(_option(choice, own, jobs.values()) for own in shared.values() for choice in own)
    where = f"in {len(jobs)} jobs" if len(jobs) > 1 else f"more than once in job {next(iter(jobs))}"
    raise UsageError(
        f"{name_ranks(shared)} {'exists' if len(shared) == 1 else 'exist'} {where}",
        hint=f"name one: {' or '.join(sorted(options)[:_SHOWN])}",
    )


def _option(choice: Chosen, same: Sequence[Chosen], jobs: Iterable[Job]) -> str:
    """Return the option that selects this process among those of its rank: its job, else its pid."""
    assert choice.job is not None
    assert choice.process is not None
    alone = sum(other.job is choice.job for other in same) == 1
    name = short_name(choice.job, jobs) if alone else ""
    return f"--job {shlex.quote(name)}" if name else f"--pid {choice.process.pid}"


def none_found(nodes: Sequence[NodeStacks], wanted: Wanted, again: str) -> DistdiagError:
    """Return the error of an empty selection. `again`: the command without options, to paste."""
    hosts = format_hosts(node.host for node in nodes)
    place = f" on {hosts}" if hosts else ""
    if wanted.pids:
        several = len(wanted.pids) > 1
        who = f"{'processes' if several else 'process'} {', '.join(map(str, wanted.pids))}"
        if any(node.processes.asked_unseen for node in nodes):
            return DistdiagError(
                f"{who}{place}: alive, but /proc hides {'them' if several else 'it'} from this user",
                hint="run as root or as that user; /proc may be mounted with hidepid or be of another PID namespace",
            )
        if not all(set(node.processes.asked_missing).issuperset(wanted.pids) for node in nodes):
            return DistdiagError(
                f"{who}{place}: {'kernel threads' if several else 'a kernel thread'}, or exited just now"
            )
        return DistdiagError(
            f"{who} not found{place}",
            hint="exited, or on another host: --hosts LIST; --rank finds processes by their rank",
        )
    jobs = jobs_on(nodes, wanted)
    if wanted.ranks and jobs:
        there = "; ".join(f"{_ranks_of(job)} of job {job.name}" for job in jobs[:_SHOWN])
        return DistdiagError(
            f"{name_ranks(wanted.ranks)} not found{place}",
            hint=f"found: {there}; the others may be on other hosts: --hosts LIST, or --slurm-job ID",
        )
    of = f" of job {wanted.job}" if wanted.job else f" of user {wanted.user}" if wanted.user else ""
    if not of and (launchers := without_ranks(nodes)):
        host, launcher = launchers[0]
        return DistdiagError(
            f"{launcher_name(launcher)} (pid {launcher.pid} on {host}) has not started any rank: torchrun waits in its "
            "rendezvous until all nodes have joined; srun and mpirun wait for resources",
            hint="check whether it runs on all nodes, and whether they reach the rendezvous endpoint: "
            "distdiag ports --hosts NODES",
        )
    options = job_options(of_interest(find_jobs(nodes, whole=False))) if wanted.job else []
    if options:
        return DistdiagError(f"no rank{of} was found{place}", hint=f"jobs found: {listed(options)}")
    return DistdiagError(
        f"no rank{of} was found{place}: no process has RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK or similar "
        "in its environment, and no Python process has loaded torch; only root can see those of other users",
        hint=f"name the process: {again} --pid PID",
    )


def _asked(node: NodeStacks, pids: Iterable[int]) -> Iterator[Process]:
    """List the requested processes on a node."""
    known = {process.pid: process for process in node.processes.processes}
    yield from (known[pid] for pid in dict.fromkeys(pids) if pid in known)


def _by_pid(node: NodeStacks, process: Process, members: dict[tuple[str, int], tuple[Job, Member, bool]]) -> Chosen:
    job, member, is_helper = members.get((node.host, process.pid), (None, None, False))
    return Chosen(
        host=node.host,
        rank=member.rank if member is not None and not is_helper else None,
        process=process,
        job=job,
        member=member,
        is_helper=is_helper,
    )


def _processes(member: Member) -> Iterator[Process]:
    if member.process is not None:
        yield member.process
    for helper in member.helpers:
        yield helper.process


def _ranks_of(job: Job) -> str:
    ranks = [member.rank for member in job.members if member.rank is not None and member.process is not None]
    if not ranks:
        return f"{len(job.members)} processes without a rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks(ranks)}"
