"""The findings of trace sys beside blocked threads and errors: slow places, spins, and what was not seen. Pure."""

from __future__ import annotations

import shlex
from collections import defaultdict
from typing import TYPE_CHECKING

from distdiag.commands.trace.sys.model import MAX_JOB_LOG_BYTES, MAX_LOG_BYTES, MAX_PROCESSES
from distdiag.commands.trace.sys.words import lasting, several, thread, where
from distdiag.node.machine import STOPPED
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.commands.trace.sys.collect import Attached, Traced
    from distdiag.commands.trace.sys.model import Log, Refused, Request, Subject
    from distdiag.commands.trace.who import Key, People
    from distdiag.jobs.collect import Processes
    from distdiag.node.strace.types import Spin

_SLOW_SHARE, _SLOW_S, _SLOW_COUNT = 0.3, 1.0, 3
_NO_STORAGE = ("/dev", "/proc", "/sys")
_SHOWN = 5
_FEWEST_RANKS, _LONG_S, _WINDOW_S = 2, 5.0, 1.0
_REFUSALS = {
    "no-strace": "strace is not installed",
    "traced": "another program traces it already",
    "kernel": "a thread of it stays in the kernel (D), and strace could not leave it again",
    "denied": "it may not be traced",
    "gone": "it has ended",
    "failed": "strace failed",
    "too-many": f"not more than {MAX_PROCESSES} processes of a node are traced at a time",
}


