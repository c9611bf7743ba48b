"""What is seen of a process: its threads, their frames, the loop counters in them, and how it stands."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from distdiag.facts import procs  # noqa: TC001 - decoding reads it
from distdiag.facts.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    Numbers = tuple[tuple[str, int], ...]


COUNTERS = re.compile(
    r"(global_|local_|train_|cur_|current_)?"
    r"(step|iter|iteration|it|epoch|i|idx|batch_idx|batch_i|batch|micro\w{0,16}|mb_idx)(_idx|_i|_num|_count)?"
)
"""Names of loop counters, not of totals (num_steps), which may differ rightly. Of the variables of a job's own code
nothing else is kept, and these only where they are whole numbers."""
_PEER = ("src", "dst")
_P2P_CALLS = ("send", "recv", "send_object_list", "recv_object_list")
_P2P_FILE = "/torch/distributed/distributed_c10d.py"
LOCALS = re.compile(rf"{COUNTERS.pattern}|{'|'.join(_PEER)}")
"""Names of the locals to ask for: loop counters, and which rank a `send` or `recv` of torch's is about."""
_GROUP_THREADS = {"pt_gloo_runloop": 2, "pt_nccl_watchdg": 1}
"""How many threads of this name torch starts for each process group (ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp)."""
WHOLE = re.compile(r"-?[0-9]{1,12}")
"""More digits are no count: a running process may change under the eyes of whoever reads it."""
MAIN = "MainThread"
_FOR_A_THREAD = re.compile(
    r"/(threading|selectors|queue|concurrent/futures/\w+|asyncio/\w+)\.py$|/(trio|anyio|uvloop|gevent)/"
)
_FOR_OTHERS = re.compile(r"/torch/(distributed|utils/data|autograd)/")
_INNER = 8


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
    """One thread's frames, innermost first. `active`: it was not idle, as py-spy sees it.

    `cpu_s`: processor time so far; `switches`: how often it went to wait so far, -1 where that was not asked.
    `peer`: the rank that the `send` or `recv` it is in names. `digests`: of each frame a checksum of its local
    variables, 0 where that is not known; comparable between samples of one `reader` ("memory" or "py-spy").
    """

    os_thread_id: int
    name: str
    active: bool
    owns_gil: bool
    state: str
    frames: tuple[Frame, ...]
    counters: tuple[Counter, ...]
    cpu_s: float = 0.0
    switches: int = -1
    peer: int | None = None
    digests: tuple[int, ...] = ()
    reader: str = ""


@dataclass(frozen=True)
class Sample:
    """One sample of one process.

    `status`: ok; stopped, traced, kernel (a thread in D): read all the same, with that state; denied, not-python,
    failed, timeout: no stack, `reason` says why; gone: there is no such process any more, or only its zombie.
    `cpu_s` and `main_cpu_s`: processor time so far, of all threads and of the main one, at `at_s` (monotonic clock).
    `gil_holder`: the thread that holds the interpreter lock, if any does. `switches`: how often the main thread went to
    wait so far; one that waits for ever does not wake up to wait again. `groups`: process groups that it is in, by the
    threads that torch starts for each of a backend; 0 if there is none of these, or torch does not name its threads.
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
    groups: int = 0


def read_threads(answer: Sequence[Mapping[str, Any]], tasks: Mapping[int, procs.Task]) -> tuple[Thread, ...]:
    """Read the threads of one process from what `py-spy dump --json` tells. Raises ValueError, KeyError, TypeError."""
    found = []
    for thread in answer:
        tid = int(thread.get("os_thread_id") or 0)
        task = tasks.get(tid)
        name = str(thread.get("thread_name") or "") or (task.comm if task else "")
        named = [
            f for f in thread["frames"] if not str(f["name"]).startswith("0x")
        ]  # addresses differ in every process
        frames = tuple(Frame(printable(str(f["name"])), printable(str(f["filename"])), int(f["line"])) for f in named)
        counters, peer = counters_and_peer([_numbers(frame) for frame in thread["frames"]])
        found.append(
            Thread(
                os_thread_id=tid,
                name=name,
                active=bool(thread.get("active")),
                owns_gil=bool(thread.get("owns_gil")),
                state=task.state if task else "",
                frames=frames,
                counters=counters,
                cpu_s=task.cpu_s if task else 0.0,
                peer=peer,
                digests=tuple(map(_digest, named)),
                reader="py-spy",
            )
        )
    pid = int(answer[0]["pid"]) if answer else 0
    found.sort(key=lambda thread: (thread.os_thread_id != pid, thread.name != MAIN))
    return tuple(found)


def _numbers(frame: Mapping[str, Any]) -> tuple[str, str, Numbers]:
    found = [(str(local["name"]), str(local["repr"])) for local in frame.get("locals") or ()]
    return (
        printable(str(frame["name"])),
        str(frame["filename"]),
        tuple((name, int(text)) for name, text in found if LOCALS.fullmatch(name) and WHOLE.fullmatch(text)),
    )


def _digest(frame: Mapping[str, Any]) -> int:
    """Return a checksum of the local variables of a frame, as py-spy prints them; 0 if it printed none."""
    text = "\n".join(f"{local['name']}={local['repr']}" for local in frame.get("locals") or ())
    return zlib.crc32(text.encode()) or 1 if text else 0


def counters_and_peer(frames: Sequence[tuple[str, str, Numbers]]) -> tuple[tuple[Counter, ...], int | None]:
    """Find a thread's loop counters and its peer in the whole numbers of its frames (function, file, numbers)."""
    counters = []
    peer = None
    for depth, (function, file, numbers) in enumerate(reversed(frames)):
        is_p2p = function in _P2P_CALLS and file.endswith(_P2P_FILE)
        for name, value in numbers:
            if name not in _PEER:
                counters.append(Counter(depth, function, name, value))
            elif is_p2p and value >= 0:
                peer = value
    return tuple(counters), peer


def process_groups(tasks: Iterable[procs.Task]) -> int:
    """Count the process groups of torch's that a process is in; 0 where its threads do not tell."""
    names = [task.comm for task in tasks]
    return max(-(-names.count(name) // each) for name, each in _GROUP_THREADS.items())


def leaves_work_to_threads(frames: Sequence[Frame]) -> bool:
    """Whether a main thread waits in what Python has for threads: then another one may be at the job's work."""
    inner = frames[:_INNER]
    files = [frame.file for frame in inner]
    return any(map(_FOR_A_THREAD.search, files)) and not any(map(_FOR_OTHERS.search, files))
