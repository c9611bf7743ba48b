"""What strace saw -> the report of trace sys. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.reached import host_findings
from distdiag.commands.trace.blocked.result import Kind
from distdiag.commands.trace.sys import findings, standing, troubles
from distdiag.commands.trace.sys.choices import COMMAND
from distdiag.commands.trace.sys.live import WAITING, Live
from distdiag.commands.trace.sys.model import CallRow, ErrorRow, Last, ThreadRow, TraceSys
from distdiag.commands.trace.sys.words import lasting
from distdiag.report import Finding, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.commands.trace.nodes import Answers
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.commands.trace.sys.collect import Told
    from distdiag.commands.trace.sys.model import Log, Request, Subject

_ORDER = (Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO)


def diagnose(request: Request, answers: Answers[Told], chosen: Sequence[Chosen]) -> Report[TraceSys]:
    """Judge what was seen of processes that run."""
    live = Live(answers, chosen)
    subjects, logs, refused = list(live.subjects()), list(live.logs()), list(live.refused())
    node = answers.nodes[0].processes if answers.nodes else None
    found = [
        *_of_all(request, subjects, logs),
        *findings.left(live.traced, live.attached, live.people),
        *findings.refused(request, refused, node),
        *_missing(answers),
        *host_findings(answers.refusals, answers.rows),
    ]
    report = _report(request, subjects, logs, found)
    return replace(report, data=replace(report.data, refused=tuple(refused)), interrupted=answers.interrupted)


def judge_logs(request: Request, subjects: Sequence[Subject], logs: Sequence[Log]) -> Report[TraceSys]:
    """Judge logs that somebody has."""
    return _report(request, subjects, logs, _of_all(request, subjects, logs))


def _of_all(request: Request, subjects: Sequence[Subject], logs: Sequence[Log]) -> list[Finding]:
    blocked = list(standing.blocked(request, subjects))
    return [
        *blocked,
        *([] if blocked else findings.all_asleep(request, subjects)),
        *troubles.errors(subjects),
        *findings.slow_storage(subjects),
        *findings.spins(request, subjects),
        *findings.cut(logs),
    ]


def _report(
    request: Request, subjects: Sequence[Subject], logs: Sequence[Log], found: Sequence[Finding]
) -> Report[TraceSys]:
    data = TraceSys(only=request.only, threads=tuple(map(_row, subjects)), logs=tuple(logs))
    worst = min((one for one in found if one.level is not Level.INFO), key=_place, default=None)
    summary = worst.title if worst is not None else _seen(subjects, logs)
    return Report(command=COMMAND, data=data, findings=tuple(found), summary=summary)


def _place(one: Finding) -> int:
    return _ORDER.index(one.level)


def _missing(answers: Answers[Told]) -> Iterator[Finding]:
    for host, why in answers.missing.items():
        title = f"what {host} told is not complete: {why}"
        yield Finding(id="trace.incomplete", level=Level.UNKNOWN, title=title, where=Where(hosts=(host,)))


def _seen(subjects: Sequence[Subject], logs: Sequence[Log]) -> str:
    """Say what was seen where nothing is wrong."""
    calls = sum(one.log.n_calls for one in subjects if one.log is not None)
    processes = len({one.key for one in subjects})
    longest = max((log.span_s for log in logs), default=0.0)
    what = f"{processes} process{'' if processes == 1 else 'es'}"
    if not processes:
        return "nothing was traced"
    waiting = any(one.is_main and one.call and one.kind is not Kind.RUNS for one in subjects)
    if not calls:
        why = "what they wait in stands above" if waiting else "computing needs none"
        return f"no system call of {what} returned in {lasting(longest)}: {why}"
    made = "1 system call" if calls == 1 else f"{calls} system calls"
    return f"{what} made {made} in {lasting(longest)}; nothing in them stands out"


def _row(one: Subject) -> ThreadRow:
    log = one.log
    return ThreadRow(
        host=one.host,
        rank=one.rank,
        pid=one.pid,
        tid=one.tid,
        comm=one.comm,
        main=one.is_main,
        state=_state(one),
        kind=one.kind,
        on=one.on,
        n_calls=log.n_calls if log is not None else 0,
        traced_s=round(one.span_s, 6),
        last=_last(one),
        calls=tuple(
            CallRow(name=row.name, count=row.count, errors=row.errors, time_s=row.time_s, slowest_s=row.slowest_s)
            for row in (log.calls if log is not None else ())
        ),
        errors=tuple(_errors(one)),
        places=log.places if log is not None else (),
        spins=log.spins if log is not None else (),
    )


def _state(one: Subject) -> str:
    if one.blocked_s is not None or (one.call and one.kind not in (Kind.RUNS, Kind.ENDED)):
        return "blocked"
    log = one.log
    return log.state if log is not None and log.state not in (*WAITING, "returned", "cut") else "runs"


def _errors(one: Subject) -> Iterable[ErrorRow]:
    for row in one.log.errors if one.log is not None else ():
        if row.weight > 1:
            yield ErrorRow(call=row.name, error=row.error, target=row.target, places=row.places, count=row.count)


def _last(one: Subject) -> Last | None:
    last = one.log.last if one.log is not None else None
    if last is None and not one.call:
        return None
    blocked_s = None if one.blocked_s is None else round(one.blocked_s, 3)
    # What strace restarts has another name in its log than the call that it is.
    again = last is None or last.name == "restart_syscall"
    return Last(
        call=one.call if again or last is None else last.name,
        args="" if again or last is None else last.args,
        fd_target=last.target if last is not None else "",
        peer_rank=one.ranks[0] if len(one.ranks) == 1 else None,
        blocked_s=blocked_s,
    )
