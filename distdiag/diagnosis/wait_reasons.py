"""Reason of a thread's wait, from kernel data. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.diagnosis.wording import lasting
from distdiag.facts.machine import STOPPED
from distdiag.facts.process import syscall_names
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.diagnosis.process_index import Key, ProcessIndex
    from distdiag.facts.process.blocked_threads import Blocked, Target, Thread
    from distdiag.facts.process.descriptors import Descriptor

ENDED = ("Z", "X", "")
_FORKS = ("vfork", "clone", "clone3", "fork")
_TIMEOUTS = {"poll": 2, "ppoll": 2, "select": 4, "pselect6": 4, "epoll_wait": 3, "epoll_pwait": 3, "epoll_pwait2": 3}
"""Index of the timeout argument."""
_BY_POINTER = ("ppoll", "select", "pselect6", "epoll_pwait2")
"""The timeout is a pointer, null for none; otherwise an int in milliseconds, negative for none."""
_SIGNALS = ("pause", "rt_sigsuspend", "rt_sigtimedwait")
ANY_OF = (*syscall_names.POLLS, *syscall_names.SELECTS, *syscall_names.EPOLLS)
_STORAGE = re.compile(r"nfs|rpc_|fuse|request_wait_answer|ceph|ll_|cl_|gpfs|io_schedule|folio_|ext4|xfs|jbd2|btrfs")
"""Kernel functions in which threads wait for a file system or disk."""
_OWN_END = "whose other end this same process has open"
_WITH_OTHER_END = ("socket", "pipe", "fifo")


class Kind(StrEnum):
    """The reason of a thread's wait."""

    RUNS = "runs"
    PEER = "peer"
    STORE = "store"
    OWN_THREADS = "own-threads"
    SLEEP = "sleep"
    STOPPED = "stopped"
    STORAGE = "storage"
    KERNEL = "kernel"
    LOCK = "lock"
    FILE = "file"
    CHILD = "child"
    NETWORK = "network"
    ENDED = "ended"
    UNREADABLE = "unreadable"


@record(kw_only=True)
class Wait:
    """One thread's wait. `on`: text for a table; `peers`: processes, any of which can end it.

    `end`: the shared object: "10.0.0.2:51916", "a pipe", a locked file. `wants`: "r" data, "w" a reader. `does`: the
    rest of a sentence about the thread: "sleeps (nanosleep, 214 s)". `again`: it polls with a timeout, so that
    `since_s` is not the length of the wait. `woke`: it ran between samples, without such a timeout.
    """

    kind: Kind
    call: str
    on: str
    does: str
    since_s: float | None
    thread: Thread | None = None
    peers: tuple[Key, ...] = ()
    end: str = ""
    wants: str = ""
    again: bool = False
    woke: bool = False
    thaws: str = ""


def wait_of(thread: Thread, process: Blocked, host: str, index: ProcessIndex) -> Wait:
    """Classify a thread's wait."""
    if process.state in ENDED:
        return _wait(thread, Kind.ENDED, "exited", "has exited")
    if process.thaws:
        found = _wait(thread, Kind.STOPPED, "a frozen cgroup", "is frozen with its cgroup", thread.state)
        return replace(found, thaws=process.thaws)
    if thread.state in STOPPED and not (thread.state == "t" and thread.tid in process.moved):
        by = f" by its tracer, {index.name((host, process.tracer))}" if process.tracer else ""
        return _wait(thread, Kind.STOPPED, f"stopped{by}", f"is stopped{by}", thread.state)
    if thread.state == "R":
        return _wait(thread, Kind.RUNS, "running or runnable", "runs")
    if thread.hidden:
        return _wait(thread, Kind.UNREADABLE, "permission denied", "cannot be read", thread.state)
    if thread.state == "D":
        return _in_kernel(thread)
    found = _asleep(thread, (host, process.pid), index)
    wakes = thread.tid in process.moved
    if _has_timeout(thread):
        return replace(found, again=True)
    return replace(found, woke=True, on=f"{found.on}; it woke up between samples") if wakes else found


def _has_timeout(thread: Thread) -> bool:
    """Return whether it polls with a timeout, after which it may poll again."""
    if thread.syscall not in _TIMEOUTS or len(thread.arguments) < 5:
        return False
    timeout = thread.arguments[_TIMEOUTS[thread.syscall]]
    is_pointer = thread.syscall in _BY_POINTER
    return timeout != 0 if is_pointer else timeout & 0x80000000 == 0


