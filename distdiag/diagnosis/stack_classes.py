"""Classification of threads by their frames, kernel state, and changes between samples. Pure."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from distdiag.diagnosis.gpu_place import autograd_runs, gpu_place, is_located
from distdiag.diagnosis.motion import BUSY, Motion, busy_share, has_moved, motion_of, still_s
from distdiag.facts.stacks.stack_types import leaves_work_to_threads
from distdiag.knowledge.frames import is_native, kind_of, library_path
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from distdiag.diagnosis.gpu_place import GpuPlace
    from distdiag.facts.process.procs import Standstill
    from distdiag.facts.stacks.stack_types import Frame, Sample, Thread
    from distdiag.jobs.collect import Watched
    from distdiag.jobs.types import Member

_P2P = re.compile(r"i?(send|recv)(_object_list)?|batch_isend_irecv|_?(forward|backward)?_?(recv|send)\w*")
_HIDDEN = re.compile(r"_.*|wrapper|.*<locals>.*")
FILE_LOCKS = ("flock", "fcntl")
_HELD = ("stopped", "frozen")
_UNREAD = ("denied", "not-python", "failed", "timeout")


class StackClass(StrEnum):
    """The activity of a thread."""

    COMM = "communication wait"
    DATA = "data loading"
    STORAGE = "storage"
    NETWORK = "network"
    COMPUTE = "compute"
    GPU = "gpu wait"
    COMPILE = "compile"
    CHECKPOINT = "checkpoint"
    LOCK = "lock"
    GIL = "gil"
    DEBUGGER = "debugger"
    TEARDOWN = "teardown"
    IMPORT = "import"
    PYTHON = "python"
    STOPPED = "stopped"
    EXITED = "exited"
    UNREADABLE = "unreadable"


@record(kw_only=True)
class StackLocation:
    """A thread's place: the operation, and the line of user code that led to it."""

    operation: str = ""
    frame: Frame | None = None
    is_p2p: bool = False


@record(kw_only=True)
class ThreadState:
    """The state of the thread that does the job's work, from a process's samples.

    `motion`: change between samples; `still_s`: lower bound of the time without progress; `busy`: share of a core.
    `name`: of the thread, empty for the main one. `peer`: the other rank of its `send` or `recv`. `groups`: number of
    its process groups, 0 if unknown. `gpu`: its place in the GPU libraries. `status`, `reason`: of the last sample, see
    Sample.
    """

    kind: StackClass
    location: StackLocation = StackLocation()
    frames: tuple[Frame, ...] = ()
    motion: Motion = Motion.UNKNOWN
    still_s: float = 0.0
    busy: float | None = None
    counters: tuple[tuple[str, int], ...] = ()
    status: str = "ok"
    reason: str = ""
    name: str = ""
    peer: int | None = None
    groups: int = 0
    gpu: GpuPlace | None = None

    @property
    def moving(self) -> bool | None:
        """Whether it made progress between samples; None after a single sample."""
        return None if self.motion is Motion.UNKNOWN else self.motion is Motion.MOVES


@record
class RankState:
    """A classified member of a job. Members that share one object as samples share their `thread`."""

    member: Member
    thread: ThreadState

    @property
    def label(self) -> str:
        """Its class as shown: a rank without a process may not have started yet."""
        is_absent = self.thread.kind is StackClass.EXITED and self.member.is_absent
        return "no process" if is_absent else str(self.thread.kind)

    @property
    def last_sample(self) -> Sample | None:
        """The last sample, if any."""
        samples = self.member.watched.samples if self.member.watched is not None else ()
        return samples[-1] if samples else None

    @property
    def standstill(self) -> Standstill | None:
        """Kernel state of the judged thread in the last sample."""
        sample = self.last_sample
        return sample.standstill[0] if sample is not None and sample.standstill else None


def rank_states(members: Iterable[Member]) -> tuple[RankState, ...]:
    """Classify each member; equal samples in saved dumps are one object, classified once."""
    members = tuple(members)
    entries = _entries_of_threads(members)
    known: dict[int, tuple[Watched, ThreadState]] = {}
    states = []
    for member in members:
        watched = member.watched
        if watched is None or not watched.samples:
            states.append(RankState(member, _not_sampled(member)))
            continue
        key = id(watched.samples)
        if key not in known:
            tid = thread_at_work(watched.samples[-1], entries)
            known[key] = _classified(watched, tid)
        judged, thread = known[key]
        states.append(RankState(member if judged is watched else replace(member, watched=judged), thread))
    return tuple(states)


