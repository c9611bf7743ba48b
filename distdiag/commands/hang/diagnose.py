"""The report of hang, from the facts of all nodes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.hang.types import COMMAND, Hang, HangRank
from distdiag.diagnosis.outliers import mark
from distdiag.diagnosis.stack_classes import StackClass
from distdiag.diagnosis.stuck.fixes import next_experiment
from distdiag.diagnosis.stuck.join import source_rows
from distdiag.diagnosis.stuck.judge import all_nodes, job_findings, judge, launcher_claims
from distdiag.diagnosis.stuck.types import Asked, StuckKind
from distdiag.jobs.types import summarize
from distdiag.knowledge.frames import library_path
from distdiag.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.commands.hang.types import Request
    from distdiag.diagnosis.flight_recorder.types import CallRow
    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.join import Joined
    from distdiag.diagnosis.stuck.types import Claim
    from distdiag.jobs.types import NodePicture
    from distdiag.saved_facts import Gathered

_FRAMES = 12


def diagnose(request: Request, gathered: Gathered[NodePicture]) -> Report[Hang]:
    """Judge all jobs by all sources, worst first."""
    asked = asked_of(request)
    nodes = all_nodes(gathered)
    judged = judge(asked, nodes)
    found = job_findings(asked, judged, nodes, gathered)
    return Report(
        command=COMMAND,
        data=_data(judged, launcher_claims(asked, judged, nodes)),
        findings=tuple(found),
        summary=found[0].title,
        interrupted=gathered.interrupted,
    )


def asked_of(request: Request) -> Asked:
    """Reduce the request to the judgement's part."""
    return Asked(
        program=request.program,
        cluster=request.cluster,
        command=COMMAND,
        job=request.wanted.job,
        pids=request.wanted.pids,
        user=request.wanted.user,
    )


def _data(judged: Sequence[Joined], starts: Sequence[Claim]) -> Hang:
    if not judged:
        return Hang(
            class_name=next((claim.kind for claim in starts if claim.kind), StuckKind.UNKNOWN),
            ranks=(),
            candidates=(),
            next_experiment="",
            sources=(),
            jobs=(),
            processes=(),
        )
    first = judged[0]
    is_unknown = first.kind is StuckKind.UNKNOWN
    return Hang(
        class_name=first.kind,
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
            doing=state.label,
            stuck=_mark(joined, state),
            moving=thread.moving,
            motion=str(thread.motion),
            gpu=(thread.gpu.call or thread.gpu.library) if thread.gpu is not None else "",
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
    """Map processes to the rank each waits for, from /proc or a send or recv."""
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
