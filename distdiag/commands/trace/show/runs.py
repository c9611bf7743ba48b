"""Which files belong to one run of a job, and which process is a rank's helper. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.trace.show.result import Member, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.commands.trace.show.collect import NodeLines, Process

    Found = tuple[str, Process]


def find_runs(nodes: Iterable[NodeLines]) -> list[Run]:
    """Put processes together that ran as one job, the newest run last.

    A job's name may come again (the same port every day): where a rank is there already, the next run begins.
    """
    jobs: dict[tuple[object, ...], list[Member]] = {}
    for node in nodes:
        for member in _members(node):
            jobs.setdefault(_job(member), []).append(member)
    runs = [run for members in jobs.values() for run in _split(members)]
    return sorted(runs, key=lambda run: max(_newest(member) for member in run.members))


def newest(runs: Sequence[Run]) -> list[Run]:
    """Choose what is looked at unless all are: the newest run, and every other that still runs."""
    alive = [run for run in runs[:-1] if any(one.process.state == "running" for one in run.members)]
    return [*alive, *runs[-1:]]


def _newest(member: Member) -> float:
    return member.process.began_s


def _members(node: NodeLines) -> list[Member]:
    """Tell ranks from the processes that they started: those have the same rank in their environment."""
    by_pid = {one.pid: one for one in sorted(node.processes, key=lambda one: one.began_s)}
    helpers: dict[int, list[Process]] = {}
    heads = []
    for one in node.processes:
        head = _head(one, by_pid)
        if head is one:
            heads.append(one)
        else:
            helpers.setdefault(id(head), []).append(one)
    return [Member(host=node.host, process=one, helpers=tuple(helpers.get(id(one), ()))) for one in heads]


def _head(one: Process, by_pid: Mapping[int, Process]) -> Process:
    """Find the process that started another, also where one stands between them that has kept no line, as a shell."""
    found = one
    known = {one.pid}
    while True:
        above = next((pid for pid in (found.parent, *found.ancestors) if pid in by_pid), None)
        if above is None or above in known:
            return found
        known.add(above)
        parent = by_pid[above]
        if parent.owner != one.owner or parent.rank != one.rank or parent.began_s > found.began_s:
            return found
        found = parent


def _job(member: Member) -> tuple[object, ...]:
    one = member.process
    if one.rank is None:
        return ("", one.owner, member.host, one.pid)
    # Whoever may write beside a job's files must not become one of its ranks.
    return (one.launcher, one.owner, *(one.job.get(name, "") for name in _NAMES), one.world_size)


_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT")


def _split(members: Sequence[Member]) -> list[Run]:
    runs: list[list[Member]] = []
    for member in sorted(members, key=_newest):
        if not runs or member.rank in {one.rank for one in runs[-1]}:
            runs.append([])
        runs[-1].append(member)
    return [_run(own) for own in runs]


def _run(members: list[Member]) -> Run:
    first = members[0].process
    members.sort(key=lambda one: (one.rank is None, one.rank or 0, one.host))
    return Run(
        name=_name(members[0]),
        world_size=first.world_size,
        members=tuple(members),
        began_s=min(one.process.began_s for one in members),
    )


def _name(member: Member) -> str:
    return _job_name(member) + (f" of user {member.process.owner}" if member.process.owner else "")


def _job_name(member: Member) -> str:
    one = member.process
    if one.rank is None:
        return f"pid {one.pid}"
    if "SLURM_STEP_ID" in one.job:
        return f"SLURM {one.job.get('SLURM_JOB_ID', '')}.{one.job['SLURM_STEP_ID']}"
    if "MASTER_ADDR" in one.job:
        return f"job {one.job['MASTER_ADDR']}:{one.job.get('MASTER_PORT', '')}"
    return f"job of {one.launcher}"
