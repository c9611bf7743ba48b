"""What a thread waits for, and the answer of trace blocked. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distdiag.commands.trace.who import Key
    from distdiag.node.blocked import Thread

LOOK_S = 0.3
"""Between the two looks at every thread."""


class Kind(StrEnum):
    """What a thread waits for."""

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


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What one thread waits for. `on`: in words, for a table; `peers`: the processes that it waits for, any of them.

    `end`: what it has in common with them: "10.0.0.2:51916", "a pipe", a locked file. `wants`: "r" data, "w" that they
    read. `does`: what it does, as the end of a sentence: "sleeps (nanosleep, 214 s)". `again`: it looks again from time
    to time (a poll with a timeout), so that `since_s` is not since when it waits.
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
    thaws: str = ""


@dataclass(frozen=True, kw_only=True)
class Last:
    """The system call that a thread is in. `args`: as the kernel has them; `fd_target`: what its descriptor points to.

    `peer_rank`: who has the other end, if that is one rank; `blocked_s`: since when it has not run.
    """

    call: str
    args: tuple[int, ...]
    fd_target: str
    peer_rank: int | None
    blocked_s: float | None


@dataclass(frozen=True, kw_only=True)
class ThreadRow:
    """One thread. `role`: "rank", "helper" or "process"; `kind` of Kind; `on`: what it waits for, in words.

    `moved`: it ran between the two looks.
    """

    host: str
    rank: int | None
    job: str
    role: str
    pid: int
    tid: int
    comm: str
    state: str
    moved: bool
    kind: str
    on: str
    last: Last


@dataclass(frozen=True, kw_only=True)
class Waiter:
    """One process that waits, and for which one."""

    host: str
    rank: int | None
    pid: int
    call: str
    on: str
    blocked_s: float | None
    for_rank: int | None
    for_pid: int


@dataclass(frozen=True, kw_only=True)
class Chain:
    """All who wait, directly or not, for one process (of several that wait for each other: for the first of them).

    `cause`: what that one waits for itself, of Kind; "cycle" if it waits for one of these.
    """

    job: str
    host: str
    rank: int | None
    pid: int
    cause: str
    does: str
    blocked_s: float | None
    waiting: tuple[Waiter, ...]


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One job; `ranks`: how many of it were looked at."""

    job: str
    launcher: str
    world_size: int | None
    ranks: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TraceBlocked:
    """The facts of the answer. `helpers`: how many are not shown, as nobody waits for them."""

    look_s: float
    jobs: tuple[JobRow, ...]
    threads: tuple[ThreadRow, ...]
    chains: tuple[Chain, ...]
    helpers: int