def _classified(watched: Watched, tid: int | None) -> tuple[Watched, ThreadState]:
    """Classify the main thread, or the one with this tid, which is then moved to the front of all samples."""
    if tid is None:
        return watched, thread_state(watched)
    ordered = replace(watched, samples=tuple(_with_first(sample, tid) for sample in watched.samples))
    return ordered, replace(thread_state(ordered), name=ordered.samples[-1].threads[0].name)


def thread_at_work(sample: Sample, entries: Container[object] = ()) -> int | None:
    """Find the thread that does the job's work if the main thread only waits for it; None: the main thread itself.

    In order: the thread in communication; one that started in the same function as communicating threads of other ranks
    (`entries`); the only one that runs user code.
    """
    if len(sample.threads) < 2 or not leaves_work_to_threads(sample.threads[0].frames):
        return None
    if sample.gil_holder == sample.threads[0].os_thread_id:  # no other thread can run Python now
        return None
    own = [thread for thread in sample.threads[1:] if user_frame(thread.frames) is not None]
    for chosen in (
        [thread for thread in own if _communicates(thread)],
        [thread for thread in own if _entry(thread) in entries],
        own if len(own) == 1 else [],
    ):
        if chosen:
            return chosen[0].os_thread_id
    return None


def _entries_of_threads(members: Iterable[Member]) -> set[object]:
    """Collect the start functions of threads that communicate in any rank."""
    samples = [
        member.watched.samples[-1] for member in members if member.watched is not None and member.watched.samples
    ]
    return {_entry(thread) for sample in samples for thread in sample.threads[1:] if _communicates(thread)}


def _communicates(thread: Thread) -> bool:
    kind, operation = classify_stack(thread.frames)
    return user_frame(thread.frames) is not None and (kind is StackClass.COMM or operation == "backward")


def _entry(thread: Thread) -> object:
    """Identify the outermost function of user code, in which a thread started."""
    frame = next((frame for frame in reversed(thread.frames) if library_path(frame.file) is None), None)
    return None if frame is None else (frame.function, frame.file)


def _with_first(sample: Sample, tid: int) -> Sample:
    chosen = next((thread for thread in sample.threads if thread.os_thread_id == tid), None)
    if chosen is None:
        return sample
    return replace(
        sample,
        threads=(chosen, *(thread for thread in sample.threads if thread is not chosen)),
        standstill=tuple(sorted(sample.standstill, key=lambda still: still.tid != tid)),
        main_cpu_s=chosen.cpu_s,
        switches=chosen.switches,
        state=chosen.state or sample.state,
    )


def thread_state(watched: Watched) -> ThreadState:
    """Classify the first thread of a process by its samples."""
    last = watched.samples[-1]
    if last.status == "gone":
        return _bare(StackClass.EXITED, "gone", last.reason)
    frames = first_frames(last)
    if not frames:
        if last.status in _HELD:
            return _bare(StackClass.STOPPED, last.status, last.reason)
        reason = last.reason or "py-spy found no Python frames"
        return _bare(StackClass.UNREADABLE, last.status if last.status in _UNREAD else "failed", reason)
    kind, location = _locate(last, frames, watched)
    is_wait = kind in (StackClass.COMM, StackClass.GPU)
    return ThreadState(
        kind=kind,
        location=location,
        frames=frames,
        motion=motion_of(watched, waits=is_wait),
        still_s=still_s(watched.samples),
        busy=busy_share(watched.samples),
        counters=_counters(last),
        status=last.status,
        reason=last.reason,
        peer=last.threads[0].peer,
        groups=last.groups,
        gpu=gpu_place(watched.places),
    )


def _not_sampled(member: Member) -> ThreadState:
    if member.process is not None and member.process.state != "Z":
        locked = "its memory map is locked by a thread stuck in the kernel; `ps` would hang on it too"
        reason = locked if member.process.kind == "locked" else "it was not sampled"
        return _bare(StackClass.UNREADABLE, "failed", reason)
    reason = "no process found: exited or never started"
    if member.process is not None:
        reason = "exited, not yet reaped by its parent"
    elif member.helpers:
        left = ", ".join(str(helper.process.pid) for helper in member.helpers[:4])
        reason = f"exited, but its children are still running (pid {left})"
    return _bare(StackClass.EXITED, "gone", reason)


