"""What is seen of a process: its threads, their frames, the loop counters in them, and how it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distdiag.node import procs  # noqa: TC001 - decoding reads it
from distdiag.node.wire import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


COUNTERS = re.compile(
    r"(global_|local_|train_|cur_|current_|num_|n_)?"
    r"(step|steps|iter|iters|iteration|it|epoch|i|idx|batch_idx|batch_i|batch|micro\w{0,16}|mb_idx)(_idx|_i|_num|_count)?"
)
"""Names of loop counters: the only locals that are ever kept, and only where they are whole numbers."""
WHOLE = re.compile(r"-?[0-9]{1,12}")
"""More digits are no count: a running process may change under the eyes of whoever reads it."""
MAIN = "MainThread"


@dataclass(frozen=True)
class Frame:
    """One Python (or with `native`, C) frame; `line` is 0 where it is not known."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Counter:
    """A loop counter of one frame: `depth` counts from the outermost frame, which is 0."""

    depth: int
    function: str
    name: str
    value: int


@dataclass(frozen=True)
class Thread:
    """One thread's frames, innermost first. `active`: it was not idle, as py-spy sees it."""

    os_thread_id: int
    name: str
    active: bool
    owns_gil: bool
    state: str
    frames: tuple[Frame, ...]
    counters: tuple[Counter, ...]


@dataclass(frozen=True)
class Capture:
    """One look at one process.

    `status`: ok; stopped, traced, kernel (a thread in D): read all the same, with that state; denied, not-python,
    failed, timeout: no stack, `reason` says why; gone: there is no such process any more, or only its zombie.
    `cpu_s` and `main_cpu_s`: processor time so far, of all threads and of the main one, at `at_s` (monotonic clock).
    `gil_holder`: the thread that holds the interpreter lock, if any does. `switches`: how often the main thread went to
    wait so far; one that waits for ever does not wake up to wait again.
    """

    status: str
    reason: str
    state: str
    tracer: int | None
    cpu_s: float
    main_cpu_s: float
    threads: tuple[Thread, ...]
    standstill: tuple[procs.Standstill, ...]
    native: bool
    gil_holder: int | None
    at_s: float
    switches: int = -1
    left_stopped: bool = False


def read_threads(told: Sequence[dict[str, Any]], tasks: Mapping[int, procs.Task]) -> tuple[Thread, ...]:
    """Read the threads of one process from what `py-spy dump --json` tells. Raises ValueError, KeyError, TypeError."""
    found = []
    for one in told:
        tid = int(one.get("os_thread_id") or 0)
        task = tasks.get(tid)
        name = str(one.get("thread_name") or "") or (task.comm if task else "")
        frames = tuple(
            Frame(printable(str(f["name"])), printable(str(f["filename"])), int(f["line"]))
            for f in one["frames"]
            if not str(f["name"]).startswith("0x")  # an address without a name differs in every process
        )
        found.append(
            Thread(
                os_thread_id=tid,
                name=name,
                active=bool(one.get("active")),
                owns_gil=bool(one.get("owns_gil")),
                state=task.state if task else "",
                frames=frames,
                counters=_counters(one["frames"]),
            )
        )
    pid = int(told[0]["pid"]) if told else 0
    found.sort(key=lambda thread: (thread.os_thread_id != pid, thread.name != MAIN))
    return tuple(found)


def _counters(frames: Sequence[dict[str, Any]]) -> tuple[Counter, ...]:
    found = []
    for depth, frame in enumerate(reversed(frames)):
        for local in frame.get("locals") or ():
            text = str(local["repr"])
            if COUNTERS.fullmatch(str(local["name"])) and WHOLE.fullmatch(text):
                found.append(Counter(depth, printable(str(frame["name"])), str(local["name"]), int(text)))
    return tuple(found)
