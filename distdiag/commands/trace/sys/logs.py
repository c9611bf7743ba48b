"""Existing logs -> the threads in them, and which waits for which, where the logs show both ends."""

from __future__ import annotations

import mmap
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
from distdiag.facts.strace.lines import LINE_BYTES
from distdiag.facts.strace.log import read_logs
from distdiag.facts.strace.types import WAITING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distdiag.diagnosis.process_index import Key
    from distdiag.facts.strace.types import ThreadLog

    Owner = tuple[int | None, str, int | None]
    """Rank, host, and process."""

_PAIR = re.compile(r"([A-Z][\w-]*):\[([^>]+?)->([^,\]]+(?:\]:\d+)?)(?:,.*)?\]")
_TID = re.compile(r"\.(\d{1,7})$")
_PLAIN = ("pipe", "socket")
# Texts of `_other_ends` and `_connects` as they are in a log. Each begins with a rare character, so search is fast.
_END = re.compile(rb"<((?:[A-Z][\w-]{0,20}|pipe):\[(?:[^\s,<>]|(?<=-)>){1,400})>?")
_ADDRESS = re.compile(
    rb'\{sa_family=AF_INET, sin_port=htons\(\d{1,5}\), sin_addr=inet_addr\("[^"\n]{1,100}"\)\}, 16\) = '
    rb"|\{sa_family=AF_INET6, sin6_port=htons\(\d{1,5}\), "
)
_MAX_PEERS = 16
"""More processes at the other end of one pipe or socket are not named."""
_WAITS_FOR_CHILD = ("wait4", "waitid", "waitpid")


def read(paths: Sequence[str], owners: Mapping[str, Owner] | None = None) -> tuple[list[TracedThread], list[Log]]:
    """Read logs of strace, of any version and options.

    Args:
        paths: files and folders.
        owners: whose logs they are, where their names do not say.

    Raises:
        UsageError: there is no such file.
        DistdiagError: none of them is a log of strace.
    """
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(f"--from {path}: no such file or directory", hint="pass files, or a directory of them")
    found = read_logs(paths)
    if not found.threads:
        why = "; ".join(f"{path}: {words}" for path, words in found.errors[:3])
        raise DistdiagError(
            f"no strace log could be read: {why or 'no files'}",
            hint="--from reads the output of strace -o, best with: strace -ff -yy -ttt -T -o FILE",
        )
    by_path = {
        log.path: (owners or {}).get(log.path) or parse_log_name(os.path.basename(log.path)) or (None, "", None)
        for log in found.threads
    }
    threads = _with_peers(list(_threads(found.threads, by_path)))
    unread = (
        Log(host="", rank=None, pid=None, path=path, size_bytes=0, span_s=0.0, unread=why) for path, why in found.errors
    )
    return sorted(threads, key=_order), [*_logs(found.threads, by_path), *unread]


def _order(thread: TracedThread) -> tuple[bool, int, str, int, bool, int]:
    rank = thread.rank
    return rank is None, rank or 0, thread.host, thread.pid or 0, not thread.is_main, thread.tid or 0


def _threads(logs: Iterable[ThreadLog], owners: Mapping[str, Owner]) -> Iterator[TracedThread]:
    mains = _mains(logs)
    for log in logs:
        rank, host, pid = owners[log.path]
        first, last = log.first_at_s, log.last_at_s
        span_s = (last or 0.0) - (first or 0.0) + (log.blocked_s or 0.0) if first is not None else 0.0
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
    """Add what its last call waits for, from its name and what it is about."""
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


def _with_peers(threads: list[TracedThread]) -> list[TracedThread]:
    """Find the other ends of what threads are blocked on, in the other logs."""
    found = _search(threads, _other_ends, _END, most=len(threads))
    # The log of who connects may show the address alone, and others may have connected to it too.
    return _search(found, _connects, _ADDRESS, most=1)


def _search(
    threads: list[TracedThread], texts: Callable[[str], Iterable[bytes]], pattern: re.Pattern[bytes], *, most: int
) -> list[TracedThread]:
    """Add to those that are blocked who mentions these texts, if not more than `most` others do."""
    sought: dict[int, tuple[bytes, ...]] = {}
    for number, thread in enumerate(threads):
        if thread.kind is Kind.NETWORK and thread.log is not None and thread.log.last is not None:
            sought[number] = tuple(texts(thread.log.last.target))
    owners = _owners(threads, {text for some in sought.values() for text in some}, pattern)
    found = list(threads)
    for number, some in sought.items():
        by_key = {key: owner for text in some for key, owner in owners.get(text, {}).items()}
        others = [owner for key, owner in by_key.items() if key != found[number].key]
        if len(others) <= most:
            for owner in others[:_MAX_PEERS]:
                found[number] = _with_peer(found[number], owner)
    return found