def _asleep(thread: Thread, key: Key, index: ProcessIndex) -> Wait:
    call = thread.syscall
    if call in syscall_names.SLEEPS:
        left = f"a sleep, {lasting(thread.wakes_in_s)} left" if thread.wakes_in_s is not None else "a sleep"
        return _wait(thread, Kind.SLEEP, left, "sleeps", call)
    if call in syscall_names.WAITS:
        return _for_child(thread, key, index)
    if call in syscall_names.FUTEXES:
        return _wait(thread, Kind.OWN_THREADS, _at_futex(thread), "waits for another of its threads", call)
    if thread.locks:
        return _for_lock(thread, key, index)
    if thread.path:
        verb = {"open": "opens", "openat": "opens"}.get(call, f"is in {call} of")
        return _wait(
            thread, Kind.FILE, thread.path, f"{verb} {thread.path}, but no process has the other end open", call
        )
    if thread.targets:
        return _for_targets(thread, key, index)
    if call in _SIGNALS:
        return _wait(thread, Kind.SLEEP, "a signal", "waits for a signal", call)
    if call in ANY_OF and not thread.unread:
        return _wait(thread, Kind.SLEEP, "a timeout only", "sleeps", call)
    if call == "restart_syscall":  # the kernel shows no arguments: the thread was stopped, or traced, during the call
        return _wait(thread, Kind.KERNEL, "a sleep, or a wait with a timeout", "sleeps, or waits with a timeout", call)
    why = f" ({thread.unread})" if thread.unread else ""
    on = f"unknown{why}" if not thread.wait_channel else f"{thread.wait_channel} in the kernel{why}"
    does = f"waits for {on}" if thread.wait_channel else f"waits in the kernel{why}"
    return _wait(thread, Kind.KERNEL, on, does, call)


def _for_targets(thread: Thread, key: Key, index: ProcessIndex) -> Wait:
    """Classify a call on descriptors by the processes at the far ends, or the files."""
    call, targets = thread.syscall, thread.targets
    connected = [
        target.descriptor
        for target in targets
        if target.descriptor is not None and target.descriptor.kind in _WITH_OTHER_END
    ]
    stores = [descriptor for descriptor in connected if index.is_store(key, descriptor)]
    if stores and len(stores) == len(connected):
        return _at_store(thread, stores[0], key, index)
    peers = tuple(dict.fromkeys(peer for descriptor in connected for peer in index.others(*key, descriptor)))
    if peers:
        end_name = _ends(connected) + (f" (any of {len(targets)})" if len(targets) > 1 else "")
        on, does = f"{end_name} = {index.names(peers, seen_from=key[0])}", f"waits for {index.names(peers)}"
        wants = "".join(sorted({target.wants for target in targets}))
        return replace(_wait(thread, Kind.PEER, on, does, call), peers=peers, end=end_name, wants=wants)
    remote = [end for end in connected if end.socket is not None and end.socket.remote]
    if remote:
        is_own = any(index.is_own(*key, end) for end in remote)
        on = f"{_ends(remote)}, {_OWN_END if is_own else 'whose other end was not found'}"
        return _wait(thread, Kind.NETWORK, on, f"waits for {on}", call)
    listeners = [end.socket for end in connected if end.socket is not None and end.socket.state == "LISTEN"]
    if listeners:
        on = f"a connection to {listeners[0].local}"
        return _wait(thread, Kind.NETWORK, on, f"waits for {on}; no client has connected", call)
    files = [target for target in targets if target.descriptor is not None and target.descriptor.kind != "anon"]
    if not files:
        return _wait(thread, Kind.OWN_THREADS, _plain(targets), "waits for another of its threads", call)
    return _on_files(thread, files)


def _on_files(thread: Thread, files: Sequence[Target]) -> Wait:
    descriptor = files[0].descriptor
    assert descriptor is not None
    verb = {"r": "reads", "w": "writes"}.get(files[0].wants, "uses")
    is_pipe = descriptor.kind in ("pipe", "fifo")
    if descriptor.kind == "pipe":  # only this process has the other end: how a thread wakes another
        return _wait(thread, Kind.OWN_THREADS, "its own pipe", "waits for another of its threads", thread.syscall)
    if (
        descriptor.kind == "socket" and thread.syscall in ANY_OF
    ):  # no other process has the other end: how an event loop is woken
        on = "its own socket"
        return _wait(thread, Kind.OWN_THREADS, on, "waits in its event loop for its own threads", thread.syscall)
    other = ", which no other process has open for writing" if is_pipe and verb == "reads" else ""
    other = other or (", which no other process reads" if is_pipe else "")
    what = "its terminal" if descriptor.target.startswith(("/dev/pts/", "/dev/tty")) else descriptor.target
    return _wait(thread, Kind.FILE, what + other, f"{verb} {what}{other}", thread.syscall)


