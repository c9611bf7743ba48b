"""Logs that somebody has -> the threads in them, and who waits for whom, as far as the logs tell both ends."""

from __future__ import annotations

import mmap
import os
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.trace.blocked.result import Kind
from distdiag.commands.trace.sys.live import WAITING
from distdiag.commands.trace.sys.model import Log, Subject
from distdiag.commands.trace.sys.words import of_log, several
from distdiag.errors import DistdiagError, UsageError
from distdiag.node import syscall_names
from distdiag.node.strace.lines import LINE_BYTES
from distdiag.node.strace.log import read_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distdiag.commands.trace.who import Key
    from distdiag.node.strace.types import ThreadLog

    Whose = tuple[int | None, str, int | None]

_PAIR = re.compile(r"([A-Z][\w-]*):\[([^>]+?)->([^,\]]+(?:\]:\d+)?)(?:,.*)?\]")
_TID = re.compile(r"\.(\d{1,7})$")
_PLAIN = ("pipe", "socket")
_FUTEX = re.compile(r"futex.*")
_END_OR_ADDRESS = re.compile(
    rb"[A-Z][\w-]{0,20}:\[[^\s,<>]{1,200}(?:->[^\s,<>]{1,200})?|pipe:\[\d{1,20}\]"
    rb'|\{sa_family=AF_INET, sin_port=htons\(\d{1,5}\), sin_addr=inet_addr\("[^"\n]{1,100}"\)\}, 16\) = '
    rb"|sin6_port=htons\(\d{1,5}\), "
)
"""What `_other_ends` and `_who_connects` may give."""
_FEW = 16
_MOST_PEERS = 16
"""More processes at the other end of one pipe or socket are not named."""
_WAITS_FOR_CHILD = ("wait4", "waitid", "waitpid")


def read(paths: Sequence[str], of: Mapping[str, Whose] | None = None) -> tuple[list[Subject], list[Log]]:
    """Read logs of strace, of any version and options.

    Args:
        paths: files and folders.
        of: whose logs they are, where their names do not tell.

    Raises:
        UsageError: there is no such file.
        DistdiagError: none of them is a log of strace.
    """
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(f"--from {path}: there is no such file or folder", hint="name files, or a folder of them")
    found = read_logs(paths)
    if not found.threads:
        why = "; ".join(f"{path}: {words}" for path, words in found.errors[:3])
        raise DistdiagError(
            f"no log of strace could be read: {why or 'there are no files'}",
            hint="it takes what strace -o wrote, best with: strace -ff -yy -ttt -T -o FILE",
        )
    whose = {log.path: (of or {}).get(log.path) or _by_name(log.path) for log in found.threads}
    subjects = _with_peers(list(_subjects(found.threads, whose)))
    logs = [*_logs(found.threads, whose), *(_unread(path, why) for path, why in found.errors)]
    return sorted(subjects, key=_order), logs


def _by_name(path: str) -> Whose:
    return of_log(os.path.basename(path)) or (None, "", None)


