"""The findings of trace sys: blocked ranks, errors, slow storage, busy-waits, what was not traced. Pure."""

from __future__ import annotations

import shlex
from collections import defaultdict
from typing import TYPE_CHECKING

from distdiag.commands.trace.sys.types import MAX_LOG_BYTES, MAX_PROCESSES
from distdiag.commands.trace.sys.wording import (
    format_duration,
    format_range,
    name_process,
    name_processes,
    name_thread,
    where_of,
)
from distdiag.diagnosis import remedies
from distdiag.diagnosis.wait_graph import find_roots
from distdiag.diagnosis.wait_reasons import Kind
from distdiag.facts import syscall_names
from distdiag.facts.machine import STOPPED
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.commands.trace.sys.collect import Attached, Traced
    from distdiag.commands.trace.sys.types import Log, Refused, Request, TracedThread
    from distdiag.diagnosis.process_index import Key, ProcessIndex
    from distdiag.facts.strace.types import CallError, Poll, Spin
    from distdiag.jobs.collect import Processes

_LONG_S = 5.0
"""A thread that has not run for so long counts as stuck; less may be a training step."""
_SHORT_S = 1.0
"""Shorter waits are not reported."""
_WAITS = (Kind.PEER, Kind.LOCK, Kind.NETWORK, Kind.FILE, Kind.STORAGE, Kind.STOPPED)
_ANY_OF = (*syscall_names.POLLS, *syscall_names.SELECTS, *syscall_names.EPOLLS)
_SENTENCES = 4
_FEWEST_RANKS, _WINDOW_S = 2, 1.0
_SLOW_SHARE, _SLOW_S, _SLOW_COUNT = 0.3, 1.0, 3
_NO_STORAGE = ("/dev", "/proc", "/sys")
_SHOWN = 5
_REFUSALS = {
    "no-strace": "strace is not installed",
    "traced": "another program is already tracing it",
    "kernel": "one of its threads is stuck in the kernel (D), where strace could not detach",
    "denied": "permission denied",
    "gone": "it has exited",
    "failed": "strace failed",
    "too-many": f"at most {MAX_PROCESSES} processes per node are traced at a time",
}
_REPEATED = 3
_ASLEEP = 0.5
"""A thread that sleeps less of the time between its tries has other work, too."""
# What an error means, how to fix it, and commands.
_GRAVE: dict[str, tuple[str, ...]] = {
    "ENOSPC": ("no space left on device", "free some space, or write elsewhere", "df -h {folder}", "df -i {folder}"),
    "EDQUOT": ("disk quota exceeded", "remove files, or ask for a higher quota", "quota -s", "df -h {folder}"),
    "EIO": ("I/O error of the disk or file server", "read the kernel log", "dmesg -T | tail -n 30"),
    "ESTALE": (
        "stale file handle: the file is gone on the file server",
        "remount it, or restart the job",
        "df {folder}",
    ),
    "EMFILE": (
        "too many open files in the process",
        "show what it has open (trace fds); close files, use fewer DataLoader workers, or raise the limit",
        "ulimit -n 65536",
    ),
    "ENFILE": ("too many open files on the host", "raise the limit", "sysctl fs.file-max fs.file-nr"),
    "EUCLEAN": ("the file system is corrupted", "read the kernel log", "dmesg -T | tail -n 30"),
}
_WARNED: dict[str, tuple[str, ...]] = {
    "EROFS": ("the file system is read-only", "write elsewhere"),
    "ENOMEM": ("out of memory", "check `free -m`, the limits of the cgroup, and ulimit -v and -l"),
    "ECONNREFUSED": (
        "no process listens there",
        "check that this rank or service is running, and its address and port",
    ),
    "EHOSTUNREACH": ("no route to host", "check the route to it, and that its network is up"),
    "ENETUNREACH": ("network unreachable", "check `ip route`, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"),
    "ETIMEDOUT": ("no answer", "check that it is running, and whether a firewall drops the packets"),
    "ECONNRESET": ("connection reset by the peer", "read the log of that rank: it exited or crashed first"),
    "EPIPE": ("the peer has closed the connection", "read the log of that rank: it exited or crashed first"),
    "EADDRINUSE": ("address already in use", "find the process: ss -tlnp; or use another port"),
    "EADDRNOTAVAIL": ("not an address of this host", "check MASTER_ADDR and the host names"),
    "EACCES": ("permission denied", "check the permissions of the file and of the directories above it: namei -l PATH"),
}