def _at_store(thread: Thread, connection: Descriptor, key: Key, index: ProcessIndex) -> Wait:
    peers = index.others(*key, connection)
    assert connection.socket is not None
    owner = f", at {index.name(peers[0], seen_from=key[0])}" if peers else ""
    on = f"{connection.socket.remote} = the job's store{owner}"
    return replace(_wait(thread, Kind.STORE, on, "waits for a key in the job's store", thread.syscall), peers=peers)


def _for_lock(thread: Thread, key: Key, index: ProcessIndex) -> Wait:
    holders = tuple((key[0], lock.pid) for lock in thread.locks if lock.pid and lock.pid != key[1])
    file = next((target.descriptor.target for target in thread.targets if target.descriptor is not None), "a file")
    held = f", held by {index.names(holders)}" if holders else ", holder unknown"
    does = f"waits for the lock on {file}"
    return replace(_wait(thread, Kind.LOCK, f"lock on {file}{held}", does, thread.syscall), peers=holders, end=file)


def _for_child(thread: Thread, key: Key, index: ProcessIndex) -> Wait:
    alive = [child for child in thread.children if child.state not in ENDED]
    if len(alive) == 1:
        child = alive[0]
        state = {"T": ", which is stopped", "D": ", which is in the kernel (D)", "R": ", which is running"}.get(
            child.state, ""
        )
        on = f"its child {child.pid} ({child.comm}){state}"
    else:
        on = f"any of its {len(alive)} children" if alive else "a child"
    peers = tuple((key[0], child.pid) for child in alive)
    return replace(_wait(thread, Kind.CHILD, on, f"waits for {on}", thread.syscall), peers=peers)


def _in_kernel(thread: Thread) -> Wait:
    """Classify the wait of a thread in state D, which only its end wakes."""
    descriptors = [target.descriptor for target in thread.targets if target.descriptor is not None]
    path = thread.path or next(
        (descriptor.target for descriptor in descriptors if descriptor.target.startswith("/")), ""
    )
    channel = f"{thread.wait_channel} in the kernel" if thread.wait_channel else "the kernel"
    if thread.syscall in _FORKS:
        return _wait(thread, Kind.CHILD, "the program it is starting", "waits for the program it is starting", "D")
    if path.startswith("/dev/"):
        return _wait(thread, Kind.KERNEL, f"the driver of {path} (D)", f"waits for the driver of {path}", "D")
    if path:
        return _wait(thread, Kind.STORAGE, f"{path} (D)", f"waits for the file system of {path}", "D")
    if _STORAGE.search(thread.wait_channel):
        return _wait(thread, Kind.STORAGE, f"{channel} (D)", f"waits for a file system, in {channel}", "D")
    return _wait(thread, Kind.KERNEL, f"{channel} (D)", f"waits for {channel}", "D")


def _at_futex(thread: Thread) -> str:
    owner = thread.futex.owner if thread.futex is not None else None
    return f"a lock held by its thread {owner}" if owner else "another of its threads"


def _ends(connected: Sequence[Descriptor]) -> str:
    """Format the far ends: addresses, "a pipe", paths."""
    names = list(dict.fromkeys(map(_end, connected)))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _end(descriptor: Descriptor) -> str:
    if descriptor.socket is not None and descriptor.socket.remote:
        unanswered = ", which does not answer" if descriptor.socket.state == "SYN_SENT" else ""
        return f"{descriptor.socket.remote}{unanswered}"
    if descriptor.socket is not None:
        return (
            "a unix socket"
            if descriptor.socket.protocol == "unix"
            else f"a {descriptor.socket.protocol or 'local'} socket"
        )
    return "a pipe" if descriptor.kind == "pipe" else descriptor.target


def _plain(targets: Iterable[Target]) -> str:
    """Format descriptors without a far end."""
    names = dict.fromkeys(
        target.descriptor.target if target.descriptor else f"descriptor {target.fd}" for target in targets
    )
    shown = list(names)
    return shown[0] if len(shown) == 1 else f"{shown[0]} and {len(shown) - 1} more"


def _of(thread: Thread) -> str:
    return f", in {thread.syscall}" if thread.syscall else ""


def _wait(thread: Thread, kind: Kind, on: str, does: str, how: str = "") -> Wait:
    """Format a wait; `how` and the duration follow in parentheses."""
    call = thread.syscall or "-"
    facts = [how] if how in ("", call) else [how, *([call] if thread.syscall else [])]
    facts += [lasting(thread.since_s)] if thread.since_s is not None and kind is not Kind.RUNS else []
    brackets = f" ({', '.join(fact for fact in facts if fact)})" if any(facts) else ""
    return Wait(kind=kind, call=call, on=on, does=does + brackets, since_s=thread.since_s, thread=thread)
