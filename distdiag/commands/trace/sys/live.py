"""What the nodes told -> the threads that were traced, and what each waits for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.trace.blocked.collect import Blocked
from distdiag.commands.trace.blocked.result import Kind
from distdiag.commands.trace.blocked.waits import wait_of
from distdiag.commands.trace.sys.model import MAX_PROCESSES, Log, Refused, Subject
from distdiag.commands.trace.who import People

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.blocked.result import Wait
    from distdiag.commands.trace.nodes import Answers
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.commands.trace.sys.collect import Attached, Told, Traced
    from distdiag.commands.trace.who import Key
    from distdiag.node.blocked import Thread
    from distdiag.node.strace.types import ThreadLog

WAITING = ("blocked", "detached")
"""States of a thread whose last call had not returned."""
HELD_S = 0.1
"""Who has been in a call for less goes on."""


class Live:
    """All that is known of the processes that were chosen."""

    def __init__(self, answers: Answers[Told], chosen: Sequence[Chosen]) -> None:
        self.people = People(
            answers.nodes,
            {
                host: ([one for part in told for one in part.networks], [one for part in told for one in part.people])
                for host, told in answers.told.items()
            },
        )
        self.attached: dict[Key, Attached] = {
            (host, one.pid): one for host, told in answers.told.items() for part in told for one in part.attached
        }
        self.traced: dict[Key, Traced] = {
            (host, one.pid): one for host, told in answers.told.items() for part in told for one in part.traced
        }
        self._chosen = {(one.host, one.process.pid): one for one in chosen if one.process is not None}

    def subjects(self) -> Iterator[Subject]:
        """Give all threads, by rank, the main one of each process first."""
        for key in self._chosen:
            if key in self.traced and key in self.attached:
                yield from self._of_process(key, self.traced[key])

    def logs(self) -> Iterator[Log]:
        """Give what is known of each log."""
        for key, one in self.traced.items():
            yield Log(
                host=key[0],
                rank=self.people.rank(key),
                pid=one.pid,
                path=one.kept,
                size_bytes=one.log_bytes,
                span_s=round(one.ended_s - one.began_s, 3),
                cut=one.cut,
                unread=one.unread,
            )

    def refused(self) -> Iterator[Refused]:
        """Give the processes that strace was not attached to."""
        asked: dict[str, int] = {}
        for (host, pid), one in self._chosen.items():
            asked[host] = asked.get(host, 0) + 1
            attached = self.attached.get((host, pid))
            why = attached.why if attached is not None else "too-many" if asked[host] > MAX_PROCESSES else ""
            if why and one.process is not None:
                yield Refused(
                    host=host,
                    rank=one.rank,
                    pid=pid,
                    why=why,
                    words=attached.words if attached is not None else "",
                    tracer=attached.tracer if attached is not None else None,
                    user=one.process.user,
                )

    def _of_process(self, key: Key, one: Traced) -> Iterator[Subject]:
        logs = {log.tid: log for log in one.logs}
        after = {thread.tid: thread for thread in one.threads}
        tids = sorted({*after, *(tid for tid in logs if tid is not None)}, key=lambda tid: (tid != one.pid, tid))
        for tid in tids:
            yield self._subject(key, one, logs.get(tid), after.get(tid), tid)

    def _subject(self, key: Key, one: Traced, log: ThreadLog | None, after: Thread | None, tid: int) -> Subject:
        wait = self._wait(key, one, log, after)
        before = next((thread for thread in self.attached[key].threads if thread.tid == tid), None)
        idle = _was_idle(log, before, after)
        since_s = before.since_s if idle and before is not None else None
        span_s = max(0.0, one.ended_s - one.began_s)
        waits = wait is not None and wait.kind not in (Kind.RUNS, Kind.ENDED)
        blocked_s = None
        if waits and since_s is not None:
            blocked_s = since_s + span_s
        elif waits and log is not None and log.last is not None and log.last.at_s is not None and log.state in WAITING:
            blocked_s = max(0.0, one.ended_s - log.last.at_s)
        peers = wait.peers if wait is not None else ()
        ranks = {self.people.rank(peer) for peer in peers}
        is_helper = self._chosen[key].is_helper
        return Subject(
            host=key[0],
            rank=None if is_helper else self._chosen[key].rank,
            pid=one.pid,
            tid=tid,
            comm=after.comm if after is not None else log.comm if log is not None else "",
            is_main=tid == one.pid,
            log=log,
            span_s=span_s,
            kind=wait.kind if wait is not None else Kind.RUNS if after is not None else Kind.ENDED,
            call=wait.call if wait is not None else "",
            on=wait.on if wait is not None else "",
            does=wait.does if wait is not None else "",
            blocked_s=blocked_s,
            idle=idle and waits,
            peers=peers,
            ranks=tuple(sorted(rank for rank in ranks if rank is not None)),
            job=job.name if (job := self._chosen[key].job) is not None else "",
        )

    def _wait(self, key: Key, one: Traced, log: ThreadLog | None, after: Thread | None) -> Wait | None:
        """Tell what a thread waits for; None if it goes on. What it does after strace left is what it did before."""
        if after is None or (log is not None and log.n_calls and not _stands(log, one.ended_s)):
            return None
        process = Blocked(pid=one.pid, state=one.state, tracer=one.tracer, threads=one.threads, moved=())
        return wait_of(after, process, key[0], self.people)


def _stands(log: ThreadLog, ended_s: float) -> bool:
    """Tell whether a thread that made calls was held up in its last one, and not only seen in it."""
    at_s = log.last.at_s if log.last is not None else None
    return log.state in WAITING and (at_s is None or ended_s - at_s >= HELD_S)


def _was_idle(log: ThreadLog | None, before: Thread | None, after: Thread | None) -> bool:
    """Tell whether a thread was in the same call from before strace came until after it left."""
    same = before is not None and after is not None and bool(before.syscall) and before.syscall == after.syscall
    return same and (log is None or (log.n_calls == 0 and log.state in WAITING))
