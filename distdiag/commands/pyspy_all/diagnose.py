"""Facts of all nodes -> the report of pyspy-all. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from distdiag.cluster.unreached_hosts import host_findings
from distdiag.commands.pyspy_all import findings
from distdiag.commands.pyspy_all.types import (
    COMMAND,
    FrameRow,
    Group,
    Outlier,
    OutlierFrame,
    ProcessRow,
    PySpyAll,
    ThreadRow,
)
from distdiag.diagnosis.outliers import Outcome, judge_job, mark, split
from distdiag.diagnosis.stack_classes import classify_stack, helper_frames
from distdiag.diagnosis.wording import format_hosts
from distdiag.jobs.roles import find_jobs, is_called, launcher_name, of_interest, without_ranks
from distdiag.jobs.types import summarize
from distdiag.knowledge.frames import library_path
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distdiag.cluster.host_results import HostError, HostResult
    from distdiag.commands.pyspy_all.types import Request
    from distdiag.diagnosis.outliers import JobVerdict
    from distdiag.diagnosis.stack_classes import RankState, StackClass
    from distdiag.facts.stack_types import Frame, Sample
    from distdiag.jobs.collect import Process, Watched
    from distdiag.jobs.types import Job, Member, NodeStacks

_ORDER = (
    Outcome.OUTLIERS,
    Outcome.OTHER_COLLECTIVE,
    Outcome.LEAST_PROGRESS,
    Outcome.CYCLE,
    Outcome.LEFT,
    Outcome.RENDEZVOUS,
    Outcome.ALL_WAITING,
    Outcome.STANDSTILL,
    Outcome.UNREADABLE,
    Outcome.ALONE,
    Outcome.NOT_HUNG,
)
"""The outcomes, in the order in which jobs are reported."""


def diagnose(
    request: Request,
    nodes: Sequence[NodeStacks],
    *,
    rows: Sequence[HostResult] = (),
    refusals: Mapping[str, HostError] | None = None,
    interrupted: bool = False,
) -> Report[PySpyAll]:
    """Find the jobs, judge each, and build the report."""
    jobs = _wanted(request, find_jobs(nodes, whole=not (request.pids or request.user)))
    watched_s = (request.samples - 1) * request.interval_s
    verdicts = sorted((judge_job(job, watched_s) for job in jobs), key=lambda verdict: _ORDER.index(verdict.outcome))
    found = [finding for verdict in verdicts for finding in _of_job(verdict, request, nodes, several=len(jobs) > 1)]
    not_there = [*_asked_for(nodes), *_unseen(nodes)]
    found += not_there
    found += _not_looked(nodes)
    if not jobs and not not_there:
        found.append(_no_job(request, nodes))
    found += _left_stopped(nodes)
    found += host_findings(refusals or {}, rows)
    data = PySpyAll(
        samples=request.samples,
        interval_s=request.interval_s,
        jobs=tuple(summarize(job) for job in jobs),
        processes=tuple(row for verdict in verdicts for row in _process_rows(verdict)),
        groups=tuple(group for verdict in verdicts for group in _groups(verdict)),
        outliers=tuple(outlier for verdict in verdicts for outlier in _outliers(verdict)),
    )
    return Report(command=COMMAND, data=data, findings=tuple(found), summary=_summary(found), interrupted=interrupted)


def _wanted(request: Request, jobs: list[Job]) -> list[Job]:
    if request.job:
        jobs = [job for job in jobs if is_called(job, request.job)]
    return jobs if request.pids else of_interest(jobs)


def _of_job(verdict: JobVerdict, request: Request, nodes: Sequence[NodeStacks], *, several: bool) -> Iterator[Finding]:
    for finding in findings.job_findings(verdict, request, nodes):
        yield replace(finding, title=f"job {verdict.job.name}: {finding.title}") if several else finding


def _summary(found: Sequence[Finding]) -> str:
    order = [Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO]
    worst = min(found, key=lambda finding: order.index(finding.level), default=None)
    return worst.title if worst is not None else "no rank process found"


def _no_job(request: Request, nodes: Sequence[NodeStacks]) -> Finding:
    hosts = format_hosts(node.host for node in nodes)
    filtered = f" of job {request.job}" if request.job else f" of user {request.user}" if request.user else ""
    if not filtered and (launchers := without_ranks(nodes)):
        host, launcher = launchers[0]
        more = f", and {len(launchers) - 1} more" if len(launchers) > 1 else ""
        return Finding(
            id=f"{COMMAND}.no-job",
            level=Level.UNKNOWN,
            title=f"{launcher_name(launcher)} (pid {launcher.pid} on {host}){more} has not started any rank",
            detail="torchrun waits in its rendezvous until all nodes have joined; srun and mpirun wait for resources.",
            where=Where(hosts=tuple(dict.fromkeys(host for host, _ in launchers)), pids=(launcher.pid,)),
            fix=Fix(
                text="check that it runs on all nodes and that they can reach the rendezvous endpoint",
                commands=(f"{request.program} ports --hosts NODES",),
            ),
        )
    return Finding(
        id=f"{COMMAND}.no-job",
        level=Level.UNKNOWN,
        title=f"no rank{filtered} found" + (f" on {hosts}" if hosts else ""),
        detail="A rank is a process with RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK or similar in its "
        "environment, or a Python process that has loaded torch. Only root can see those of other users.",
        fix=Fix(text="name the process", commands=(f"{request.program} pyspy-all --pid PID",)),
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
            title=f"process {pid} not found on {format_hosts(node.host for node in nodes)}: it exited or never started",
            where=Where(pids=(pid,)),
        )
        for pid in everywhere
    ]


def _unseen(nodes: Sequence[NodeStacks]) -> list[Finding]:
    return [
        Finding(
            id=f"{COMMAND}.unreadable",
            level=Level.UNKNOWN,
            title=f"process {pid} on {node.host} is alive, but /proc hides it from this user",
            where=Where(hosts=(node.host,), pids=(pid,)),
            fix=Fix(
                text="run as root or as that user; /proc may be mounted with hidepid or be of another PID namespace"
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
            title=f"incomplete stacks from {node.host}: {node.missing}",
            where=Where(hosts=(node.host,)),
        )
        for node in nodes
        if node.missing
    ]


def _left_stopped(nodes: Sequence[NodeStacks]) -> list[Finding]:
    """Report what should never happen."""
    hit = [
        (node.host, watched.pid)
        for node in nodes
        for watched in node.watched
        if any(sample.left_stopped for sample in watched.samples)
    ]
    return [
        Finding(
            id=f"{COMMAND}.left-stopped",
            level=Level.WARN,
            title=f"pid {pid} on {host} was stopped after sampling; distdiag resumed it with SIGCONT",
            where=Where(hosts=(host,), pids=(pid,)),
        )
        for host, pid in hit
    ]


def _groups(verdict: JobVerdict) -> Iterator[Group]:
    """Group the ranks with the same stack: outliers first, then the smallest group first."""
    outliers = {id(state) for state in verdict.outliers}
    by_thread: dict[tuple[bool, int], list[RankState]] = {}
    for state in verdict.states:
        by_thread.setdefault((id(state) in outliers, id(state.thread)), []).append(state)
    folded: dict[tuple[bool, StackClass, tuple[Frame, ...], bool | None], list[RankState]] = {}
    for (is_outlier, _), members in by_thread.items():
        thread = members[0].thread
        folded.setdefault((is_outlier, thread.kind, thread.frames, thread.moving), []).extend(members)
    for (is_outlier, kind, frames, moving), members in sorted(
        folded.items(), key=lambda item: (not item[0][0], len(item[1]))
    ):
        about = findings.where(members)
        yield Group(
            job=verdict.job.name,
            ranks=about.ranks,
            hosts=about.hosts,
            pids=about.pids,
            class_=str(kind),
            moving=moving,
            count=len(members),
            outlier=mark(verdict, members[0]) if is_outlier else "",
            counters=dict(set.intersection(*(set(state.thread.counters) for state in members))),
            frames=frame_rows(frames),
        )


def _outliers(verdict: JobVerdict) -> Iterator[Outlier]:
    for group in split(verdict.outliers):
        about, thread = findings.where(group), group[0].thread
        frame = thread.location.frame or (thread.frames[0] if thread.frames else None)
        yield Outlier(
            ranks=about.ranks,
            hosts=about.hosts,
            pids=about.pids,
            kind=mark(verdict, group[0]),
            class_=str(thread.kind),
            frame=OutlierFrame(frame.function, frame.file, frame.line) if frame is not None else None,
            reason=findings.reason_of(verdict, group),
        )


def _process_rows(verdict: JobVerdict) -> Iterator[ProcessRow]:
    threads: dict[int, tuple[ThreadRow, ...]] = {}
    for state in verdict.states:
        samples = state.member.watched.samples if state.member.watched is not None else ()
        if id(samples) not in threads:
            threads[id(samples)] = _threads(samples, str(state.thread.kind))
        yield _rank_row(state, verdict.job.name, samples, threads[id(samples)])
        for helper in state.member.helpers:
            yield _helper_row(state.member, helper.process, helper.watched, verdict.job.name)


def _rank_row(state: RankState, job: str, samples: Sequence[Sample], threads: tuple[ThreadRow, ...]) -> ProcessRow:
    member, thread = state.member, state.thread
    process = member.process
    return ProcessRow(
        host=member.host,
        pid=member.pid,
        rank=member.rank,
        local_rank=member.local_rank,
        job=job,
        role="rank",
        state=samples[-1].state if samples else process.state if process is not None else "",
        status=thread.status,
        reason=thread.reason,
        class_=str(thread.kind),
        moving=thread.moving,
        cpu_s=_used(samples),
        counters=dict(thread.counters),
        helpers=tuple(helper.process.pid for helper in member.helpers),
        threads=threads,
    )


def _helper_row(member: Member, process: Process, watched: Watched | None, job: str) -> ProcessRow:
    samples = watched.samples if watched is not None else ()
    kind = classify_stack(helper_frames(watched))[0]
    return ProcessRow(
        host=member.host,
        pid=process.pid,
        rank=member.rank,
        local_rank=member.local_rank,
        job=job,
        role="helper",
        state=samples[-1].state if samples else process.state,
        status=samples[-1].status if samples else "",
        reason=samples[-1].reason if samples else process.kind or "not sampled",
        class_=str(kind or ""),
        moving=None,
        cpu_s=_used(samples),
        counters={},
        helpers=(),
        threads=_threads(samples, str(kind or "")),
    )


def _used(samples: Sequence[Sample]) -> float | None:
    return round(samples[-1].cpu_s - samples[0].cpu_s, 3) if len(samples) > 1 else None


def _threads(samples: Sequence[Sample], kind: str) -> tuple[ThreadRow, ...]:
    if not samples:
        return ()
    return tuple(
        ThreadRow(
            name=thread.name,
            os_thread_id=thread.os_thread_id,
            class_=kind if number == 0 else str(classify_stack(thread.frames)[0] or ""),
            frames=frame_rows(thread.frames),
        )
        for number, thread in enumerate(samples[-1].threads)
    )


@cache
def frame_rows(frames: Iterable[Frame]) -> tuple[FrameRow, ...]:
    """Return frames as rows; equal stacks share them."""
    return tuple(FrameRow(frame.function, frame.file, frame.line, library_path(frame.file) is None) for frame in frames)
