"""Existing strace logs -> their threads, and which waits for which where the logs show both ends."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.trace.sys.types import Log, TracedThread
from distdiag.commands.trace.sys.wording import name_processes, parse_log_name
from distdiag.diagnosis.wait_reasons import Kind
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts import syscall_names
from distdiag.facts.strace import targets
from distdiag.facts.strace.log import read_logs
from distdiag.facts.strace.types import WAITING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distdiag.diagnosis.process_index import Key
    from distdiag.facts.strace.types import ThreadLog

    Owner = tuple[int | None, str, int | None]
    """Rank, host, and process."""

_TID = re.compile(r"\.(\d{1,7})$")
_MAX_PEERS = 16
"""Processes named at the other end of one pipe or socket."""
_WAITS_FOR_CHILD = ("wait4", "waitid", "waitpid")
_HOW = "to trace a job: strace -f -ff -ttt -T -yy -o DIR/trace -- COMMAND; then: distdiag trace sys DIR"


def read(paths: Sequence[str]) -> tuple[list[TracedThread], list[Log]]:
    """Read logs that `strace -ttt -T -yy` wrote.

    Args:
        paths: files and folders.

    Raises:
        UsageError: there is no such file.
        DistdiagError: none of them can be read.
    """
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(f"{path}: no such file or directory", hint=_HOW)
    found = read_logs(paths)
    if not found.threads:
        why = "; ".join(f"{path}: {words}" for path, words in found.errors[:3])
        raise DistdiagError(f"no strace log could be read: {why}", hint=_HOW)
    owners = {log.path: parse_log_name(os.path.basename(log.path)) for log in found.threads}
    threads = _with_peers(list(_threads(found.threads, owners)))
    unread = (
        Log(host="", rank=None, pid=None, path=path, size_bytes=0, span_s=0.0, unread=why) for path, why in found.errors
    )
    return sorted(threads, key=_order), [*_logs(found.threads, owners), *unread]


def _order(thread: TracedThread) -> tuple[bool, int, str, int, bool, int]:
    rank = thread.rank
    return rank is None, rank or 0, thread.host, thread.pid or 0, not thread.is_main, thread.tid or 0


def _threads(logs: Sequence[ThreadLog], owners: Mapping[str, Owner]) -> Iterator[TracedThread]:
    mains = _mains(logs)
    for log in logs:
        rank, host, pid = owners[log.path]
        span_s = (log.last_at_s or 0.0) - (log.first_at_s or 0.0) + (log.blocked_s or 0.0)
        thread = TracedThread(
            host=host,
            rank=rank,
            pid=log.pid if log.pid is not None else pid,
            tid=log.tid,
            comm=log.comm,
            is_main=id(log) in mains,
            log=log,
            span_s=max(0.0, span_s),
            kind=Kind.ENDED if log.state.startswith(("exited", "killed")) else Kind.RUNS,
        )
        yield _waiting(thread, log) if log.state in WAITING and log.last is not None else thread


def _mains(logs: Iterable[ThreadLog]) -> set[int]:
    """Choose the main thread of each process (by identity): it has the process's id, or is the first of its log."""
    groups: dict[tuple[str, int | None], list[ThreadLog]] = defaultdict(list)
    for log in logs:
        groups[_TID.sub("", log.path), log.pid].append(log)
    return {
        id(next((log for log in group if log.tid == log.pid), min(group, key=lambda log: log.tid or 0)))
        for group in groups.values()
    }


