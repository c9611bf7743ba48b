"""Existing strace logs -> threads, and the waits between them if the logs show both ends."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.trace.sys.types import TracedThread, state_of
from distdiag.commands.trace.sys.wording import name_process, parse_log_name
from distdiag.diagnosis.wait_reasons import Kind
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts.process import syscall_names
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


def read(paths: Sequence[str]) -> tuple[list[TracedThread], tuple[tuple[str, str], ...]]:
    """Read logs of `strace -ttt -T -yy`: the threads, and (path, why) of each unreadable file.

    Args:
        paths: files and folders.

    Raises:
        UsageError: a path does not exist.
        DistdiagError: no file can be read.
    """
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(f"{path}: no such file or directory", hint=_HOW)
    found = read_logs(paths)
    if not found.threads:
        why = "; ".join(f"{path}: {words}" for path, words in found.errors[:3])
        raise DistdiagError(f"no strace log could be read: {why}", hint=_HOW)
    owners = {log.path: parse_log_name(os.path.basename(log.path)) for log in found.threads}
    return sorted(_with_peers(list(_threads(found.threads, owners))), key=_order), found.errors


def _order(thread: TracedThread) -> tuple[bool, int, str, int, bool, int]:
    rank = thread.rank
    return rank is None, rank or 0, thread.host, thread.pid or 0, not thread.main, thread.tid or 0


def _threads(logs: Sequence[ThreadLog], owners: Mapping[str, Owner]) -> Iterator[TracedThread]:
    mains = _mains(logs)
    for log in logs:
        rank, host, pid = owners[log.path]
        span_s = (log.last_at_s or 0.0) - (log.first_at_s or 0.0) + (log.blocked_s or 0.0)
        waits = log.state in WAITING and log.last is not None
        thread = TracedThread(
            host=host,
            rank=rank,
            pid=log.pid if log.pid is not None else pid,
            tid=log.tid,
            comm=log.comm,
            main=id(log) in mains,
            state=state_of(log, waits=waits),
            kind=Kind.ENDED if log.state.startswith(("exited", "killed")) else Kind.RUNS,
            span_s=round(max(0.0, span_s), 6),
            n_calls=log.n_calls,
            log=log,
        )
        yield _waiting(thread, log) if waits else thread


def _mains(logs: Iterable[ThreadLog]) -> set[int]:
    """Choose the main thread of each process (by identity): tid equals pid, or the first of its log."""
    groups: dict[tuple[str, int | None], list[ThreadLog]] = defaultdict(list)
    for log in logs:
        groups[_TID.sub("", log.path), log.pid].append(log)
    return {
        id(next((log for log in group if log.tid == log.pid), min(group, key=lambda log: log.tid or 0)))
        for group in groups.values()
    }


def _waiting(thread: TracedThread, log: ThreadLog) -> TracedThread:
    """Add the thread's wait, from the name and target of its last call."""
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
    """Add the processes at the other ends of the threads' waits, found in the other logs."""
    mains = {thread.key: thread for thread in threads if thread.main}
    owners: dict[str, dict[Key, TracedThread]] = defaultdict(dict)
    for thread in threads:
        for end in thread.log.ends if thread.log is not None else ():
            if len(owners[end]) <= _MAX_PEERS:
                owners[end].setdefault(thread.key, mains.get(thread.key, thread))
    found = [_with_peer(thread, owners) if thread.kind is Kind.NETWORK else thread for thread in threads]
    return [replace(thread, log=replace(thread.log, ends=())) if thread.log is not None else thread for thread in found]


def _with_peer(thread: TracedThread, owners: Mapping[str, Mapping[Key, TracedThread]]) -> TracedThread:
    target = thread.log.last.target if thread.log is not None and thread.log.last is not None else ""
    others = _others(thread, target, owners)
    if not others:
        return thread
    plain = others[0].rank is not None and others[0].host == thread.host
    return replace(
        thread,
        kind=Kind.PEER,
        on=f"{_far_end(target)} = {name_process(others[0], whole=not plain)}",
        peers=tuple(other.key for other in others),
        ranks=tuple(sorted({other.rank for other in others if other.rank is not None})),
    )


def _others(
    thread: TracedThread, target: str, owners: Mapping[str, Mapping[Key, TracedThread]]
) -> Sequence[TracedThread]:
    def having(*ends: str) -> list[TracedThread]:
        found = {key: owner for end in ends for key, owner in owners.get(end, {}).items() if key != thread.key}
        return list(found.values())[:_MAX_PEERS]

    pair = targets.pair(target)
    if pair is None:
        return having(target.removesuffix("]")) if target.startswith("pipe:[") else ()
    kind, near, far = pair
    # The connection as its other end has it, or the socket that listens there.
    others = having(*(f"{kind}:[{end}".removesuffix("]") for end in (f"{far}->{near}", far)))
    # The log of the process that connected may show the address alone; several may have connected to it.
    connected = having(f"->{near}")
    return others or (connected if len(connected) == 1 else ())


def _far_end(target: str) -> str:
    pair = targets.pair(target)
    if pair and pair[0].startswith(("TCP", "UDP")):
        return pair[2]
    kind = target.partition(":[")[0]
    return "a unix socket" if "UNIX" in kind else f"a {kind}" if kind in ("pipe", "socket") else target