def blocked(request: Request, threads: Sequence[TracedThread]) -> list[Finding]:
    """Report the blocked processes, those with the same root together."""
    stuck = {thread.key: thread for thread in _stuck(threads)}
    mains = {thread.key: thread for thread in threads if thread.is_main}
    by_root: dict[Key, list[TracedThread]] = {}
    roots = find_roots({key: thread.peers[0] for key, thread in stuck.items() if len(thread.peers) == 1})
    for thread in stuck.values():
        by_root.setdefault(roots.get(thread.key, thread.key), []).append(thread)
    return [_blocked(request, root, group, mains.get(root)) for root, group in by_root.items()]


def _stuck(threads: Sequence[TracedThread]) -> Iterator[TracedThread]:
    """List for each process the thread that it is blocked in: its main thread, or the thread that this may wait for."""
    others: dict[Key, list[TracedThread]] = {}
    for thread in threads:
        if not thread.is_main and _is_long(thread) and thread.kind is Kind.PEER and thread.call not in _ANY_OF:
            others.setdefault(thread.key, []).append(thread)
    for main in threads:
        if not main.is_main or not _is_long(main):
            continue
        if main.kind in _WAITS:
            yield main
        elif main.kind is Kind.OWN_THREADS and len(others.get(main.key, ())) == 1:
            yield others[main.key][0]


def _is_long(thread: TracedThread) -> bool:
    return thread.kind is Kind.STOPPED or (thread.blocked_s is not None and thread.blocked_s >= _SHORT_S)


def _blocked(request: Request, root: Key, group: list[TracedThread], end: TracedThread | None) -> Finding:
    """Return the finding on the processes that wait for `root`; `end`: its main thread, if it was traced."""
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
        sentences.append(
            "its process was not traced" if len(waiters[0].peers) == 1 else "their processes were not traced"
        )
    members = list({thread.key: thread for thread in [*group, *([end] if end is not None else [])]}.values())
    goes_on = end is not None and not end.idle and not in_cycle and end.kind in (Kind.RUNS, Kind.OWN_THREADS)
    long = any(thread.kind is Kind.STOPPED or (thread.blocked_s or 0.0) > _LONG_S for thread in group)
    return Finding(
        id="trace.blocked",
        level=Level.FAIL if long and not goes_on else Level.WARN,
        title="; ".join(sentences),
        where=where_of(members),
        evidence=tuple(_last_call(thread) for thread in group[:_SENTENCES] if thread.kind is not Kind.STOPPED),
        fix=_fix_blocked(request, end if end is not None else group[0], is_traced=end is not None),
    )


def _sentences(waiters: Sequence[TracedThread]) -> list[str]:
    groups: dict[tuple[str, object], list[TracedThread]] = {}
    for thread in waiters:
        call = thread.call if thread.kind is not Kind.STOPPED else ""
        groups.setdefault((call, thread.peers or thread.on), []).append(thread)
    found = []
    for group in list(groups.values())[:_SENTENCES]:
        first, has = group[0], "has" if len(group) == 1 else "have"
        name = name_processes(group) if len(group) > 1 or first.is_main else name_thread(first)
        if first.kind is Kind.STOPPED:
            found.append(f"{name} {'is' if len(group) == 1 else 'are'} {first.on}")
            continue
        on = first.on if len(group) == 1 else first.on.rpartition(" = ")[2]
        since = format_range([thread.blocked_s for thread in group])
        found.append(f"{name} {has} been blocked for {since} in {first.call} on {on}")
    rest = sum(map(len, list(groups.values())[_SENTENCES:]))
    return [*found, *([f"{rest} more are blocked"] if rest else [])]