def _waiting(thread: TracedThread, log: ThreadLog) -> TracedThread:
    """Add what the thread waits for, from the name and target of its last call."""
    assert log.last is not None
    call, target = log.last.name, log.last.target
    kind, on = Kind.KERNEL, target or "unknown"
    if call in syscall_names.SLEEPS:
        kind, on = Kind.SLEEP, "a sleep"
    elif call.startswith("futex") or target.startswith("anon_inode:[eventfd"):
        kind, on = Kind.OWN_THREADS, "another of its threads"
    elif call in _WAITS_FOR_CHILD:
        kind, on = Kind.CHILD, "a child"
    elif "[" in target or (target and not target.startswith("/")):
        kind, on = Kind.NETWORK, f"{_far_end(target)}, peer in no log"
    elif target.startswith("/"):
        kind = Kind.FILE
    does = f"is in {call}" + (f" on {on}" if on != "unknown" else "")
    return replace(thread, kind=kind, call=call, on=on, does=does, blocked_s=log.blocked_s, idle=log.n_calls == 0)


def _with_peers(threads: Sequence[TracedThread]) -> list[TracedThread]:
    """Add the processes at the other ends of what threads are blocked on, found in the other logs."""
    mains = {thread.key: thread for thread in threads if thread.is_main}
    owners: dict[str, dict[Key, TracedThread]] = defaultdict(dict)
    for thread in threads:
        for end in thread.log.ends if thread.log is not None else ():
            if len(owners[end]) <= _MAX_PEERS:
                owners[end].setdefault(thread.key, mains.get(thread.key, thread))
    return [_with_peer(thread, owners) if thread.kind is Kind.NETWORK else thread for thread in threads]


def _with_peer(thread: TracedThread, owners: Mapping[str, Mapping[Key, TracedThread]]) -> TracedThread:
    target = thread.log.last.target if thread.log is not None and thread.log.last is not None else ""
    pair = targets.pair(target)
    mentions: tuple[str, ...] = (target.removesuffix("]"),) if target.startswith("pipe:[") else ()
    if pair is not None:
        kind, near, far = pair
        # The connection as its other end has it, or the socket that listens there.
        mentions = tuple(f"{kind}:[{end}".removesuffix("]") for end in (f"{far}->{near}", far))
    others = _others(thread, mentions, owners)
    if not others and pair is not None:
        # The log of the process that connected may show the address alone; several may have connected to it.
        connected = _others(thread, (f"->{pair[1]}",), owners)
        others = connected if len(connected) == 1 else []
    if not others:
        return thread
    first = others[0]
    plain = first.rank is not None and first.host == thread.host
    name = f"rank {first.rank}" if plain else name_processes([first])
    return replace(
        thread,
        kind=Kind.PEER,
        on=f"{_far_end(target)} = {name}",
        peers=tuple(other.key for other in others),
        ranks=tuple(sorted({other.rank for other in others if other.rank is not None})),
    )


def _others(
    thread: TracedThread, mentions: Iterable[str], owners: Mapping[str, Mapping[Key, TracedThread]]
) -> list[TracedThread]:
    found = {key: owner for end in mentions for key, owner in owners.get(end, {}).items() if key != thread.key}
    return list(found.values())[:_MAX_PEERS]


def _far_end(target: str) -> str:
    pair = targets.pair(target)
    if pair and pair[0].startswith(("TCP", "UDP")):
        return pair[2]
    kind = target.partition(":[")[0]
    return (
        f"a {'unix socket' if kind.startswith('UNIX') else kind}"
        if kind in ("pipe", "socket") or "UNIX" in kind
        else target
    )


def _logs(threads: Sequence[ThreadLog], owners: Mapping[str, Owner]) -> Iterator[Log]:
    by_path: dict[str, list[ThreadLog]] = defaultdict(list)
    for log in threads:
        by_path[log.path].append(log)
    for path, own in by_path.items():
        rank, host, pid = owners[path]
        times = [at_s for log in own for at_s in (log.first_at_s, log.last_at_s) if at_s is not None]
        n_unread = sum(log.n_unread for log in own)
        yield Log(
            host=host,
            rank=rank,
            pid=pid,
            path=path,
            size_bytes=os.path.getsize(path) if os.path.exists(path) else 0,
            span_s=max(times) - min(times) if times else 0.0,
            cut=any(log.state == "cut" for log in own),
            unread=f"{n_unread} lines are not from strace" if n_unread else "",
        )
