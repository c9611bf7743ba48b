"""What strace recorded -> the report of trace sys. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.unreached_hosts import host_findings
from distdiag.commands.trace.sys import findings
from distdiag.commands.trace.sys.types import (
    COMMAND,
    MAX_PROCESSES,
    ErrorRow,
    LastCall,
    Log,
    Refused,
    ThreadRow,
    TracedThread,
    TraceSys,
)
from distdiag.commands.trace.sys.wording import format_duration
from distdiag.diagnosis.process_index import ProcessIndex
from distdiag.diagnosis.wait_reasons import Kind, wait_of
from distdiag.facts.blocked_threads import Blocked
from distdiag.facts.strace.types import WAITING
from distdiag.report import Finding, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.nodes import Answers
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.commands.trace.sys.collect import Attached, Reply, Traced
    from distdiag.commands.trace.sys.types import Request
    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.wait_reasons import Wait
    from distdiag.facts.blocked_threads import Thread
    from distdiag.facts.strace.types import ThreadLog

_ORDER = (Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO)
_HELD_S = 0.1
"""A thread that has been in a call for less is not blocked."""


def diagnose(request: Request, answers: Answers[Reply], chosen: Sequence[Chosen]) -> Report[TraceSys]:
    """Judge the traces of running processes."""
    live = _Live(answers, chosen)
    threads, logs, refused = list(live.threads()), list(live.logs()), list(live.refused())
    node = answers.nodes[0].processes if answers.nodes else None
    found = [
        *_common(request, threads, logs),
        *findings.left(live.traced, live.attached, live.index),
        *findings.refused(request, refused, node),
        *_missing(answers),
        *host_findings(answers.refusals, answers.rows),
    ]
    report = _report(request, threads, logs, found)
    return replace(report, data=replace(report.data, refused=tuple(refused)), interrupted=answers.interrupted)


def diagnose_logs(request: Request, threads: Sequence[TracedThread], logs: Sequence[Log]) -> Report[TraceSys]:
    """Judge existing logs."""
    return _report(request, threads, logs, _common(request, threads, logs))


def _common(request: Request, threads: Sequence[TracedThread], logs: Sequence[Log]) -> list[Finding]:
    blocked = findings.blocked(request, threads)
    return [
        *blocked,
        *([] if blocked else findings.all_asleep(request, threads)),
        *findings.errors(threads),
        *findings.slow_storage(threads),
        *findings.spins(request, threads),
        *findings.polls(threads),
        *findings.cut(logs),
    ]


def _missing(answers: Answers[Reply]) -> Iterator[Finding]:
    for host, why in answers.missing.items():
        title = f"incomplete facts from {host}: {why}"
        yield Finding(id="trace.incomplete", level=Level.UNKNOWN, title=title, where=Where(hosts=(host,)))


def _report(
    request: Request, threads: Sequence[TracedThread], logs: Sequence[Log], found: Sequence[Finding]
) -> Report[TraceSys]:
    data = TraceSys(only=request.only, threads=tuple(map(_row, threads)), logs=tuple(logs))
    faults = [finding for finding in found if finding.level is not Level.INFO]
    worst = min(faults, key=lambda finding: _ORDER.index(finding.level), default=None)
    summary = worst.title if worst is not None else _summary(request, threads, logs)
    return Report(command=COMMAND, data=data, findings=tuple(found), summary=summary)


def _summary(request: Request, threads: Sequence[TracedThread], logs: Sequence[Log]) -> str:
    """Format the summary of a trace without problems: what was not seen in it, and what it cannot show."""
    calls = sum(thread.n_calls for thread in threads)
    processes = len({thread.key for thread in threads})
    longest = format_duration(max((log.span_s for log in logs), default=0.0))
    what = f"{processes} process{'' if processes == 1 else 'es'}"
    if not processes:
        return "no process was traced"
    waiting = any(thread.is_main and thread.call and thread.kind is not Kind.RUNS for thread in threads)
    if not calls:
        why = "each stayed in the call shown above" if waiting else "computation makes none"
        return f"no system call of {what} returned in {longest}: {why}"
    made = "1 system call" if calls == 1 else f"{calls} system calls"
    return (
        f"{what} made {made} in {longest}: no blocked rank, serious error, slow file system or busy-wait seen. "
        f"What shows a slow rank: {request.program} pyspy-all --samples 20"
    )


def _row(thread: TracedThread) -> ThreadRow:
    log = thread.log
    return ThreadRow(
        host=thread.host,
        job=thread.job,
        rank=thread.rank,
        pid=thread.pid,
        tid=thread.tid,
        comm=thread.comm,
        main=thread.is_main,
        state=_state(thread),
        kind=thread.kind,
        on=thread.on,
        n_calls=thread.n_calls,
        traced_s=round(thread.span_s, 6),
        last=_last(thread),
        calls=log.calls if log is not None else (),
        errors=tuple(
            ErrorRow(call=error.name, error=error.error, target=error.target, places=error.places, count=error.count)
            for error in (log.errors if log is not None else ())
            if error.weight > 1
        ),
        places=log.places if log is not None else (),
        spins=log.spins if log is not None else (),
    )


def _state(thread: TracedThread) -> str:
    if thread.blocked_s is not None or (thread.call and thread.kind not in (Kind.RUNS, Kind.ENDED)):
        return "blocked"
    log = thread.log
    return log.state if log is not None and log.state not in (*WAITING, "returned", "cut") else "runs"


def _last(thread: TracedThread) -> LastCall | None:
    last = thread.log.last if thread.log is not None else None
    if last is None and not thread.call:
        return None
    # What strace restarts has another name in its log than the call that it is.
    again = last is None or last.name == "restart_syscall"
    return LastCall(
        call=thread.call if again or last is None else last.name,
        args="" if again or last is None else last.args,
        fd_target=last.target if last is not None else "",
        peer_rank=thread.ranks[0] if len(thread.ranks) == 1 else None,
        blocked_s=None if thread.blocked_s is None else round(thread.blocked_s, 3),
    )


class _Live:
    """What nodes sent of the processes that were chosen."""

    def __init__(self, answers: Answers[Reply], chosen: Sequence[Chosen]) -> None:
        parts = [(host, part) for host, replies in answers.replies.items() for part in replies]
        self.index = ProcessIndex(
            answers.nodes,
            {
                host: (
                    [network for part in replies for network in part.networks],
                    [person for part in replies for person in part.people],
                )
                for host, replies in answers.replies.items()
            },
        )
        self.attached: dict[Key, Attached] = {(host, each.pid): each for host, part in parts for each in part.attached}
        self.traced: dict[Key, Traced] = {(host, each.pid): each for host, part in parts for each in part.traced}
        self._chosen = {(each.host, each.process.pid): each for each in chosen if each.process is not None}

    def threads(self) -> Iterator[TracedThread]:
        """List all threads, by rank, the main one of each process first."""
        for key in self._chosen:
            traced = self.traced.get(key)
            if traced is None or key not in self.attached:
                continue
            logs = {log.tid: log for log in traced.logs}
            after = {thread.tid: thread for thread in traced.threads}
            tids = {*after, *(tid for tid in logs if tid is not None)}
            for tid in sorted(tids, key=lambda tid: (tid != key[1], tid)):
                yield self._thread(key, traced, logs.get(tid), after.get(tid), tid)

    def logs(self) -> Iterator[Log]:
        """List what is known of each log."""
        for key, traced in self.traced.items():
            yield Log(
                host=key[0],
                rank=self.index.rank(key),
                pid=traced.pid,
                path=traced.kept,
                size_bytes=traced.log_bytes,
                span_s=round(traced.ended_s - traced.began_s, 3),
                cut=traced.cut,
                unread=traced.unread,
            )

    def refused(self) -> Iterator[Refused]:
        """List the processes that strace was not attached to."""
        asked: dict[str, int] = {}
        for (host, pid), chosen in self._chosen.items():
            asked[host] = asked.get(host, 0) + 1
            attached = self.attached.get((host, pid))
            why = attached.why if attached is not None else "too-many" if asked[host] > MAX_PROCESSES else ""
            if why and chosen.process is not None:
                yield Refused(
                    host=host,
                    rank=chosen.rank,
                    pid=pid,
                    why=why,
                    words=attached.words if attached is not None else "",
                    tracer=attached.tracer if attached is not None else None,
                    user=chosen.process.user,
                )

    def _thread(self, key: Key, traced: Traced, log: ThreadLog | None, after: Thread | None, tid: int) -> TracedThread:
        wait, chosen = self._wait(key, traced, log, after), self._chosen[key]
        before = next((thread for thread in self.attached[key].threads if thread.tid == tid), None)
        waits = wait is not None and wait.kind not in (Kind.RUNS, Kind.ENDED)
        idle = waits and _was_idle(log, before, after)
        peers = wait.peers if wait is not None else ()
        ranks = {self.index.rank(peer) for peer in peers}
        return TracedThread(
            host=key[0],
            rank=None if chosen.is_helper else chosen.rank,
            pid=traced.pid,
            tid=tid,
            comm=after.comm if after is not None else log.comm if log is not None else "",
            is_main=tid == traced.pid,
            log=log,
            span_s=max(0.0, traced.ended_s - traced.began_s),
            kind=wait.kind if wait is not None else Kind.RUNS if after is not None else Kind.ENDED,
            call=wait.call if wait is not None else "",
            on=wait.on if wait is not None else "",
            does=wait.does if wait is not None else "",
            blocked_s=_blocked_s(traced, log, before if idle else None) if waits else None,
            idle=idle,
            peers=peers,
            ranks=tuple(sorted(rank for rank in ranks if rank is not None)),
            job=chosen.job.name if chosen.job is not None else "",
        )

    def _wait(self, key: Key, traced: Traced, log: ThreadLog | None, after: Thread | None) -> Wait | None:
        """Return what a thread waits for; None if it is not blocked. Detaching does not change it."""
        if after is None or (log is not None and log.n_calls and not _is_held_up(log, traced.ended_s)):
            return None
        process = Blocked(pid=traced.pid, state=traced.state, tracer=traced.tracer, threads=traced.threads, moved=())
        return wait_of(after, process, key[0], self.index)


def _blocked_s(traced: Traced, log: ThreadLog | None, before: Thread | None) -> float | None:
    """Return how long a thread has been in its call. `before`: its state before strace attached, if in this call."""
    if before is not None and before.since_s is not None:
        return before.since_s + max(0.0, traced.ended_s - traced.began_s)
    if log is not None and log.state in WAITING and log.last is not None and log.last.at_s is not None:
        return max(0.0, traced.ended_s - log.last.at_s)
    return None


def _is_held_up(log: ThreadLog, ended_s: float) -> bool:
    """Return whether a thread that made calls is blocked in the last of them, and not just in it by chance."""
    at_s = log.last.at_s if log.last is not None else None
    return log.state in WAITING and (at_s is None or ended_s - at_s >= _HELD_S)


def _was_idle(log: ThreadLog | None, before: Thread | None, after: Thread | None) -> bool:
    """Return whether a thread was in the same call from before strace attached until after it detached."""
    same = before is not None and after is not None and bool(before.syscall) and before.syscall == after.syscall
    return same and (log is None or (log.n_calls == 0 and log.state in WAITING))