def helper_frames(watched: Watched | None) -> tuple[Frame, ...]:
    """Return the main thread's frames in a helper's last sample."""
    return first_frames(watched.samples[-1]) if watched is not None and watched.samples else ()


def in_event_loop(frames: Sequence[Frame]) -> bool:
    """Return whether a thread waits in Python's `selectors` for any descriptor, as asyncio does."""
    return bool(frames) and frames[0].file.endswith("selectors.py")


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Find the innermost frame of user code."""
    return next((frame for frame in frames if library_path(frame.file) is None), None)


def classify_stack(frames: Sequence[Frame]) -> tuple[StackClass | None, str]:
    """Classify a stack by frames alone; return the class and operation, or (None, "") if undecided.

    All library frames inside the innermost user frame count: the innermost is often an internal detail (torch/_ops.py
    under a collective, or under the tracing of a compiler).
    """
    run = tuple(_library_run(frames))
    if any((library_path(frame.file) or "").startswith("importlib._bootstrap") for frame in run):
        # Compilers import parts of themselves lazily.
        return (StackClass.COMPILE, "torch.compile") if _is_compiling(frames) else (StackClass.IMPORT, "import")
    kinds = [_Classified(frame, *kind_of(frame.function, frame.file)) for frame in run]
    strong = [found for found in kinds if found.kind and not found.is_weak and not is_native(found.frame.file)]
    if best := next((found for found in strong if found.kind not in _SAYS_LITTLE), None):
        return StackClass(best.kind), _operation(frames, best.frame)
    if _is_compiling(frames):
        return StackClass.COMPILE, "torch.compile"
    if any(found.kind == "backward" for found in strong):
        return StackClass.COMPUTE, "backward"
    native = next((found for found in kinds if found.kind and is_native(found.frame.file)), None)
    if native is not None and not strong:
        return StackClass(native.kind), _plain(native.frame.function)
    if strong:
        return StackClass(strong[0].kind), _operation(frames, strong[0].frame)
    weak = next((found for found in kinds if found.kind), None)
    return (None, "") if weak is None else (StackClass(weak.kind), _plain(weak.frame.function))


class _Classified(NamedTuple):
    """A frame and its class in knowledge/frames.toml; `kind` is empty if unlisted."""

    frame: Frame
    kind: str
    is_weak: bool


_SAYS_LITTLE = ("backward", "compute")
"""Classes of functions around a collective, compiler or DataLoader, which are less specific."""
_COMPILER = "torch/_dynamo/convert_frame.py"


def _is_compiling(frames: Sequence[Frame]) -> bool:
    """Whether torch.compile is compiling, perhaps in a backend of the user's, rather than running compiled code."""
    return any((library_path(frame.file) or "").endswith(_COMPILER) for frame in frames)


