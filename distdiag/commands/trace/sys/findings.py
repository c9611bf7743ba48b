"""The findings of trace sys: blocked ranks, errors, slow storage, busy-waits, untraced processes. Pure.

Texts are in knowledge/verdicts.toml.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.trace.sys.types import MAX_PROCESSES
from distdiag.commands.trace.sys.wording import (
    format_range,
    name_process,
    name_processes,
    name_thread,
    where_of,
)
from distdiag.diagnosis import remedies, verdicts
from distdiag.diagnosis.wait_graph import find_roots
from distdiag.diagnosis.wait_reasons import ENDED, Kind
from distdiag.diagnosis.wording import format_duration, listed
from distdiag.facts.machine import STOPPED
from distdiag.facts.process import syscall_names
from distdiag.fold import by_key
from distdiag.ids import Id
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.commands.trace.ranks import Chosen
    from distdiag.commands.trace.sys.collect import Attached, Traced
    from distdiag.commands.trace.sys.types import Request, TracedThread
    from distdiag.diagnosis.process_index import Key, ProcessIndex
    from distdiag.facts.strace.types import CallError, Count
    from distdiag.jobs.collect import Processes


_LONG_S = 5.0
"""A thread that has not run for longer counts as stuck; less may be a training step."""
_SHORT_S = 1.0
"""Shorter waits are not reported."""
_WAITS = (Kind.PEER, Kind.LOCK, Kind.NETWORK, Kind.FILE, Kind.STORAGE, Kind.STOPPED)
_ANY_OF = (*syscall_names.POLLS, *syscall_names.SELECTS, *syscall_names.EPOLLS)
_SENTENCES = 4
_FEWEST_RANKS, _WINDOW_S = 2, 1.0
_SLOW_SHARE, _SLOW_S, _SLOW_COUNT = 0.3, 1.0, 3
_NO_STORAGE = ("/dev", "/proc", "/sys")
_SHOWN = 5
_REPEATED = 3
_ASLEEP = 0.5
"""A thread that sleeps less of the time between its tries has other work, too."""


def blocked(request: Request, threads: Sequence[TracedThread]) -> list[Finding]:
    """Report the blocked processes, those with the same root together."""
    stuck = {thread.key: thread for thread in _stuck(threads)}
    mains = {thread.key: thread for thread in threads if thread.main}
    by_root: dict[Key, list[TracedThread]] = {}
    roots = find_roots({key: thread.peers[0] for key, thread in stuck.items() if len(thread.peers) == 1})
    for thread in stuck.values():
        by_root.setdefault(roots.get(thread.key, thread.key), []).append(thread)
    return [_blocked(request, root, group, mains.get(root)) for root, group in by_root.items()]


def _stuck(threads: Sequence[TracedThread]) -> Iterator[TracedThread]:
    """List the blocked thread of each process: the main thread, or the thread it may wait for."""
    others: dict[Key, list[TracedThread]] = {}
    for thread in threads:
        if not thread.main and _is_long(thread) and thread.kind is Kind.PEER and thread.call not in _ANY_OF:
            others.setdefault(thread.key, []).append(thread)
    for main in threads:
        if not main.main or not _is_long(main):
            continue
        if main.kind in _WAITS:
            yield main
        elif main.kind is Kind.OWN_THREADS and len(others.get(main.key, ())) == 1:
            yield others[main.key][0]


def _is_long(thread: TracedThread) -> bool:
    return thread.kind is Kind.STOPPED or (thread.blocked_s is not None and thread.blocked_s >= _SHORT_S)


def _blocked(request: Request, root: Key, group: list[TracedThread], end: TracedThread | None) -> Finding:
    """Return the finding on the processes waiting for `root`; `end`: its main thread, if traced."""
    waiters = [thread for thread in group if thread.key != root or thread.peers]
    in_cycle = any(thread.key == root and thread.peers for thread in group)
    sentences = _sentences(waiters or group)
    if in_cycle:
        sentences.append("they wait for each other")
    elif end is not None and waiters:
        is_stuck = any(thread.key == root for thread in group)
        name, does = name_process(end), _does(end)
        sentences.append(f"{name} {does}" if is_stuck else f"{name} is not blocked on another rank: it {does}")
    elif waiters and waiters[0].peers:
        one = len(waiters[0].peers) == 1
        sentences.append("its process was not traced" if one else "their processes were not traced")
    members = list({thread.key: thread for thread in [*group, *([end] if end is not None else [])]}.values())
    goes_on = end is not None and not end.idle and not in_cycle and end.kind in (Kind.RUNS, Kind.OWN_THREADS)
    long = any(thread.kind is Kind.STOPPED or (thread.blocked_s or 0.0) > _LONG_S for thread in group)
    return Finding(
        id=Id.TRACE_BLOCKED,
        level=Level.FAIL if long and not goes_on else Level.WARN,
        title="; ".join(sentences),
        where=where_of(members),
        evidence=tuple(_last_call(thread) for thread in group[:_SENTENCES] if thread.kind is not Kind.STOPPED),
        fix=_fix_blocked(request, end if end is not None else group[0], is_traced=end is not None),
    )


def _sentences(waiters: Sequence[TracedThread]) -> list[str]:
    groups = by_key(
        ((thread.call if thread.kind is not Kind.STOPPED else "", thread.peers or thread.on), thread)
        for thread in waiters
    )
    found = []
    for group in list(groups.values())[:_SENTENCES]:
        first, has = group[0], "has" if len(group) == 1 else "have"
        name = name_processes(group) if len(group) > 1 or first.main else name_thread(first)
        if first.kind is Kind.STOPPED:
            found.append(f"{name} {'is' if len(group) == 1 else 'are'} {first.on}")
            continue
        on = first.on if len(group) == 1 else first.on.rpartition(" = ")[2]
        since = format_range([thread.blocked_s for thread in group])
        found.append(f"{name} {has} been blocked for {since} in {first.call} on {on}")
    rest = sum(map(len, list(groups.values())[_SENTENCES:]))
    return [*found, *([f"{rest} more are blocked"] if rest else [])]


def _does(thread: TracedThread) -> str:
    """Return the root's activity, as the end of a sentence."""
    if thread.kind is Kind.ENDED:
        return "has exited"
    if thread.kind is Kind.RUNS and not thread.n_calls:
        return f"computes, with no system call in {format_duration(thread.span_s)}"
    if thread.kind is Kind.RUNS:
        return f"is running, with {thread.n_calls} system calls in {format_duration(thread.span_s)}"
    does = thread.does.partition(" (")[0]
    blocked_for = format_duration(thread.blocked_s) if thread.blocked_s else ""
    brackets = ", ".join(part for part in (thread.call, blocked_for) if part)
    return f"{does} ({brackets})" if brackets and thread.kind is not Kind.STOPPED and "is in" not in does else does


