"""Samples of a process: its threads, their frames with loop counters, and its state."""

from __future__ import annotations

import re
import zlib

from distdiag.facts.process import procs  # noqa: TC001 - decoding reads it
from distdiag.facts.text import printable
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    Numbers = tuple[tuple[str, int], ...]


COUNTERS = re.compile(
    r"(global_|local_|train_|cur_|current_)?"
    r"(step|iter|iteration|it|epoch|i|idx|batch_idx|batch_i|batch|micro\w{0,16}|mb_idx)(_idx|_i|_num|_count)?"
)
"""Names of loop counters, not of totals (num_steps), which may rightly differ.

No other variables of a job's own code are kept, and these only if they are whole numbers.
"""
_STEP = re.compile(r"step|iter|^batch")
"""Of these, the names that count steps, not layers or micro-batches."""
_PEER = ("src", "dst")
_P2P_CALLS = ("send", "recv", "send_object_list", "recv_object_list")
_P2P_FILE = "/torch/distributed/distributed_c10d.py"
LOCALS = re.compile(rf"{COUNTERS.pattern}|{'|'.join(_PEER)}")
"""Names of the locals to read: loop counters, and the peer rank of torch's `send` or `recv`."""
_GROUP_THREADS = {"pt_gloo_runloop": 2, "pt_nccl_watchdg": 1}
"""Number of threads with this name per process group (ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp)."""
WHOLE = re.compile(r"-?[0-9]{1,12}")
"""More digits are not a count: a running process may change while it is read."""
MAIN = "MainThread"
_FOR_A_THREAD = re.compile(
    r"/(threading|selectors|queue|concurrent/futures/\w+|asyncio/\w+)\.py$|/(trio|anyio|uvloop|gevent)/"
)
_RAY_LOOP = ("/ray/_private/worker.py", "main_loop")
"""Innermost frame of the main thread of a Ray actor; Ray Train runs the training function in another thread."""
_FOR_OTHERS = re.compile(r"/torch/(distributed|utils/data|autograd)/")
_INNER = 8


@record
class Frame:
    """One Python (or with `native`, C) frame; `line` is 0 if unknown."""

    function: str
    file: str
    line: int


@record
class Counter:
    """A loop counter of one frame: `depth` counts from the outermost frame, which is 0."""

    depth: int
    function: str
    name: str
    value: int


@record
class Thread:
    """One thread's frames, innermost first. `active`: not idle, according to py-spy.

    `cpu_s`: processor time so far; `switches`: voluntary context switches so far, -1 if not read. `peer`: the rank
    named by its current `send` or `recv`. `digests`: of each frame a checksum of its local variables, 0 if unknown;
    comparable between samples of one `reader` ("memory" or "py-spy").
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


@record
class Sample:
    """One sample of one process.

    `status`: ok; stopped, traced, kernel (a thread in D): read all the same, in that state; denied, not-python, failed,
    timeout: no stack, see `reason`; gone: exited, or a zombie. `cpu_s` and `main_cpu_s`: processor time so far, of all
    threads and of the main one, at `at_s` (monotonic clock). `gil_holder`: the thread with the interpreter lock, if
    any. `switches`: voluntary context switches of the main thread so far; constant while it waits forever. `groups`:
    its process groups, counted by torch's threads per group of a backend; 0 if it has none of these, or torch does not
    name its threads.
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
    """Parse the threads of one process from `py-spy dump --json`. Raises ValueError, KeyError, TypeError."""
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
    """Return a checksum of a frame's local variables as printed by py-spy; 0 if it printed none."""
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


def steps_seen(samples: Iterable[Sample]) -> int:
    """Return in how many different training steps a process was sampled, by its loop counters; 0 without a counter."""
    main = [sample.threads[0] for sample in samples if sample.threads]
    seen = {tuple(each.value for each in thread.counters if _STEP.search(each.name)) for thread in main}
    return len(seen - {()})


def process_groups(tasks: Iterable[procs.Task]) -> int:
    """Count torch's process groups in a process; 0 if its threads do not reveal them."""
    names = [task.comm for task in tasks]
    return max(-(-names.count(name) // each) for name, each in _GROUP_THREADS.items())


def leaves_work_to_threads(frames: Sequence[Frame]) -> bool:
    """Return whether a main thread waits in Python's threading code or Ray's loop, so that another may do the work."""
    inner = frames[:_INNER]
    files = [frame.file for frame in inner]
    if files and files[0].endswith(_RAY_LOOP[0]) and inner[0].function.endswith(_RAY_LOOP[1]):
        return True
    return any(map(_FOR_A_THREAD.search, files)) and not any(map(_FOR_OTHERS.search, files))