def _library_run(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Yield the library frames inside the innermost user frame."""
    return itertools.takewhile(lambda frame: library_path(frame.file) is not None, frames)


def _bare(kind: StackClass, status: str, reason: str) -> ThreadState:
    return ThreadState(kind=kind, status=status, reason=reason)


def _locate(sample: Sample, frames: tuple[Frame, ...], watched: Watched) -> tuple[StackClass, StackLocation]:
    frame = user_frame(frames)
    if sample.status in _HELD:
        return StackClass.STOPPED, StackLocation(operation=classify_stack(frames)[1], frame=frame)
    kind, operation = _kind_of(sample, frames, watched)
    is_p2p = kind is StackClass.COMM and bool(_P2P.fullmatch(operation))
    return kind, StackLocation(operation=operation, frame=frame, is_p2p=is_p2p)


def _kind_of(sample: Sample, frames: tuple[Frame, ...], watched: Watched) -> tuple[StackClass, str]:
    kind, operation = classify_stack(frames)
    main = sample.standstill[0] if sample.standstill else None
    is_busy = (busy_share(watched.samples) or 0.0) >= BUSY
    by_library = _by_library(gpu_place(watched.places), kind, operation)
    if by_library is not None:
        return by_library
    if operation == "backward" and not is_busy and sample.state != "R" and not autograd_runs(watched.places):
        # DDP and FSDP reduce gradients in backward, in C++: a rank that does not compute there waits for the others.
        return StackClass.COMM, "backward"
    hint = next((hint for file, line, hint in watched.hints if (file, line) == (frames[0].file, frames[0].line)), "")
    if kind is None and hint == "comm" and not (main is not None and _is_no_work(main.syscall)):
        return StackClass.COMM, "Work.wait"
    if kind is None and hint == "gpu" and not is_located(watched.places):
        return StackClass.GPU, "a call that waits for the GPU"
    if kind is None or kind is StackClass.LOCK:
        kind = _by_kernel(watched, main.syscall if main else "", busy=is_busy) or kind
    if main is not None and main.state == "D" and kind not in (StackClass.COMM, StackClass.GPU):
        kind = StackClass.STORAGE
    return kind or StackClass.PYTHON, operation


def _by_library(place: GpuPlace | None, kind: StackClass | None, operation: str) -> tuple[StackClass, str] | None:
    """Classify a thread in the GPU libraries; None if its frames are more specific or it is not in any."""
    if place is None or kind is StackClass.COMM:
        return None
    if place.meaning in ("init", "abort"):
        return StackClass.COMM, place.call
    if place.meaning == "loads":
        return StackClass.COMPUTE, place.call
    if kind in (StackClass.TEARDOWN, StackClass.DEBUGGER):
        return None
    return StackClass.GPU, "backward" if operation == "backward" else place.call


def _is_no_work(syscall: str) -> bool:
    """Return whether the system call overrides a source line with `.wait(` in it."""
    return "sleep" in syscall or syscall in ("read", "readv", "pread64", "write", "wait4", "waitid", "openat")


def _by_kernel(watched: Watched, syscall: str, *, busy: bool) -> StackClass | None:
    sample = watched.samples[-1]
    if busy or (sample.state == "R" and not syscall):
        return StackClass.COMPUTE
    if syscall == "futex" and _is_stuck_on_gil(watched):
        return StackClass.GIL
    main = sample.standstill[0] if sample.standstill else None
    if main is not None and main.syscall in FILE_LOCKS:
        return StackClass.LOCK
    if main is not None and main.path.startswith("/") and not main.path.startswith(("/dev/", "/proc/")):
        return StackClass.STORAGE
    return None


def _is_stuck_on_gil(watched: Watched) -> bool:
    """Return whether another thread holds the GIL, or this one held it in all samples while waiting for a thread.

    The latter deadlocks if that thread needs the GIL to finish, as in `~ProcessGroupGloo`.
    """
    samples = watched.samples
    if samples[-1].gil_holder != samples[-1].threads[0].os_thread_id:
        return samples[-1].gil_holder is not None
    kept = all(sample.threads and sample.gil_holder == sample.threads[0].os_thread_id for sample in samples)
    return kept and len(samples) > 1 and not has_moved(samples, waits=False)


def _operation(frames: Sequence[Frame], found: Frame) -> str:
    """Name the call as written by the user: the outermost public function in the run of frames of one module."""
    file = found.file
    name = found.function
    if (library_path(file) or "").startswith("torch/utils/data/"):
        return "DataLoader"
    for frame in _library_run(frames):
        if frame.file == file and not _HIDDEN.fullmatch(frame.function):
            name = frame.function
    return _plain(name)


def _plain(function: str) -> str:
    return function.rpartition(".<locals>.")[2] or function


def first_frames(sample: Sample) -> tuple[Frame, ...]:
    """Return the main thread's frames, if any."""
    return sample.threads[0].frames if sample.threads else ()


def _counters(sample: Sample) -> tuple[tuple[str, int], ...]:
    """Return the main thread's loop counters, outermost frame first: ("epoch", 0), ("step", 2)."""
    counters = sample.threads[0].counters
    # A function's counter hides a module's of the same name, as py-spy reads none of a module.
    in_functions = {counter.name for counter in counters if counter.function != _MODULE}
    found: dict[str, int] = {}
    for counter in counters:
        if counter.function != _MODULE or counter.name not in in_functions:
            found[f"{counter.function}.{counter.name}"] = counter.value
    short: dict[str, int] = {}
    for name, value in found.items():
        short.setdefault(name.rpartition(".")[2], value)
    return tuple(short.items())


_MODULE = "<module>"