def _last_call(thread: TracedThread) -> str:
    last = thread.log.last if thread.log is not None else None
    target = f"({last.fd}<{last.target}>, ..." if last is not None and last.target and last.fd is not None else ""
    return f"{name_thread(thread)}: {thread.call}{target}"


def _fix_blocked(request: Request, thread: TracedThread, *, is_traced: bool) -> Fix | None:
    if thread.pid is None:
        return None
    if not is_traced:
        command = remedies.again(request.program, request.cluster, "trace", "blocked")
        return Fix(text="show what all ranks wait for; this needs no strace", commands=(command,))
    if thread.kind is Kind.STOPPED:
        return remedies.resume([(thread.host, thread.pid)])
    command = remedies.again(request.program, request.cluster, "pyspy-all", "--pid", str(thread.pid))
    return Fix(text=f"show where in the program {name_process(thread)} is, while it is running", commands=(command,))


def all_asleep(request: Request, threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Report each job in which no rank is running, where the calls do not show which rank waits for which.

    diagnosis/outliers cannot decide here: it needs to know which ranks are in communication, and a system call alone
    does not show that.
    """
    jobs = by_key((thread.job, thread) for thread in threads if thread.main and thread.rank is not None)
    for name, ranks in jobs.items():
        if len(ranks) < _FEWEST_RANKS or not all(map(_rests, ranks)):
            continue
        least_s = min(thread.blocked_s or thread.span_s for thread in ranks)
        job = name if len(jobs) > 1 else ""
        options = ("--job", shlex.quote(job)) if job else ()
        found = verdicts.finding(
            "all-blocked",
            job=job,
            ranks=len(ranks),
            least=format_duration(least_s),
            command=" ".join([request.program, "pyspy-all", *options]),
            where=where_of(ranks),
        )
        live = any(thread.pid is not None for thread in ranks)
        yield found if live or found.fix is None else replace(found, fix=replace(found.fix, commands=()))


def _rests(thread: TracedThread) -> bool:
    """Return whether a thread has been blocked for long, or during the whole trace.

    Attaching strace restarts some calls and so the kernel's clock of the wait: a thread traced just before does not
    count as blocked for long.
    """
    return (thread.blocked_s or 0.0) > _LONG_S or (thread.idle and thread.span_s >= _WINDOW_S)


def errors(threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Report the errors that matter, the same error of several threads together."""
    logged = ((thread, error) for thread in threads if thread.log is not None for error in thread.log.errors)
    for name, rows in by_key((row[1].error, row) for row in logged if _matters(row[1])).items():
        first, count = rows[0][1], sum(error.count for _, error in rows)
        evidence = tuple(
            f"{name_thread(thread)}: {error.name}{f' {error.target}' if error.target else ''}: {error.error}"
            + (f", {error.count} times" if error.count > 1 else "")
            for thread, error in rows[:_SHOWN]
        )
        yield verdicts.finding(
            name,
            who=name_processes(thread for thread, _ in rows),
            times="once" if count == 1 else f"{count} times",
            call=first.name,
            target=first.target,
            paths=listed(list(dict.fromkeys(error.target for _, error in rows))),
            folder=shlex.quote(first.target.rpartition("/")[0] or "/") if first.target.startswith("/") else ".",
            where=where_of(thread for thread, _ in rows),
            evidence=evidence if len(rows) > 1 else (),
        )


def _matters(error: CallError) -> bool:
    name, target = error.error, error.target
    if name == "ENOENT":
        return error.weight == 6
    if name == "ECONNREFUSED" and (error.count < _REPEATED or target.startswith("/")):
        return False
    if name == "EACCES" and (not target.startswith("/") or target.startswith(_NO_STORAGE)):
        return False
    return verdicts.exists(name) and (name != "ETIMEDOUT" or error.weight > 1)


def slow_storage(threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Name the parts of the file tree that took a large part of the time."""
    places = ((thread, place) for thread in threads if thread.log is not None for place in thread.log.places)
    for folder, rows in by_key((row[1].name, row) for row in places if _is_slow(*row)).items():
        slowest, most = max(rows, key=lambda row: _share(*row))
        longest = max((place for _, place in rows), key=lambda place: place.slowest_s)
        yield verdicts.finding(
            "slow-storage",
            who=name_processes(thread for thread, _ in rows),
            folder=folder,
            share=f"{_share(slowest, most):.0%}",
            of=name_thread(slowest) if len(rows) > 1 else "",
            longest=format_duration(longest.slowest_s),
            call=longest.slowest,
            quoted=shlex.quote(folder),
            where=where_of(thread for thread, _ in rows),
        )


def _is_slow(thread: TracedThread, place: Count) -> bool:
    if not place.name.startswith("/") or place.name.startswith(_NO_STORAGE):
        return False
    return place.slowest_s > _SLOW_S or (_share(thread, place) > _SLOW_SHARE and place.slow >= _SLOW_COUNT)


def _share(thread: TracedThread, place: Count) -> float:
    return place.time_s / thread.span_s if thread.span_s else 0.0


def spins(request: Request, threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Report the threads that busy-wait."""
    logged = ((thread, spin) for thread in threads if thread.log is not None for spin in thread.log.spins)
    for (name, target), rows in by_key(((row[1].name, row[1].target), row) for row in logged).items():
        most, spin = max(rows, key=lambda row: row[1].count)
        options = ("--pid", str(most.pid)) if most.pid is not None else ()
        yield verdicts.finding(
            "busy-wait",
            who=name_thread(most) + (f", and {len(rows) - 1} more threads" if len(rows) > 1 else ""),
            s="s" if len(rows) == 1 else "",
            count=spin.count,
            call=name,
            target=target,
            per_s=f"{spin.per_s:.0f}",
            command=" ".join([request.program, "pyspy-all", *options]),
            level=Level.INFO if name == "sched_yield" else Level.WARN,
            where=where_of(thread for thread, _ in rows),
        )


def polls(threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Report the paths that main threads poll for, sleeping in between."""
    logged = ((thread, poll) for thread in threads if thread.log is not None for poll in thread.log.polls)
    waited = ((thread, poll) for thread, poll in logged if thread.main and poll.slept_s >= _ASLEEP * thread.span_s)
    for (path, exists), rows in by_key(((row[1].target, row[1].exists), row) for row in waited).items():
        most, poll = max(rows, key=lambda row: row[1].tries)
        yield verdicts.finding(
            "polled-lock" if exists else "polled-missing",
            who=name_processes(thread for thread, _ in rows),
            s="s" if len(rows) == 1 else "",
            path=path,
            tries=poll.tries,
            span=format_duration(most.span_s),
            quoted=shlex.quote(path if exists else path.rpartition("/")[0] or "/"),
            where=where_of(thread for thread, _ in rows),
        )


def cut(threads: Sequence[TracedThread], why: str) -> list[Finding]:
    """Report the logs of these threads as incomplete."""
    if not threads:
        return []
    names = listed([f"rank {each.rank}" if each.rank is not None else f"pid {each.pid}" for each in threads])
    span = format_duration(max(thread.span_s for thread in threads))
    return [verdicts.finding("log-cut", names=names, span=span, why=why)]


def left(traced: Mapping[Key, Traced], attached: Mapping[Key, Attached], index: ProcessIndex) -> Iterator[Finding]:
    """Report the processes that strace left stopped or traced."""
    for key, process in traced.items():
        before = attached.get(key)
        was_stopped = before is not None and before.state in STOPPED
        if process.tracer or (process.state in STOPPED and not was_stopped):
            yield verdicts.finding(
                "left-stopped",
                who=index.name(key, whole=True),
                by=f"traced by pid {process.tracer}" if process.tracer else "stopped",
                host=key[0],
                pid=key[1],
                where=Where(hosts=(key[0],), pids=(key[1],)),
            )


def refused(
    request: Request, chosen: Sequence[Chosen], attached: Mapping[Key, Attached], node: Processes | None
) -> Iterator[Finding]:
    """Report the processes that strace was not attached to, why, and how to fix it."""
    asked: dict[str, int] = defaultdict(int)
    refusals: list[tuple[tuple[str, str, str], Chosen]] = []
    for each in chosen:
        if each.process is None or each.process.state in ENDED:
            reason = "exited" if each.process is not None else "no process, exited or not started yet"
            refusals.append((("gone", reason, ""), each))
            continue
        asked[each.host] += 1
        before = attached.get((each.host, each.process.pid))
        if before is not None and before.why:
            words = f"pid {before.tracer} ({before.words})" if before.why == "traced" else before.words
            words = "exited" if before.why == "gone" else words
            refusals.append(((before.why, words, each.host if before.why in ("no-strace", "failed") else ""), each))
        elif before is None and asked[each.host] > MAX_PROCESSES:
            refusals.append((("too-many", "", ""), each))
    for (why, words, host), group in by_key(refusals).items():
        pids = tuple(each.process.pid for each in group if each.process is not None)
        options = [word for pid in pids[:_SHOWN] for word in ("--pid", str(pid))]
        theirs = {each.process.user for each in group if each.process is not None}
        rights = remedies.right_to_read(" ".join([request.program, "trace sys", *options]), node, theirs)
        found = verdicts.finding(
            f"not-attached-{why}",
            who=listed(list(map(_short_name, group))),
            host=host,
            were="was" if len(group) == 1 else "were",
            reason=words,
            most=MAX_PROCESSES,
            rights=rights.text,
            instead=remedies.again(request.program, request.cluster, "trace", "blocked", *options),
            where=Where(
                hosts=tuple(dict.fromkeys(each.host for each in group)),
                ranks=tuple(each.rank for each in group if each.rank is not None),
                pids=pids,
            ),
        )
        if why == "denied" and found.fix is not None:
            found = replace(found, fix=replace(found.fix, commands=(*rights.commands, *found.fix.commands)))
        yield found


def _short_name(chosen: Chosen) -> str:
    if chosen.rank is not None or chosen.process is None:
        return f"rank {chosen.rank}"
    return f"pid {chosen.process.pid}"
