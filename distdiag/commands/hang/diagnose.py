"""Facts of all nodes -> the report of hang. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.unreached_hosts import host_findings
from distdiag.commands.hang.claims import gather_evidence, watched_nodes
from distdiag.commands.hang.findings import again, finding_of, next_experiment
from distdiag.commands.hang.join import join, source_rows
from distdiag.commands.hang.types import COMMAND, Hang, HangClass, HangRank, NodeHang
from distdiag.diagnosis.outliers import mark
from distdiag.diagnosis.remedies import unseen_ranks
from distdiag.diagnosis.stack_classes import StackClass
from distdiag.diagnosis.wording import format_hosts
from distdiag.jobs.collect import Processes
from distdiag.jobs.roles import find_jobs, is_called, launcher_name, of_interest, without_ranks
from distdiag.jobs.types import summarize
from distdiag.knowledge.frames import library_path
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.commands.hang.join import Joined
    from distdiag.commands.hang.types import Request
    from distdiag.diagnosis.flight_recorder.types import CallRow
    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.gathered import Gathered

_ORDER = (Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO)
_FRAMES = 12


def diagnose(request: Request, gathered: Gathered[NodeHang]) -> Report[Hang]:
    """Find the jobs, join what all sources say of each, and put the worst first."""
    known = {node.host for node in gathered.facts}
    nodes = [*gathered.facts, *(_unread(host, why) for host, why in gathered.missing.items() if host not in known)]
    stacks = watched_nodes(nodes)
    jobs = find_jobs(stacks, whole=not request.wanted.user)
    jobs = [job for job in jobs if not request.wanted.job or is_called(job, request.wanted.job)]
    jobs = of_interest(jobs)
    judged = [join(gather_evidence(request, nodes, job, alone=len(jobs) == 1)) for job in jobs]
    judged.sort(key=lambda joined: _ORDER.index(joined.level))
    found: list[Finding] = []
    for joined in judged:
        finding = finding_of(joined, source_rows(joined))
        name = joined.evidence.job.name
        prefix = f"{f'job {name}' if name else 'ranks without MASTER_ADDR'}: " if len(judged) > 1 else ""
        own = [finding, *unseen_ranks(joined.evidence.job, f"{COMMAND}.unseen")]
        found += [replace(each, title=prefix + each.title) for each in own]
    if not jobs and (nodes or not gathered.refusals):
        found.append(_no_job(request, nodes))
    found += [_incomplete(node) for node in nodes if node.missing]
    found += host_findings(gathered.refusals, gathered.rows)
    return Report(
        command=COMMAND,
        data=_data(judged),
        findings=tuple(found),
        summary=found[0].title,
        interrupted=gathered.interrupted,
    )


def _unread(host: str, why: str) -> NodeHang:
    """Stand in for a node that told nothing, or a file that could not be read."""
    nothing = Processes(host, -1, None, may_trace=False, processes=(), asked_missing=())
    return NodeHang(host=host, processes=nothing, missing=why)


def _incomplete(node: NodeHang) -> Finding:
    title = f"not all of {node.host} is known: {node.missing}"
    return Finding(id=f"{COMMAND}.incomplete", level=Level.UNKNOWN, title=title, where=Where(hosts=(node.host,)))


def _no_job(request: Request, nodes: Sequence[NodeHang]) -> Finding:
    hosts = format_hosts(node.host for node in nodes)
    launchers = without_ranks(watched_nodes(nodes))
    if launchers and not request.wanted.job:
        host, launcher = launchers[0]
        return Finding(
            id=f"{COMMAND}.no-rank",
            level=Level.UNKNOWN,
            title=f"{launcher_name(launcher)} (pid {launcher.pid} on {host}) runs, but none of its ranks does",
            detail="torchrun waits in its rendezvous until all nodes have joined; srun and mpirun wait for resources. "
            "If it had ranks before, they have just ended.",
            where=Where(hosts=tuple(dict.fromkeys(host for host, _ in launchers)), pids=(launcher.pid,)),
            fix=Fix(
                text="check that it runs on all nodes, and that they reach its endpoint",
                commands=(again(request, "ports"),),
            ),
        )
    others = find_jobs(watched_nodes(nodes), whole=False) if request.wanted.job else []
    if others:
        names = [job.name for job in others if job.name]
        return Finding(
            id=f"{COMMAND}.no-job",
            level=Level.UNKNOWN,
            title=f"no rank of job {request.wanted.job} was found on {hosts}",
            detail=f"Jobs that run there: {', '.join(names) or 'one without a name'}.",
            fix=Fix(
                text="name one of these, or the hosts of the job",
                commands=tuple(again(request, "hang", "--job", shlex.quote(name)) for name in names[:3]),
            ),
        )
    asked = f" of job {request.wanted.job}" if request.wanted.job else ""
    return Finding(
        id=f"{COMMAND}.no-job",
        level=Level.UNKNOWN,
        title=f"no rank{asked} was found" + (f" on {hosts}" if hosts else ""),
        detail="Looked for processes with RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK or the like in their "
        "environment, and for Python processes that have loaded torch. Only root sees those of other users.",
        fix=Fix(text="name the hosts of the job", commands=(f"{request.program} hang --hosts LIST",)),
    )


def _data(judged: Sequence[Joined]) -> Hang:
    if not judged:
        nothing = HangClass.UNKNOWN
        return Hang(class_name=nothing, ranks=(), candidates=(), next_experiment="", sources=(), jobs=(), processes=())
    first = judged[0]
    is_unknown = first.class_name is HangClass.UNKNOWN
    return Hang(
        class_name=first.class_name,
        ranks=tuple(sorted(rank for rank in first.accused if rank >= 0)),
        candidates=first.candidates,
        next_experiment=next(iter(next_experiment(first)[1]), "") if is_unknown else "",
        sources=source_rows(first),
        jobs=tuple(summarize(joined.evidence.job) for joined in judged),
        processes=tuple(row for joined in judged for row in _rows(joined)),
    )


def _rows(joined: Joined) -> Iterator[HangRank]:
    evidence = joined.evidence
    calls = {row.rank: row for row in evidence.recorder.ranks} if evidence.recorder is not None else {}
    waits_for = _waits_for(joined)
    for state in evidence.stacks.states:
        member, thread = state.member, state.thread
        wait = evidence.graph.main((member.host, member.pid)) if member.pid is not None else None
        still = state.standstill
        call = calls.get(member.rank) if member.rank is not None else None
        yield HangRank(
            host=member.host,
            rank=member.rank,
            local_rank=member.local_rank,
            pid=member.pid,
            job=evidence.job.name,
            doing=str(thread.kind),
            stuck=_mark(joined, state),
            moving=thread.moving,
            since_s=_rounded(still.since_s if still is not None else wait.since_s if wait is not None else None),
            waits=wait.does if wait is not None else thread.reason,
            waits_for=waits_for.get((member.host, member.pid or 0)),
            counters=dict(thread.counters),
            frames=tuple(_frame(frame.function, frame.file, frame.line) for frame in thread.frames[:_FRAMES]),
            recorder=_call(call.waiting or call.last) if call is not None else "",
            recent=tuple(map(_call, call.recent)) if call is not None else (),
        )


def _mark(joined: Joined, state: RankState) -> str:
    rank = state.member.rank if state.member.rank is not None else -(state.member.pid or 0)
    if rank not in joined.accused:
        return ""
    if state.thread.kind is StackClass.EXITED:
        return "gone"
    is_outlier = any(state is outlier for outlier in joined.evidence.stacks.outliers)
    return mark(joined.evidence.stacks, state) if is_outlier else "stuck"


def _waits_for(joined: Joined) -> Mapping[Key, int]:
    """Return for which rank each rank waits, as far as /proc or a send or recv tell."""
    graph = joined.evidence.graph
    found = {}
    for key in graph.by_process:
        edge = graph.edge(key)
        rank = graph.index.rank(edge.to) if edge is not None else None
        if rank is not None:
            found[key] = rank
    for state in joined.evidence.stacks.states:
        if state.thread.peer is not None and state.member.pid is not None:
            found.setdefault((state.member.host, state.member.pid), state.thread.peer)
    return found


def _frame(function: str, file: str, line: int) -> str:
    return f"{function} ({library_path(file) or file}{f':{line}' if line else ''})"


def _call(call: CallRow | None) -> str:
    if call is None:
        return ""
    number = f" #{call.number}" if call.number is not None else f" {call.source}->{call.target}"
    return f"{call.operation}{number} of {call.group}, {call.state}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