def _does(thread: TracedThread) -> str:
    """Return what the root does, as the end of a sentence."""
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
    typed = [part for name, value in request.cluster.typed() for part in (name, shlex.quote(value))]
    if is_traced and thread.kind is Kind.STOPPED:
        host = f"on {thread.host}, " if thread.host else ""
        return Fix(text=f"{host}resume it and find out what stopped it", commands=(f"kill -CONT {thread.pid}",))
    if is_traced:
        command = " ".join([request.program, "pyspy-all", "--pid", str(thread.pid), *typed])
        return Fix(
            text=f"show where in the program {name_process(thread)} is, while it is running", commands=(command,)
        )
    command = " ".join([request.program, "trace", "blocked", *typed])
    return Fix(text="show what all ranks wait for; this needs no strace", commands=(command,))


def all_asleep(request: Request, threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Report each job in which no rank is running, where the calls do not show which rank waits for which.

    diagnosis/outliers has no say here: it needs to know which ranks are in communication, and a system call alone does
    not show that.
    """
    jobs: dict[str, list[TracedThread]] = {}
    for thread in threads:
        if thread.is_main and thread.rank is not None:
            jobs.setdefault(thread.job, []).append(thread)
    for name, ranks in jobs.items():
        if len(ranks) < _FEWEST_RANKS or not all(map(_rests, ranks)):
            continue
        least_s = min(thread.blocked_s or thread.span_s for thread in ranks)
        title = f"the main threads of all {len(ranks)} ranks have been blocked for {format_duration(least_s)} or more"
        live = any(thread.pid is not None for thread in ranks)
        command = f"{request.program} pyspy-all" + (f" --job {shlex.quote(name)}" if len(jobs) > 1 else "")
        yield Finding(
            id="trace.all-blocked",
            level=Level.UNKNOWN,
            title=f"job {name}: {title}" if len(jobs) > 1 else title,
            detail="System calls alone do not show which rank waits for which: in a collective, a rank waits for its "
            "own threads.",
            where=where_of(ranks),
            fix=Fix(text="show their stacks", commands=(command,) if live else ()),
        )


def _rests(thread: TracedThread) -> bool:
    """Return whether a thread has been blocked for long, or all the time that it was traced.

    Attaching strace restarts some calls, and the kernel's clock of them: a thread that was traced just before does not
    count as blocked for long.
    """
    return (thread.blocked_s or 0.0) > _LONG_S or (thread.idle and thread.span_s >= _WINDOW_S)


def errors(threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Report the errors that matter, the same error of several threads together."""
    groups: dict[tuple[str, Level], list[tuple[TracedThread, CallError]]] = defaultdict(list)
    for thread in threads:
        for error in thread.log.errors if thread.log is not None else ():
            level = _level(error)
            if level is not None:
                groups[error.error, level].append((thread, error))
    for (name, level), rows in groups.items():
        yield _error(name, level, rows)


def _level(error: CallError) -> Level | None:
    name, target = error.error, error.target
    if name in _GRAVE:
        return Level.FAIL
    if name == "ENOENT":
        return Level.INFO if error.weight == 6 else None
    if name == "ECONNREFUSED" and (error.count < _REPEATED or target.startswith("/")):
        return None
    if name == "EACCES" and (not target.startswith("/") or target.startswith(_NO_STORAGE)):
        return None
    if name == "ETIMEDOUT" and error.weight == 1:
        return None
    return Level.WARN if name in _WARNED else None


def _error(name: str, level: Level, rows: list[tuple[TracedThread, CallError]]) -> Finding:
    first = rows[0][1]
    count = sum(error.count for _, error in rows)
    processes = name_processes(thread for thread, _ in rows)
    if name == "ENOENT":
        paths = list(dict.fromkeys(error.target for _, error in rows))
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        title = f"{processes} did not find {', '.join(paths[:_SHOWN])}{more}"
        fix = Fix(text="nothing, if the job works without it; else install it, or add its directory to LD_LIBRARY_PATH")
    else:
        means, text, *commands = _GRAVE[name] if name in _GRAVE else _WARNED[name]
        on = f" on {first.target}" if first.target else ""
        times = "once" if count == 1 else f"{count} times"
        title = f"{processes} got {name} {times}: {first.name}{on}: {means}"
        folder = shlex.quote(first.target.rpartition("/")[0] or "/") if first.target.startswith("/") else "."
        fix = Fix(text=text, commands=tuple(command.format(folder=folder) for command in commands))
    evidence = [
        f"{name_thread(thread)}: {error.name}{f' {error.target}' if error.target else ''}: {error.error}"
        + (f", {error.count} times" if error.count > 1 else "")
        for thread, error in rows[:_SHOWN]
    ]
    return Finding(
        id=f"trace.error-{name.lower()}",
        level=level,
        title=title,
        where=where_of(thread for thread, _ in rows),
        evidence=tuple(evidence) if len(rows) > 1 else (),
        fix=fix,
    )


def slow_storage(threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Name the parts of the file tree that took a large part of the time."""
    by_place: dict[str, list[tuple[TracedThread, float, float]]] = defaultdict(list)
    for thread in threads:
        for place in thread.log.places if thread.log is not None else ():
            if not place.where.startswith("/") or place.where.startswith(_NO_STORAGE):
                continue
            share = place.time_s / thread.span_s if thread.span_s else 0.0
            if place.slowest_s > _SLOW_S or (share > _SLOW_SHARE and place.slow >= _SLOW_COUNT):
                by_place[place.where].append((thread, share, place.slowest_s))
    for folder, rows in by_place.items():
        yield _slow_place(folder, rows)


def _slow_place(folder: str, rows: list[tuple[TracedThread, float, float]]) -> Finding:
    slowest, share, _ = max(rows, key=lambda row: row[1])
    title = (
        f"{name_processes(thread for thread, _, _ in rows)}: calls on {folder} took {share:.0%} of the time"
        f"{' of ' + name_thread(slowest) if len(rows) > 1 else ''}; the slowest one "
        f"{format_duration(max(row[2] for row in rows))}"
    )
    evidence = tuple(
        f"{call.name} {call.target}: {format_duration(call.time_s)}"
        for call in (slowest.log.slowest if slowest.log is not None else ())
        if call.target.startswith(folder)
    )[:_SHOWN]
    quoted = shlex.quote(folder)
    return Finding(
        id="trace.slow-storage",
        level=Level.WARN,
        title=title,
        where=where_of(thread for thread, _, _ in rows),
        evidence=evidence,
        fix=Fix(
            text="check which file system this is and what else uses it; copy the data to a local disk, or read it "
            "with more workers",
            commands=(f"df -hT {quoted}", f"timeout 10 ls -f {quoted} | head -n 3"),
        ),
    )


def spins(request: Request, threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Report the threads that busy-wait."""
    groups: dict[tuple[str, str], list[tuple[TracedThread, Spin]]] = defaultdict(list)
    for thread in threads:
        for spin in thread.log.spins if thread.log is not None else ():
            groups[spin.name, spin.target].append((thread, spin))
    for (name, target), rows in groups.items():
        most, spin = max(rows, key=lambda row: row[1].count)
        others = f", and {len(rows) - 1} more threads" if len(rows) > 1 else ""
        on = f" on {target}" if target else ""
        pid = f" --pid {most.pid}" if most.pid is not None else ""
        yield Finding(
            id="trace.busy-wait",
            level=Level.INFO if name == "sched_yield" else Level.WARN,
            title=f"{name_thread(most)}{others} busy-wait{'' if others else 's'}: {spin.count} calls to {name}{on} "
            f"without success, {spin.per_s:.0f} times a second",
            where=where_of(thread for thread, _ in rows),
            fix=Fix(text="show which thread of the program that is", commands=(f"{request.program} pyspy-all{pid}",)),
        )


def polls(threads: Sequence[TracedThread]) -> Iterator[Finding]:
    """Report the paths that main threads wait for, asleep between their tries."""
    groups: dict[tuple[str, bool], list[tuple[TracedThread, Poll]]] = defaultdict(list)
    for thread in threads:
        for poll in thread.log.polls if thread.log is not None and thread.is_main else ():
            if poll.slept_s >= _ASLEEP * thread.span_s:
                groups[poll.target, poll.exists].append((thread, poll))
    for (path, exists), rows in groups.items():
        most, poll = max(rows, key=lambda row: row[1].tries)
        s = "s" if len(rows) == 1 else ""
        waits = (
            f"wait{s} for {path} to be removed: it still exists"
            if exists
            else f"poll{s} for {path}, which does not exist"
        )
        yield Finding(
            id="trace.polled-path",
            level=Level.WARN,
            title=f"{name_processes(thread for thread, _ in rows)} {waits} "
            f"({poll.tries} of {poll.tries} tries in {format_duration(most.span_s)})",
            where=where_of(thread for thread, _ in rows),
            fix=Fix(
                text="find the process that has this lock; if it was killed, remove the file"
                if exists
                else "find out which process should make it, and whether it failed or wrote elsewhere",
                commands=(
                    f"ls -l {shlex.quote(path)}" if exists else f"ls -ld {shlex.quote(path.rpartition('/')[0] or '/')}",
                ),
            ),
        )


def cut(logs: Sequence[Log]) -> Iterator[Finding]:
    """Report the logs that are incomplete."""
    full = [log for log in logs if log.cut]
    if full:
        names = ", ".join(map(_name_log, full[:_SHOWN])) + (" ..." if len(full) > _SHOWN else "")
        longest = format_duration(max(log.span_s for log in full))
        why = (
            f"the limit of {MAX_LOG_BYTES >> 20} MiB of logs per node was reached"
            if not full[0].path
            else "its end is missing"
        )
        yield Finding(
            id="trace.log-cut",
            level=Level.WARN,
            title=f"the log of {names} ends early, after {longest}: {why}",
            fix=Fix(text="trace fewer processes, for a shorter time, or only some calls: --only network"),
        )
    for log in logs:
        if log.unread:
            yield Finding(
                id="trace.log-unread",
                level=Level.INFO if "lines are not" in log.unread else Level.UNKNOWN,
                title=f"{log.path or _name_log(log)}: {log.unread}",
            )


def _name_log(log: Log) -> str:
    return f"rank {log.rank}" if log.rank is not None else log.path or f"pid {log.pid}"


def left(traced: Mapping[Key, Traced], attached: Mapping[Key, Attached], index: ProcessIndex) -> Iterator[Finding]:
    """Report the processes that strace left stopped or traced, that exited meanwhile, or that were stopped before."""
    wrong = [key for key, process in traced.items() if process.tracer or _was_stopped(process, attached.get(key))]
    for key in wrong:
        by = f"traced by pid {traced[key].tracer}" if traced[key].tracer else "stopped"
        yield Finding(
            id="trace.left-stopped",
            level=Level.FAIL,
            title=f"{index.name(key, whole=True)} was left {by} after tracing",
            where=Where(hosts=(key[0],), pids=(key[1],)),
            fix=Fix(text=f"on {key[0]}, resume it", commands=(f"kill -CONT {key[1]}",)),
        )
    gone = [key for key, process in traced.items() if not process.state]
    if gone:
        exited = " and ".join(index.name(key, whole=True) for key in gone[:_SHOWN])
        yield Finding(
            id="trace.exited-while-traced", level=Level.INFO, title=f"{exited} exited while strace was attached"
        )
    still = [key for key, process in traced.items() if process.state in STOPPED and key not in wrong]
    if still:
        name = index.name(still[0], whole=True) if len(still) == 1 else f"{len(still)} processes"
        are = "is" if len(still) == 1 else "are"
        yield Finding(
            id="trace.left-as-found", level=Level.INFO, title=f"{name} {are} stopped, as before strace attached"
        )


def _was_stopped(process: Traced, before: Attached | None) -> bool:
    return process.state in STOPPED and (before is None or before.state not in STOPPED)


def refused(request: Request, rows: Sequence[Refused], node: Processes | None) -> Iterator[Finding]:
    """Report the processes that strace could not attach to, why, and how to fix it."""
    groups: dict[tuple[str, str, str], list[Refused]] = defaultdict(list)
    for row in rows:
        groups[row.why, row.words, row.host if row.why in ("no-strace", "failed") else ""].append(row)
    for (why, words, host), group in groups.items():
        on = f" on {host}" if host else ""
        because = f" ({words})" if words and why in ("failed", "denied") else ""
        because = f": pid {group[0].tracer} ({words})" if why == "traced" else because
        names = ", ".join(f"rank {row.rank}" if row.rank is not None else f"pid {row.pid}" for row in group[:_SHOWN])
        more = f" and {len(group) - _SHOWN} more" if len(group) > _SHOWN else ""
        yield Finding(
            id="trace.not-attached",
            level=Level.UNKNOWN,
            title=f"{names}{more}{on} {'was' if len(group) == 1 else 'were'} not traced: {_REFUSALS[why]}{because}",
            where=Where(
                hosts=tuple(dict.fromkeys(row.host for row in group)),
                ranks=tuple(row.rank for row in group if row.rank is not None),
                pids=tuple(row.pid for row in group),
            ),
            fix=_fix_refused(request, group, why, node),
        )


def _fix_refused(request: Request, group: Sequence[Refused], why: str, node: Processes | None) -> Fix | None:
    if why == "gone":
        return None
    typed = [part for name, value in request.cluster.typed() for part in (name, shlex.quote(value))]
    pids = [word for row in group[:_SHOWN] for word in ("--pid", str(row.pid))]
    instead = " ".join([request.program, "trace", "blocked", *pids, *typed])
    text, commands = "", ()  # type: tuple[str, tuple[str, ...]]
    if why == "no-strace":
        text, commands = "install it", ("sudo apt-get install strace || sudo dnf install strace",)
    elif why == "traced":
        text = "detach that program (quit the debugger or strace)"
    elif why == "denied":
        text, commands = _fix_denied(request, group, node)
    elif why == "too-many":
        text = "trace only some ranks: --rank 0-3"
    show = f"{text}; or show" if text else "show"
    return Fix(text=f"{show} what it is blocked on without strace (last command)", commands=(*commands, instead))


def _fix_denied(request: Request, group: Sequence[Refused], node: Processes | None) -> tuple[str, tuple[str, ...]]:
    scope = node.ptrace_scope if node is not None else None
    if node is not None and node.user == 0:
        return remedies.ptrace_in_container().text, ()
    if scope == 3:
        return (
            "kernel.yama.ptrace_scope is 3: no process can be traced until this host is rebooted with a lower value",
            (),
        )
    pids = " ".join(f"-p {row.pid}" for row in group[:_SHOWN])
    as_root = remedies.as_other_user(f"{request.program} trace sys {pids}")
    if scope in (1, 2):
        allow = "echo 0 | sudo tee /proc/sys/kernel/yama/ptrace_scope"
        return "run it as root, or allow tracing until the next reboot", (*as_root.commands, allow)
    return as_root.text, as_root.commands