def all_asleep(request: Request, subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Say of each job that no rank of it goes on, where the calls themselves do not tell who waits for whom."""
    jobs: dict[str, list[Subject]] = {}
    for one in subjects:
        if one.is_main and one.rank is not None:
            jobs.setdefault(one.job, []).append(one)
    for name, ranks in jobs.items():
        if len(ranks) < _FEWEST_RANKS or not all(map(_rests, ranks)):
            continue
        least_s = min(one.blocked_s or one.span_s for one in ranks)
        title = f"the main threads of all {len(ranks)} ranks have been blocked for {lasting(least_s)} or more"
        live = any(one.pid is not None for one in ranks)
        command = f"{request.program} pyspy-all" + (f" --job {shlex.quote(name)}" if len(jobs) > 1 else "")
        yield Finding(
            id="trace.all-blocked",
            level=Level.UNKNOWN,
            title=f"job {name}: {title}" if len(jobs) > 1 else title,
            detail="System calls alone do not tell who waits for whom: in a collective a rank waits for its own "
            "threads.",
            where=where(ranks),
            fix=Fix(text="read their stacks", commands=(command,) if live else ()),
        )


def _rests(one: Subject) -> bool:
    """Tell whether a thread has been blocked for long, or all the while that it was traced.

    strace's coming starts some calls again, and the kernel's clock of them with it: who was traced a moment ago has not
    been blocked for long.
    """
    return (one.blocked_s or 0.0) > _LONG_S or (one.idle and one.span_s >= _WINDOW_S)


def slow_storage(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Name the parts of the file tree that took a large part of the time."""
    by_place: dict[str, list[tuple[Subject, float, float]]] = defaultdict(list)
    for one in subjects:
        for place in one.log.places if one.log is not None else ():
            if not place.where.startswith("/") or place.where.startswith(_NO_STORAGE) or place.time_s is None:
                continue
            share = place.time_s / one.span_s if one.span_s else 0.0
            slowest_s = place.slowest_s or 0.0
            if slowest_s > _SLOW_S or (share > _SLOW_SHARE and place.slow >= _SLOW_COUNT):
                by_place[place.where].append((one, share, slowest_s))
    for folder, rows in by_place.items():
        one, share, _ = max(rows, key=lambda row: row[1])
        slowest_s = max(row[2] for row in rows)
        title = (
            f"{several(one for one, _, _ in rows)}: calls on {folder} took {share:.0%} of the time"
            f"{' of ' + thread(one) if len(rows) > 1 else ''}; the slowest one {lasting(slowest_s)}"
        )
        evidence = tuple(
            f"{call.name} {call.target}: {lasting(call.time_s)}"
            for call in (one.log.slowest if one.log is not None else ())
            if call.target.startswith(folder)
        )[:_SHOWN]
        quoted = shlex.quote(folder)
        yield Finding(
            id="trace.slow-storage",
            level=Level.WARN,
            title=title,
            where=where(one for one, _, _ in rows),
            evidence=evidence,
            fix=Fix(
                text="see which file system that is and who else uses it; copy the data to a local disk, or read it "
                "with more workers",
                commands=(f"df -hT {quoted}", f"timeout 10 ls -f {quoted} | head -n 3"),
            ),
        )


def spins(request: Request, subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Name the threads that ask over and over."""
    groups: dict[tuple[str, str], list[tuple[Subject, Spin]]] = defaultdict(list)
    for one in subjects:
        for spin in one.log.spins if one.log is not None else ():
            groups[spin.name, spin.target].append((one, spin))
    for (name, target), rows in groups.items():
        one, spin = max(rows, key=lambda row: row[1].count)
        rate = f", {spin.per_s:.0f} times a second" if spin.per_s else ""
        others = f", and {len(rows) - 1} threads more" if len(rows) > 1 else ""
        on = f" on {target}" if target else ""
        pid = f" --pid {one.pid}" if one.pid is not None else ""
        yield Finding(
            id="trace.spins",
            level=Level.INFO if name == "sched_yield" else Level.WARN,
            title=f"{thread(one)}{others} called {name}{on} {spin.count} times in vain{rate}: a loop that asks instead "
            "of waiting, and takes a processor",
            where=where(one for one, _ in rows),
            fix=Fix(text="see which thread of the program that is", commands=(f"{request.program} pyspy-all{pid}",)),
        )


def cut(logs: Sequence[Log]) -> Iterator[Finding]:
    """Name the logs that do not tell all."""
    full = [log for log in logs if log.cut]
    if full:
        names = ", ".join(_log(log) for log in full[:_SHOWN]) + (" ..." if len(full) > _SHOWN else "")
        spans = max(log.span_s for log in full)
        size = f"{MAX_LOG_BYTES >> 20} MiB of logs of a node were reached" if not full[0].path else "its end is missing"
        yield Finding(
            id="trace.log-cut",
            level=Level.WARN,
            title=f"the log of {names} ends early, after {lasting(spans)}: {size}",
            fix=Fix(text="trace fewer processes, for a shorter time, or only some calls: --only network"),
        )
    for log in logs:
        if log.gap:
            yield Finding(
                id="trace.log-cut",
                level=Level.WARN,
                title=f"the log of {_log(log)} was longer than {MAX_JOB_LOG_BYTES >> 20} MiB: the counts are those of "
                "its beginning and its end",
                fix=Fix(text="trace only some calls: --only network"),
            )
        if log.unread:
            yield Finding(
                id="trace.log-unread",
                level=Level.INFO if "lines of it" in log.unread else Level.UNKNOWN,
                title=f"{log.path or _log(log)}: {log.unread}",
            )


def left(traced: Mapping[Key, Traced], attached: Mapping[Key, Attached], people: People) -> Iterator[Finding]:
    """Name the processes that were not left as they were found; or say that all were."""
    wrong = [key for key, one in traced.items() if one.tracer or _was_stopped(one, attached.get(key))]
    for key in wrong:
        one = traced[key]
        by = f"traced by {one.tracer}" if one.tracer else "stopped"
        yield Finding(
            id="trace.left-stopped",
            level=Level.FAIL,
            title=f"{people.name(key, whole=True)} was not left as it was found: it is {by}",
            where=Where(hosts=(key[0],), pids=(key[1],)),
            fix=Fix(text=f"on {key[0]}, let it go on", commands=(f"kill -CONT {key[1]}",)),
        )
    there = [key for key, one in traced.items() if one.state and key not in wrong]
    gone = [key for key, one in traced.items() if not one.state]
    if gone:
        ended = " and ".join(people.name(key, whole=True) for key in gone[:_SHOWN])
        yield Finding(id="trace.ended", level=Level.INFO, title=f"{ended} ended while strace was attached")
    if there:
        whom = people.name(there[0], whole=True) if len(there) == 1 else f"{len(there)} processes"
        title = f"{whom} {'was' if len(there) == 1 else 'were'} left as found: not stopped, traced by nobody"
        stopped = [key for key in there if traced[key].state in STOPPED]
        title = f"{whom} left as found: stopped before, and stopped now" if len(stopped) == len(there) else title
        yield Finding(id="trace.left-as-found", level=Level.INFO, title=title)


def _was_stopped(one: Traced, before: Attached | None) -> bool:
    return one.state in STOPPED and (before is None or before.state not in STOPPED)


def refused(request: Request, rows: Sequence[Refused], node: Processes | None) -> Iterator[Finding]:
    """Name the processes that strace was not attached to, why, and what helps."""
    groups: dict[tuple[str, str, str], list[Refused]] = defaultdict(list)
    for one in rows:
        groups[one.why, one.words, one.host if one.why in ("no-strace", "failed") else ""].append(one)
    for (why, words, host), group in groups.items():
        ranks = [one.rank for one in group if one.rank is not None]
        on = f" on {host}" if host else ""
        said = f" ({words})" if words and why in ("failed", "denied") else ""
        said = f": pid {group[0].tracer} ({words})" if why == "traced" else said
        names = ", ".join(f"rank {one.rank}" if one.rank is not None else f"pid {one.pid}" for one in group[:_SHOWN])
        more = f" and {len(group) - _SHOWN} more" if len(group) > _SHOWN else ""
        yield Finding(
            id="trace.not-attached",
            level=Level.UNKNOWN,
            title=f"{names}{more}{on} {'was' if len(group) == 1 else 'were'} not traced: {_REFUSALS[why]}{said}",
            where=Where(
                hosts=tuple(dict.fromkeys(one.host for one in group)),
                ranks=tuple(ranks),
                pids=tuple(one.pid for one in group),
            ),
            fix=_remedy(request, group, why, node),
        )


def _remedy(request: Request, group: Sequence[Refused], why: str, node: Processes | None) -> Fix | None:
    if why == "gone":
        return None
    typed = [part for name, value in request.cluster.typed() for part in (name, shlex.quote(value))]
    pids = [word for one in group[:_SHOWN] for word in ("--pid", str(one.pid))]
    instead = " ".join([request.program, "trace", "blocked", *pids, *typed])
    text, commands = "", ()  # type: tuple[str, tuple[str, ...]]
    if why == "no-strace":
        text, commands = "install it", ("sudo apt-get install strace || sudo dnf install strace",)
    elif why == "traced":
        text = "let that program leave it (quit the debugger or strace)"
    elif why == "denied":
        text, commands = _rights(request, group, node)
    elif why == "too-many":
        text = "trace some ranks only: --rank 0-3"
    told = f"{text}; or see" if text else "see"
    return Fix(text=f"{told} without strace what it is blocked on (the last line)", commands=(*commands, instead))


def _rights(request: Request, group: Sequence[Refused], node: Processes | None) -> tuple[str, tuple[str, ...]]:
    as_root = node is not None and node.user == 0
    scope = node.ptrace_scope if node is not None else None
    if as_root:
        return (
            "give the container the right: docker run --cap-add SYS_PTRACE; in Kubernetes "
            "securityContext.capabilities.add: [SYS_PTRACE]",
            (),
        )
    pids = [word for one in group[:_SHOWN] for word in ("-p", str(one.pid))]
    sudo = " ".join(['sudo env "PATH=$PATH"', request.program, "trace", "sys", *pids])
    if scope == 3:
        return "this kernel lets nobody trace another process until it is booted again (ptrace_scope 3)", ()
    if scope in (1, 2):
        return "run it as root, or allow it until the next boot", (
            sudo,
            "echo 0 | sudo tee /proc/sys/kernel/yama/ptrace_scope",
        )
    return "run it as that user, or as root", (sudo,)


def _log(log: Log) -> str:
    if log.rank is not None:
        return f"rank {log.rank}"
    return log.path or f"pid {log.pid}"
