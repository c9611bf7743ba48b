"""What strace recorded -> the report of trace sys. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.trace.nodes import incomplete, index_of
from distdiag.commands.trace.sys import findings
from distdiag.commands.trace.sys.types import COMMAND, MAX_LOG_BYTES, TracedThread, TraceSys, state_of
from distdiag.diagnosis import verdicts
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.wait_reasons import Kind, Wait, wait_of
from distdiag.diagnosis.wording import counted, format_duration
from distdiag.facts.process.blocked_threads import Blocked
from distdiag.facts.strace.types import WAITING
from distdiag.report import Level, Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.commands.trace.nodes import Answers
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.commands.trace.sys.collect import Attached, Reply, Traced
    from distdiag.commands.trace.sys.types import Request
    from distdiag.diagnosis.process_index import Key
    from distdiag.facts.process.blocked_threads import Thread
    from distdiag.facts.strace.types import ThreadLog
    from distdiag.report import Finding

_HELD_S = 0.1
"""A thread in a call for a shorter time is not blocked."""
_LIMIT = f"the limit of {MAX_LOG_BYTES >> 20} MiB of logs per node was reached"
_RUNS = Wait(kind=Kind.RUNS, call="", on="", does="", since_s=None)


def diagnose(request: Request, answers: Answers[Reply], chosen: Sequence[Chosen]) -> Report[TraceSys]:
    """Judge the traces of running processes."""
    live = _Live(answers, chosen)
    threads = list(live.threads())
    found = [
        *_common(request, threads),
        *findings.cut([thread for thread in threads if thread.main and live.traced[thread.key].cut], _LIMIT),
        *_unread((live.index.name(key), traced.unread) for key, traced in live.traced.items() if traced.unread),
        *findings.left(live.traced, live.attached, live.index),
        *findings.refused(request, chosen, live.attached, answers.nodes[0].processes if answers.nodes else None),
        *incomplete(answers, request.wanted, chosen),
        *host_findings(answers.refusals, answers.rows),
    ]
    return replace(_report(request, threads, found), interrupted=answers.interrupted)


def diagnose_logs(
    request: Request, threads: Sequence[TracedThread], unread: Sequence[tuple[str, str]]
) -> Report[TraceSys]:
    """Judge existing logs. `unread`: path and reason."""
    torn = findings.cut([each for each in threads if each.log and each.log.state == "cut"], "its end is missing")
    found = [*_common(request, threads), *torn, *_unread(unread)]
    return _report(request, threads, found)


def _common(request: Request, threads: Sequence[TracedThread]) -> list[Finding]:
    blocked = findings.blocked(request, threads)
    return [
        *blocked,
        *([] if blocked else findings.all_asleep(request, threads)),
        *findings.errors(threads),
        *findings.slow_storage(threads),
        *findings.spins(request, threads),
        *findings.polls(threads),
    ]


def _unread(logs: Iterable[tuple[str, str]]) -> list[Finding]:
    return [verdicts.finding("log-unread", log=name, why=why) for name, why in logs]


def _report(request: Request, threads: Sequence[TracedThread], found: Sequence[Finding]) -> Report[TraceSys]:
    worst = next((finding for finding in verdicts.worst_first(found) if finding.level is not Level.INFO), None)
    return Report(
        command=COMMAND,
        data=TraceSys(threads=tuple(threads)),
        findings=tuple(found),
        summary=worst.title if worst is not None else _summary(request, threads),
    )


def _summary(request: Request, threads: Sequence[TracedThread]) -> str:
    """Format the summary of a trace without problems: the problems ruled out, and the limits of a trace."""
    calls = sum(thread.n_calls for thread in threads)
    processes = len({thread.key for thread in threads})
    longest = format_duration(max((thread.span_s for thread in threads), default=0.0))
    if not processes:
        return "no process was traced"
    if not calls:
        waiting = any(thread.main and thread.state == "blocked" for thread in threads)
        why = "each stayed in the call shown above" if waiting else "computation makes none"
        return f"no system call returned in {longest}: {why}"
    made = f"{counted(calls, 'system call')} of {counted(processes, 'process', 'processes')} in {longest}"
    return (
        f"{made}: no blocked rank, serious error, slow file system or busy-wait seen. What shows a slow rank: "
        f"{request.program} pyspy-all --samples 20"
    )


class _Live:
    """The nodes' replies about the selected processes."""

    def __init__(self, answers: Answers[Reply], chosen: Sequence[Chosen]) -> None:
        parts = [(host, part) for host, replies in answers.replies.items() for part in replies]
        self.index = index_of(answers)
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

    def _thread(self, key: Key, traced: Traced, log: ThreadLog | None, after: Thread | None, tid: int) -> TracedThread:
        wait, chosen = self._wait(key, traced, log, after), self._chosen[key]
        before = next((thread for thread in self.attached[key].threads if thread.tid == tid), None)
        waits = wait.kind not in (Kind.RUNS, Kind.ENDED)
        idle = waits and _was_idle(log, before, after)
        ranks = {self.index.rank(peer) for peer in wait.peers}
        return TracedThread(
            host=key[0],
            job=chosen.job.name if chosen.job is not None else "",
            rank=None if chosen.is_helper else chosen.rank,
            pid=traced.pid,
            tid=tid,
            comm=after.comm if after is not None else log.comm if log is not None else "",
            main=tid == traced.pid,
            state=state_of(log, waits=waits),
            kind=wait.kind,
            call=wait.call,
            on=wait.on,
            does=wait.does,
            blocked_s=_blocked_s(traced, log, before if idle else None) if waits else None,
            idle=idle,
            peers=wait.peers,
            ranks=tuple(sorted(rank for rank in ranks if rank is not None)),
            span_s=round(max(0.0, traced.ended_s - traced.began_s), 6),
            n_calls=log.n_calls if log is not None else 0,
            log=log,
        )

    def _wait(self, key: Key, traced: Traced, log: ThreadLog | None, after: Thread | None) -> Wait:
        """Return a thread's wait, which detaching does not change."""
        if after is None:
            return replace(_RUNS, kind=Kind.ENDED)
        if log is not None and log.n_calls and not _is_held_up(log, traced.ended_s):
            return _RUNS
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
    """Return whether a thread that made calls is blocked in the last one, rather than sampled in it by chance."""
    at_s = log.last.at_s if log.last is not None else None
    return log.state in WAITING and (at_s is None or ended_s - at_s >= _HELD_S)


def _was_idle(log: ThreadLog | None, before: Thread | None, after: Thread | None) -> bool:
    """Return whether a thread was in the same call from before strace attached until after it detached."""
    same = before is not None and after is not None and bool(before.syscall) and before.syscall == after.syscall
    return same and (log is None or (log.n_calls == 0 and log.state in WAITING))
