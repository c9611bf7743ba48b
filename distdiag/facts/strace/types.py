"""What strace logs contain. Times in seconds, points in time in seconds since 1970."""

from __future__ import annotations

from distdiag.record import record

WAITING = ("blocked", "detached")
"""States of a thread whose last call had not returned."""


@record
class Call:
    """One system call.

    `target`: the file, socket or path it is about, empty if unknown. `at_s`: when it began. `time_s`: how long it took,
    None while it lasts. `result`: as strace writes it, empty while it lasts; `error`: its name, "ENOENT".
    """

    name: str
    fd: int | None
    target: str
    at_s: float | None
    result: str
    error: str
    time_s: float | None


@record
class Count:
    """All calls of one name; or all on one part of the file tree, two names deep ("/mnt/data"), or one kind of socket.

    `slow`: number of calls of 10 ms or more; `slowest`: name and target of the slowest.
    """

    name: str
    count: int
    errors: int
    slow: int
    time_s: float
    slowest_s: float
    slowest: str


@record
class CallError:
    """One error, folded over its occurrences. `weight`: 10 is grave, 2 may be harmless.

    A missing file is one error for all directories searched: `target` is then its name and `places` their number; with
    one place, `target` is the whole path.
    """

    name: str
    error: str
    target: str
    places: int
    count: int
    weight: int


@record
class Spin:
    """A call that returned at once, over and over, without getting anything done."""

    name: str
    target: str
    count: int
    span_s: float
    per_s: float


@record
class Poll:
    """A path looked up repeatedly by a thread that sleeps in between; all `tries` had the same result.

    `exists`: the path existed each time, like a lock never released. Several calls between two sleeps are one try.
    `slept_s`: time asleep since the first try.
    """

    target: str
    exists: bool
    tries: int
    slept_s: float


@record
class ThreadLog:
    """One thread's part of a log.

    `pid` and `tid`: None if the log does not show them. `state`: "blocked" in its last call; "detached": blocked when
    strace detached; "returned" from its last call; "exited 1"; "killed SIGSEGV"; "superseded" by another thread's
    execve; "cut": the file ends inside its last line. `blocked_s`: from the start of its last call to the newest time
    in all logs read together. `n_unread`: lines not written by strace, counted with the first thread of a file. `ends`:
    the sockets and pipes used, as in `targets.ends`. Counts and places are sorted by time, errors by weight.
    """

    path: str
    pid: int | None
    tid: int | None
    comm: str
    first_at_s: float | None
    last_at_s: float | None
    n_calls: int
    n_unread: int
    state: str
    blocked_s: float | None
    last: Call | None
    calls: tuple[Count, ...] = ()
    errors: tuple[CallError, ...] = ()
    places: tuple[Count, ...] = ()
    spins: tuple[Spin, ...] = ()
    polls: tuple[Poll, ...] = ()
    ends: tuple[str, ...] = ()


@record
class Logs:
    """All threads of all logs, and (path, why) of each unreadable file."""

    threads: tuple[ThreadLog, ...]
    errors: tuple[tuple[str, str], ...]