def _subjects(threads: Iterable[ThreadLog], whose: Mapping[str, Whose]) -> Iterator[Subject]:
    mains = _mains(threads)
    for log in threads:
        rank, host, pid = whose[log.path]
        first, last = log.first_at_s, log.last_at_s
        span_s = (last or 0.0) - (first or 0.0) + (log.blocked_s or 0.0) if first is not None else 0.0
        one = Subject(
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
        yield _waiting(one, log) if log.state in WAITING and log.last is not None else one


def _mains(threads: Iterable[ThreadLog]) -> set[int]:
    """Choose the main thread of each process (by identity): it has the process's id, or is the first of its log."""
    groups: dict[tuple[str, int | None], list[ThreadLog]] = defaultdict(list)
    for log in threads:
        groups[_TID.sub("", log.path), log.pid].append(log)
    return {
        id(next((log for log in group if log.tid == log.pid), min(group, key=lambda log: log.tid or 0)))
        for group in groups.values()
    }


def _waiting(one: Subject, log: ThreadLog) -> Subject:
    """Add what its last call waits for, from its name and what it is about."""
    assert log.last is not None
    call, target = log.last.name, log.last.target
    kind, on = Kind.KERNEL, target or "unknown"
    if call in syscall_names.SLEEPS:
        kind, on = Kind.SLEEP, "a sleep"
    elif _FUTEX.fullmatch(call) or target.startswith("anon_inode:[eventfd"):
        kind, on = Kind.OWN_THREADS, "another thread of its own"
    elif call in _WAITS_FOR_CHILD:
        kind, on = Kind.CHILD, "a child"
    elif "[" in target or (target and not target.startswith("/")):
        kind, on = Kind.NETWORK, f"{_there(target)}, whose other end is in no log"
    elif target.startswith("/"):
        kind = Kind.FILE
    does = f"is in {call}" + (f" on {on}" if on != "unknown" else "")
    return replace(one, kind=kind, call=call, on=on, does=does, blocked_s=log.blocked_s, idle=log.n_calls == 0)


def _with_peers(subjects: list[Subject]) -> list[Subject]:
    """Find the other ends of what threads are blocked on, in the other logs."""
    found = _search(subjects, _other_ends, most=len(subjects))
    # The log of who connects may show the address alone, and others may have connected to it too.
    return _search(found, _who_connects, most=1)


def _search(subjects: list[Subject], texts: Callable[[str], Iterable[bytes]], *, most: int) -> list[Subject]:
    """Add to those that are blocked who mentions these texts, if not more than `most` others do."""
    sought: dict[int, tuple[bytes, ...]] = {}
    for number, one in enumerate(subjects):
        if one.kind is Kind.NETWORK and one.log is not None and one.log.last is not None:
            sought[number] = tuple(texts(one.log.last.target))
    mentioners = _mentioners(subjects, {text for some in sought.values() for text in some})
    found = list(subjects)
    for number, some in sought.items():
        by_key = {key: owner for text in some for key, owner in mentioners.get(text, {}).items()}
        others = [owner for key, owner in by_key.items() if key != found[number].key]
        if len(others) <= most:
            for owner in others[:_MOST_PEERS]:
                found[number] = _with_peer(found[number], owner)
    return found


def _mentioners(subjects: Iterable[Subject], sought: set[bytes]) -> dict[bytes, dict[Key, Subject]]:
    """Find for each text the processes in whose logs it stands, and not many more than can be named."""
    by_path: dict[str, list[Subject]] = defaultdict(list)
    for one in subjects:
        if one.log is not None:
            by_path[one.log.path].append(one)
    found: dict[bytes, dict[Key, Subject]] = defaultdict(dict)
    for path, members in by_path.items() if sought else ():
        mains, threads = {one.key: one for one in members if one.is_main}, {one.tid: one for one in members}
        for text, tid in _mentions(path, sought):
            named = threads.get(tid, members[0])
            if len(found[text]) <= _MOST_PEERS:
                found[text].setdefault(named.key, mains.get(named.key, named))
    return found


def _other_ends(target: str) -> tuple[bytes, ...]:
    """Give what strace writes of the other end: of a connection that itself, else who listens there."""
    pair = _PAIR.match(target)
    if pair is None:
        return (target.encode(),) if target.startswith("pipe:[") else ()
    kind, here, there = pair.groups()
    return (f"{kind}:[{there}->{here}".encode(), f"{kind}:[{there}]>".encode())


def _who_connects(target: str) -> tuple[bytes, ...]:
    """Give what strace writes of a call that connects to this end."""
    pair = _PAIR.match(target)
    if pair is None or not pair[1].startswith("TCP"):
        return ()
    address, _, port = pair[2].rpartition(":")
    if address.startswith("["):
        return (f"sin6_port=htons({port}), ".encode(),)
    return (f'{{sa_family=AF_INET, sin_port=htons({port}), sin_addr=inet_addr("{address}")}}, 16) = '.encode(),)


def _mentions(path: str, sought: set[bytes]) -> Iterator[tuple[bytes, int | None]]:
    """Tell which of these texts stand in a log, and on lines of which thread (None: all lines are of the same)."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
            for text, at in _first_places(log, sought):
                start = max(log.rfind(b"\n", max(0, at - LINE_BYTES), at) + 1, at - LINE_BYTES)
                tid = re.match(rb"(?:\[pid +)?(\d{1,7})[ \]<]", log[start : start + 20])
                yield text, int(tid[1]) if tid else None


def _first_places(log: mmap.mmap, sought: set[bytes]) -> Iterator[tuple[bytes, int]]:
    """Find each text that stands in a log, and where first: each on its own if they are few, else all in one pass."""
    if len(sought) <= _FEW:
        yield from ((text, at) for text in sought if (at := log.find(text)) >= 0)
        return
    left = set(sought)
    for match in _END_OR_ADDRESS.finditer(log):
        whole = match[0]
        for text in {whole, whole.removesuffix(b"]"), whole + b">"} & left:
            left.discard(text)
            yield text, match.start()


def _with_peer(one: Subject, owner: Subject) -> Subject:
    name = several([owner]) if owner.rank is None or owner.host != one.host else f"rank {owner.rank}"
    key: Key = owner.key
    ranks = (owner.rank,) if owner.rank is not None else ()
    target = one.log.last.target if one.log is not None and one.log.last is not None else ""
    on = one.on if one.peers else f"{_there(target)} = {name}"
    return replace(one, kind=Kind.PEER, on=on, peers=(*one.peers, key), ranks=tuple(sorted({*one.ranks, *ranks})))


def _there(target: str) -> str:
    pair = _PAIR.match(target)
    if pair and pair[1].startswith(("TCP", "UDP")):
        return pair[3]
    kind = target.partition(":[")[0]
    return f"a {'unix socket' if kind.startswith('UNIX') else kind}" if kind in _PLAIN or "UNIX" in kind else target


def _logs(threads: Sequence[ThreadLog], whose: Mapping[str, Whose]) -> Iterator[Log]:
    by_path: dict[str, list[ThreadLog]] = defaultdict(list)
    for log in threads:
        by_path[log.path].append(log)
    for path, own in by_path.items():
        rank, host, pid = whose[path]
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
            unread=f"{n_unread} lines of it are not strace's" if n_unread else "",
        )


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # removed since it was read
        return 0


def _unread(path: str, why: str) -> Log:
    return Log(host="", rank=None, pid=None, path=path, size_bytes=0, span_s=0.0, unread=why)


def _order(one: Subject) -> tuple[bool, int, str, int, bool, int]:
    return one.rank is None, one.rank or 0, one.host, one.pid or 0, not one.is_main, one.tid or 0
