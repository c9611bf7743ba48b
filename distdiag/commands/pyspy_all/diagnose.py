"""Facts of all nodes -> the report of pyspy-all. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.cluster.reached import host_findings
from distdiag.commands.pyspy_all import findings
from distdiag.commands.pyspy_all.model import COMMAND
from distdiag.commands.pyspy_all.result import (
    FrameRow,
    Group,
    JobRow,
    Odd,
    OddFrame,
    ProcessRow,
    PySpyAll,
    ThreadRow,
)
from distdiag.commands.pyspy_all.standing import helper_frames, site_of
from distdiag.commands.pyspy_all.unread import where
from distdiag.commands.pyspy_all.verdict import Outcome, judge_job, split
from distdiag.jobs.roles import answers_to, find_jobs, launcher_name, without_ranks
from distdiag.knowledge.frames import library_path
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distdiag.cluster.rows import Refusal, Row
    from distdiag.commands.pyspy_all.model import FrameClass, Request, Standing
    from distdiag.commands.pyspy_all.verdict import JobVerdict
    from distdiag.jobs.collect import Process, Watched
    from distdiag.jobs.model import Job, Member
    from distdiag.jobs.nodes import NodeStacks
    from distdiag.node.capture import Capture, Frame

_WORTH = (
    Outcome.ODD,
    Outcome.OTHER_COLLECTIVE,
    Outcome.LEAST_PROGRESS,
    Outcome.CYCLE,
    Outcome.LEFT,
    Outcome.ALL_WAITING,
    Outcome.STANDSTILL,
    Outcome.UNREADABLE,
    Outcome.ALONE,
    Outcome.NOT_HUNG,
)
"""The outcomes, the one to be told first in front."""


def diagnose(
    request: Request,
    nodes: Sequence[NodeStacks],
    *,
    rows: Sequence[Row] = (),
    refusals: Mapping[str, Refusal] | None = None,
    interrupted: bool = False,
) -> Report[PySpyAll]:
    """Find the jobs, judge each, and put it together."""
    jobs = _wanted(request, find_jobs(nodes, whole=not (request.pids or request.user)))
    verdicts = sorted((judge_job(job) for job in jobs), key=lambda one: _WORTH.index(one.outcome))
    found = [finding for one in verdicts for finding in _of_job(one, request, nodes, several=len(jobs) > 1)]
    found += [*_asked_for(nodes), *_unseen(nodes)]
    found += _not_looked(nodes)
    if not jobs and not any(node.processes.asked_unseen for node in nodes):
        found.append(_no_job(request, nodes))
    found += _left_stopped(nodes)
    found += host_findings(refusals or {}, rows)
    data = PySpyAll(
        samples=request.samples,
        interval_s=request.interval_s,
        jobs=tuple(_job_row(job) for job in jobs),
        processes=tuple(row for one in verdicts for row in _process_rows(one)),
        groups=tuple(group for one in verdicts for group in _groups(one)),
        odd=tuple(odd for one in verdicts for odd in _odd(one)),
    )
    return Report(command=COMMAND, data=data, findings=tuple(found), summary=_summary(found), interrupted=interrupted)


def _wanted(request: Request, jobs: list[Job]) -> list[Job]:
    if request.job:
        jobs = [
            job for job in jobs if any(_is_of(member, request.job) for member in job.members) or job.name == request.job
        ]
    # A lone process with torch, such as a notebook, is of interest where there is nothing else.
    real = [job for job in jobs if len(job.members) > 1 or (job.members[0].rank is not None)]
    # A program that outlived its job still has the rank in its environment.
    alive = [job for job in real if any(one.process is not None and one.process.python for one in job.members)]
    return jobs if request.pids else alive or real or jobs


def _is_of(member: Member, wanted: str) -> bool:
    return member.process is not None and answers_to(member.process.job, wanted)


def _of_job(verdict: JobVerdict, request: Request, nodes: Sequence[NodeStacks], *, several: bool) -> Iterator[Finding]:
    for finding in findings.job_findings(verdict, request, nodes):
        yield replace(finding, title=f"job {verdict.job.name}: {finding.title}") if several else finding


def _summary(found: Sequence[Finding]) -> str:
    order = [Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO]
    worst = min(found, key=lambda one: order.index(one.level), default=None)
    return worst.title if worst is not None else "no process of a job was found"


def _no_job(request: Request, nodes: Sequence[NodeStacks]) -> Finding:
    hosts = fold(node.host for node in nodes)
    asked = f" of job {request.job}" if request.job else f" of user {request.user}" if request.user else ""
    if not asked and (launchers := without_ranks(nodes)):
        host, launcher = launchers[0]
        more = f", and {len(launchers) - 1} more" if len(launchers) > 1 else ""
        return Finding(
            id=f"{COMMAND}.no-job",
            level=Level.UNKNOWN,
            title=f"{launcher_name(launcher)} (pid {launcher.pid} on {host}){more} has started no rank",
            detail="torchrun waits so in its rendezvous until all nodes have come; srun and mpirun for resources.",
            where=Where(hosts=tuple(dict.fromkeys(host for host, _ in launchers)), pids=(launcher.pid,)),
            fix=Fix(
                text="see whether it runs on all nodes, and whether they reach its endpoint",
                commands=(f"{request.program} ports --hosts NODES",),
            ),
        )
    return Finding(
        id=f"{COMMAND}.no-job",
        level=Level.UNKNOWN,
        title=f"no rank{asked} was found" + (f" on {hosts}" if hosts else ""),
        detail="Looked for processes with RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK or the like in their "
        "environment, and for Python processes that have loaded torch. Those of other users can only be seen as root.",
        fix=Fix(text="name the processes", commands=(f"{request.program} pyspy-all --pid PID",)),
    )


def _asked_for(nodes: Sequence[NodeStacks]) -> list[Finding]:
    missing = sorted({pid for node in nodes for pid in node.processes.asked_missing})
    if not missing or not nodes:
        return []
    # On several hosts a pid is meant for one of them.
    everywhere = [pid for pid in missing if all(pid in node.processes.asked_missing for node in nodes)]
    return [
        Finding(
            id=f"{COMMAND}.exited",
            level=Level.FAIL,
            title=f"there is no process {pid} on {fold(node.host for node in nodes)}",
            where=Where(pids=(pid,)),
        )
        for pid in everywhere
    ]


def _unseen(nodes: Sequence[NodeStacks]) -> list[Finding]:
    return [
        Finding(
            id=f"{COMMAND}.unreadable",
            level=Level.UNKNOWN,
            title=f"process {pid} on {node.host} is alive, and /proc does not show it to this user",
            where=Where(hosts=(node.host,), pids=(pid,)),
            fix=Fix(
                text="run it as root, or as that user; /proc may be mounted with hidepid, or be another namespace's"
            ),
        )
        for node in nodes
        for pid in node.processes.asked_unseen
    ]


def _not_looked(nodes: Sequence[NodeStacks]) -> list[Finding]:
    return [
        Finding(
            id=f"{COMMAND}.unreadable",
            level=Level.UNKNOWN,
            title=f"the stacks of {node.host} are not complete: {node.missing}",
            where=Where(hosts=(node.host,)),
        )
        for node in nodes
        if node.missing
    ]


def _left_stopped(nodes: Sequence[NodeStacks]) -> list[Finding]:
    """Own up to what should never happen."""
    hit = [
        (node.host, one.pid) for node in nodes for one in node.watched if any(look.left_stopped for look in one.looks)
    ]
    return [
        Finding(
            id=f"{COMMAND}.let-go",
            level=Level.WARN,
            title=f"pid {pid} on {host} was found stopped after the look, and was sent SIGCONT",
            where=Where(hosts=(host,), pids=(pid,)),
        )
        for host, pid in hit
    ]


def _job_row(job: Job) -> JobRow:
    seen = [member for member in job.members if member.process is not None]
    hosts = tuple(dict.fromkeys(member.host for member in seen))
    return JobRow(job.name, job.launcher, job.world_size, len(seen), hosts)


def _groups(verdict: JobVerdict) -> Iterator[Group]:
    """Fold who has the same stack, the smallest group first; the odd ones in front of all."""
    odd = {id(one) for one in verdict.odd}
    by_stance: dict[tuple[bool, int], list[Standing]] = {}
    for one in verdict.standings:
        by_stance.setdefault((id(one) in odd, id(one.stance)), []).append(one)
    folded: dict[tuple[bool, FrameClass, tuple[Frame, ...], bool | None], list[Standing]] = {}
    for (is_odd, _), members in by_stance.items():
        one = members[0]
        folded.setdefault((is_odd, one.kind, one.frames, one.moving), []).extend(members)
    for (is_odd, kind, frames, moving), members in sorted(
        folded.items(), key=lambda item: (not item[0][0], len(item[1]))
    ):
        about = where(members)
        yield Group(
            job=verdict.job.name,
            ranks=about.ranks,
            hosts=about.hosts,
            pids=about.pids,
            class_=str(kind),
            moving=moving,
            count=len(members),
            odd=is_odd,
            counters=dict(set.intersection(*(set(one.counters) for one in members))),
            frames=frame_rows(frames),
        )


def _odd(verdict: JobVerdict) -> Iterator[Odd]:
    for group in split(verdict.odd):
        about, site = where(group), group[0].site
        frame = site.frame or (group[0].frames[0] if group[0].frames else None)
        yield Odd(
            ranks=about.ranks,
            hosts=about.hosts,
            pids=about.pids,
            class_=str(site.kind),
            frame=OddFrame(frame.function, frame.file, frame.line) if frame is not None else None,
            reason=findings.reason_of(verdict, group),
        )


def _process_rows(verdict: JobVerdict) -> Iterator[ProcessRow]:
    threads: dict[int, tuple[ThreadRow, ...]] = {}
    for one in verdict.standings:
        looks = one.member.watched.looks if one.member.watched is not None else ()
        if id(looks) not in threads:
            threads[id(looks)] = _threads(looks, str(one.kind))
        yield _rank_row(one, verdict.job.name, looks, threads[id(looks)])
        for helper in one.member.helpers:
            yield _helper_row(one.member, helper.process, helper.watched, verdict.job.name)


def _rank_row(one: Standing, job: str, looks: Sequence[Capture], threads: tuple[ThreadRow, ...]) -> ProcessRow:
    member = one.member
    process = member.process
    return ProcessRow(
        host=member.host,
        pid=process.pid if process is not None else None,
        rank=member.rank,
        local_rank=member.local_rank,
        job=job,
        role="rank",
        state=looks[-1].state if looks else process.state if process is not None else "",
        status=one.status,
        reason=one.reason,
        class_=str(one.kind),
        moving=one.moving,
        cpu_s=_used(looks),
        counters=dict(one.counters),
        helpers=tuple(helper.process.pid for helper in member.helpers),
        threads=threads,
    )


def _helper_row(member: Member, process: Process, watched: Watched | None, job: str) -> ProcessRow:
    looks = watched.looks if watched is not None else ()
    kind = site_of(helper_frames(watched))[0]
    return ProcessRow(
        host=member.host,
        pid=process.pid,
        rank=member.rank,
        local_rank=member.local_rank,
        job=job,
        role="helper",
        state=looks[-1].state if looks else process.state,
        status=looks[-1].status if looks else "",
        reason=looks[-1].reason if looks else process.kind or "not looked at",
        class_=str(kind or ""),
        moving=None,
        cpu_s=_used(looks),
        counters={},
        helpers=(),
        threads=_threads(looks, str(kind or "")),
    )


def _used(looks: Sequence[Capture]) -> float | None:
    return round(looks[-1].cpu_s - looks[0].cpu_s, 3) if len(looks) > 1 else None


def _threads(looks: Sequence[Capture], kind: str) -> tuple[ThreadRow, ...]:
    if not looks:
        return ()
    return tuple(
        ThreadRow(
            name=thread.name,
            os_thread_id=thread.os_thread_id,
            class_=kind if number == 0 else str(site_of(thread.frames)[0] or ""),
            frames=frame_rows(thread.frames),
        )
        for number, thread in enumerate(looks[-1].threads)
    )


@cache
def frame_rows(frames: Iterable[Frame]) -> tuple[FrameRow, ...]:
    """Write frames as rows; equal stacks share them."""
    return tuple(FrameRow(one.function, one.file, one.line, library_path(one.file) is None) for one in frames)
