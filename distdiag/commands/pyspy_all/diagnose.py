"""The report of pyspy-all, from the facts of all nodes. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - imported with the subcommand

from distdiag.commands.pyspy_all.findings import reason_of, straggler_findings
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
from distdiag.diagnosis.outliers import mark, split
from distdiag.diagnosis.stack_classes import classify_stack, helper_frames
from distdiag.diagnosis.stuck.judge import all_nodes, job_findings, judge, where_of
from distdiag.diagnosis.stuck.types import OF_PROCESSES, Asked, StuckKind
from distdiag.fold import by_key
from distdiag.jobs.types import summarize
from distdiag.knowledge.frames import library_path
from distdiag.report import Level, Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.commands.pyspy_all.types import Request
    from distdiag.diagnosis.outliers import JobVerdict
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.join import Joined
    from distdiag.facts.stacks.stack_types import Frame, Sample
    from distdiag.jobs.types import Helper, NodePicture
    from distdiag.saved_facts import Gathered

_MANY_SAMPLES = 10


def diagnose(request: Request, gathered: Gathered[NodePicture]) -> Report[PySpyAll]:
    """Find the jobs, judge each by its processes, and build the report."""
    asked = asked_of(request)
    nodes = all_nodes(gathered)
    judged = judge(asked, nodes)
    verdicts = [joined.evidence.stacks for joined in judged]
    slow = [own for verdict in verdicts for own in straggler_findings(verdict)]
    is_answered = bool(slow) or request.samples >= _MANY_SAMPLES  # "look for a slow rank" is done
    rest = job_findings(asked, judged, nodes, gathered)
    found = [*slow, *(replace(each, fix=None) if is_answered and each.level is Level.INFO else each for each in rest)]
    data = PySpyAll(
        samples=_samples(request, verdicts) if gathered.interrupted else request.samples,
        interval_s=_interval_s(request, verdicts),
        jobs=tuple(summarize(joined.evidence.job) for joined in judged),
        processes=tuple(row for verdict in verdicts for row in _process_rows(verdict)),
        groups=tuple(group for verdict in verdicts for group in _groups(verdict)),
        outliers=tuple(outlier for joined in judged for outlier in _outliers(joined)),
    )
    summary = found[0].title if found else "no rank process found"
    return Report(command=COMMAND, data=data, findings=tuple(found), summary=summary, interrupted=gathered.interrupted)


def _taken(verdicts: Sequence[JobVerdict]) -> list[tuple[Sample, ...]]:
    return [state.member.watched.samples for each in verdicts for state in each.states if state.member.watched]


def _samples(request: Request, verdicts: Sequence[JobVerdict]) -> int:
    """Return the number of samples that were received."""
    return max(map(len, _taken(verdicts)), default=request.samples)


def _interval_s(request: Request, verdicts: Sequence[JobVerdict]) -> float:
    """Return the time between samples, measured where the node chose it."""
    full = [samples for samples in _taken(verdicts) if len(samples) == request.samples] if request.is_quick else []
    return min(((own[-1].at_s - own[0].at_s) / (len(own) - 1) for own in full), default=request.interval_s)


def asked_of(request: Request) -> Asked:
    """Reduce the request to the judgement's part."""
    return Asked(
        program=request.program,
        cluster=request.cluster,
        command=COMMAND,
        job=request.job,
        pids=request.pids,
        user=request.user,
        sources=OF_PROCESSES,
    )


def _groups(verdict: JobVerdict) -> Iterator[Group]:
    """Group the ranks with the same stack: outliers first, then smallest first."""
    outliers = {id(state) for state in verdict.outliers}
    by_thread = by_key(((id(state) in outliers, id(state.thread)), state) for state in verdict.states)
    folded: dict[tuple[bool, str, tuple[Frame, ...], bool | None], list[RankState]] = {}
    for (is_outlier, _), members in by_thread.items():
        thread = members[0].thread
        folded.setdefault((is_outlier, members[0].label, thread.frames, thread.moving), []).extend(members)
    for (is_outlier, label, frames, moving), members in sorted(
        folded.items(), key=lambda item: (not item[0][0], len(item[1]))
    ):
        about = where_of(members)
        yield Group(
            job=verdict.job.name,
            ranks=about.ranks,
            hosts=about.hosts,
            pids=about.pids,
            class_=label,
            moving=moving,
            count=len(members),
            outlier=mark(verdict, members[0]) if is_outlier else "",
            counters=dict(set.intersection(*(set(state.thread.counters) for state in members))),
            frames=frame_rows(frames),
        )


def _outliers(joined: Joined) -> Iterator[Outlier]:
    """List the accused ranks by place; none if the sources disagree."""
    verdict = joined.evidence.stacks
    accused = [] if joined.kind is StuckKind.UNKNOWN else verdict.outliers
    for group in split(accused):
        about, thread = where_of(group), group[0].thread
        frame = thread.location.frame or (thread.frames[0] if thread.frames else None)
        yield Outlier(
            ranks=about.ranks,
            hosts=about.hosts,
            pids=about.pids,
            kind=mark(verdict, group[0]),
            class_=str(thread.kind),
            frame=OutlierFrame(frame.function, frame.file, frame.line) if frame is not None else None,
            reason=reason_of(verdict, group),
        )


def _process_rows(verdict: JobVerdict) -> Iterator[ProcessRow]:
    threads: dict[int, tuple[ThreadRow, ...]] = {}
    for state in verdict.states:
        member, thread = state.member, state.thread
        samples = member.watched.samples if member.watched is not None else ()
        if id(samples) not in threads:
            threads[id(samples)] = _threads(samples, str(thread.kind))
        row = ProcessRow(
            host=member.host,
            pid=member.pid,
            rank=member.rank,
            local_rank=member.local_rank,
            job=verdict.job.name,
            role="rank",
            state=samples[-1].state if samples else member.process.state if member.process is not None else "",
            status=thread.status,
            reason=thread.reason,
            class_=str(thread.kind),
            moving=thread.moving,
            cpu_s=_used(samples),
            counters=dict(thread.counters),
            helpers=tuple(helper.process.pid for helper in member.helpers),
            threads=threads[id(samples)],
        )
        yield row
        yield from (_helper_row(row, helper) for helper in member.helpers)


def _helper_row(rank: ProcessRow, helper: Helper) -> ProcessRow:
    samples = helper.watched.samples if helper.watched is not None else ()
    kind = str(classify_stack(helper_frames(helper.watched))[0] or "")
    return msgspec.structs.replace(
        rank,
        pid=helper.process.pid,
        role="helper",
        state=samples[-1].state if samples else helper.process.state,
        status=samples[-1].status if samples else "",
        reason=samples[-1].reason if samples else helper.process.kind or "not sampled",
        class_=kind,
        moving=None,
        cpu_s=_used(samples),
        counters={},
        helpers=(),
        threads=_threads(samples, kind),
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
    """Convert frames to rows; equal stacks share one tuple."""
    return tuple(FrameRow(frame.function, frame.file, frame.line, library_path(frame.file) is None) for frame in frames)
