"""What logs of strace say. Seconds everywhere; a time of day where the log has no date; None where it has no times."""

from __future__ import annotations

from dataclasses import dataclass

ARGUMENTS = 200
"""No more characters of the arguments of a call are kept."""
WAITING = ("blocked", "detached")
"""States of a thread whose last call had not returned."""


@dataclass(frozen=True)
class Call:
    """One system call; its `args` without what is read, written or sent.

    `target`: the file, socket or path it is about, as it was at that time; empty if not known. `at_s`: when it began.
    `time_s`: how long it took; None without -T, and while it lasts. `result` as strace puts it, empty while it lasts;
    `error` its name, "ENOENT".
    """

    name: str
    args: str
    fd: int | None
    target: str
    at_s: float | None
    result: str
    error: str
    time_s: float | None


@dataclass(frozen=True)
class Count:
    """All calls of one name; the times are None without -T."""

    name: str
    count: int
    errors: int
    time_s: float | None
    slowest_s: float | None


@dataclass(frozen=True)
class CallError:
    """An error worth to be looked at, however often it came. `weight`: 10 is grave, 1 is likely nothing.

    What was not found is one error for all folders it was looked for in: `target` is then a name, `places` their
    number, and `target` the whole path where it was only one.
    """

    name: str
    error: str
    target: str
    places: int
    count: int
    first_at_s: float | None
    last_at_s: float | None
    weight: int


@dataclass(frozen=True)
class Place:
    """The calls on one part of the file tree, two names deep ("/mnt/data"), or on one kind of socket or pipe ("TCP").

    `slow`: how many of them took 10 ms or more. The times are None without -T.
    """

    where: str
    count: int
    slow: int
    time_s: float | None
    slowest_s: float | None


@dataclass(frozen=True)
class Spin:
    """A call that returned at once over and over and got nothing done; without times only the count is known."""

    name: str
    target: str
    count: int
    span_s: float | None
    per_s: float | None


@dataclass(frozen=True)
class Poll:
    """One path that a thread looks for again and again, asleep in between; all `tries` had the same result.

    `exists`: it was there each time, as a lock that is not released. Several calls between two sleeps are one try.
    `slept_s`: spent asleep since the first try; None without -T.
    """

    target: str
    exists: bool
    tries: int
    slept_s: float | None


@dataclass(frozen=True)
class ThreadLog:
    """What the log says of one thread.

    `pid` and `tid`: None where the log does not say. `state`: "blocked" in its last call; "detached": was so when
    strace left; "returned" from it; "exited 1"; "killed SIGSEGV"; "superseded" by another thread's execve; "cut": the
    file ends inside its last line. `blocked_s`: how long its last call had lasted at the newest time in all logs that
    were read together. `n_unread`: lines that strace did not write, counted with the first thread of a file.
    `slowest`: the slowest calls on files. `programs`: what it executed. `polls`: the
    paths that it waits for. Counts and places come by time, errors by
    weight.
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
    calls: tuple[Count, ...]
    errors: tuple[CallError, ...]
    places: tuple[Place, ...]
    slowest: tuple[Call, ...]
    spins: tuple[Spin, ...]
    signals: tuple[tuple[str, int], ...]
    programs: tuple[str, ...]
    polls: tuple[Poll, ...] = ()


@dataclass(frozen=True)
class Logs:
    """All threads of all logs that were read, and (path, why) of each file that could not be."""

    threads: tuple[ThreadLog, ...]
    errors: tuple[tuple[str, str], ...]