def _owners(
    threads: Iterable[TracedThread], sought: set[bytes], pattern: re.Pattern[bytes]
) -> dict[bytes, dict[Key, TracedThread]]:
    """Find for each text the processes in whose logs it is, and not many more than can be named."""
    by_path: dict[str, list[TracedThread]] = defaultdict(list)
    for thread in threads:
        if thread.log is not None:
            by_path[thread.log.path].append(thread)
    found: dict[bytes, dict[Key, TracedThread]] = defaultdict(dict)
    for path, members in by_path.items() if sought else ():
        mains = {thread.key: thread for thread in members if thread.is_main}
        by_tid = {thread.tid: thread for thread in members}
        for text, tid in _mentions(path, sought, pattern):
            owner = by_tid.get(tid, members[0])
            if len(found[text]) <= _MAX_PEERS:
                found[text].setdefault(owner.key, mains.get(owner.key, owner))
    return found


def _other_ends(target: str) -> tuple[bytes, ...]:
    """Return what strace writes of the other end: of a connection that itself, else who listens there."""
    pair = _PAIR.match(target)
    if pair is None:
        return (target.encode(),) if target.startswith("pipe:[") else ()
    kind, near, far = pair.groups()
    return (f"{kind}:[{far}->{near}".encode(), f"{kind}:[{far}]>".encode())


def _connects(target: str) -> tuple[bytes, ...]:
    """Return what strace writes of a call that connects to this end."""
    pair = _PAIR.match(target)
    if pair is None or not pair[1].startswith("TCP"):
        return ()
    address, _, port = pair[2].rpartition(":")
    if address.startswith("["):
        return (f"{{sa_family=AF_INET6, sin6_port=htons({port}), ".encode(),)
    return (f'{{sa_family=AF_INET, sin_port=htons({port}), sin_addr=inet_addr("{address}")}}, 16) = '.encode(),)


def _mentions(path: str, sought: set[bytes], pattern: re.Pattern[bytes]) -> Iterator[tuple[bytes, int | None]]:
    """Find which of these texts are in a log, and on lines of which thread (None: all lines are of the same)."""
    left = set(sought)
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
            for match in pattern.finditer(log):
                end = match[match.lastindex or 0]
                for text in {match[0], end, end.removesuffix(b"]"), end + b">"} & left:
                    left.discard(text)
                    yield text, _tid_at(log, match.start())


def _tid_at(log: mmap.mmap, at: int) -> int | None:
    """Return the thread of the line with this byte; None if lines bear none."""
    start = max(log.rfind(b"\n", max(0, at - LINE_BYTES), at) + 1, at - LINE_BYTES)
    tid = re.match(rb"(?:\[pid +)?(\d{1,7})[ \]<]", log[start : start + 20])
    return int(tid[1]) if tid else None


def _with_peer(thread: TracedThread, owner: TracedThread) -> TracedThread:
    plain = owner.rank is not None and owner.host == thread.host
    name = f"rank {owner.rank}" if plain else name_processes([owner])
    ranks = (owner.rank,) if owner.rank is not None else ()
    target = thread.log.last.target if thread.log is not None and thread.log.last is not None else ""
    on = thread.on if thread.peers else f"{_far_end(target)} = {name}"
    peers = (*thread.peers, owner.key)
    return replace(thread, kind=Kind.PEER, on=on, peers=peers, ranks=tuple(sorted({*thread.ranks, *ranks})))


def _far_end(target: str) -> str:
    pair = _PAIR.match(target)
    if pair and pair[1].startswith(("TCP", "UDP")):
        return pair[3]
    kind = target.partition(":[")[0]
    return f"a {'unix socket' if kind.startswith('UNIX') else kind}" if kind in _PLAIN or "UNIX" in kind else target


def _logs(threads: Sequence[ThreadLog], owners: Mapping[str, Owner]) -> Iterator[Log]:
    by_path: dict[str, list[ThreadLog]] = defaultdict(list)
    for log in threads:
        by_path[log.path].append(log)
    for path, own in by_path.items():
        rank, host, pid = owners[path]
        times = [at for log in own for at in (log.first_at_s, log.last_at_s) if at is not None]
        n_unread = sum(log.n_unread for log in own)
        yield Log(
            host=host,
            rank=rank,
            pid=pid,
            path="" if path.startswith("/proc/") else path,
            size_bytes=_size(path),
            span_s=max(times) - min(times) if times else 0.0,
            cut=any(log.state == "cut" for log in own),
            unread=f"{n_unread} lines are not from strace" if n_unread else "",
        )


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # removed since it was read
        return 0
