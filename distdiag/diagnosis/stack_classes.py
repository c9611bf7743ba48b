"""What a thread waits for or does: from its frames, the kernel's state, and what changed between samples. Pure."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from distdiag.facts.stack_types import leaves_work_to_threads
from distdiag.knowledge.frames import is_native, kind_of, library_path

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from distdiag.facts.procs import Standstill
    from distdiag.facts.stack_types import Frame, Sample, Thread
    from distdiag.jobs.collect import Watched
    from distdiag.jobs.types import Member

BUSY = 0.5
"""Share of a core from which on a thread counts as computing, not as waiting."""
_P2P = re.compile(r"i?(send|recv)(_object_list)?|batch_isend_irecv|_?(forward|backward)?_?(recv|send)\w*")
_HIDDEN = re.compile(r"_.*|wrapper|.*<locals>.*")
_DATA_NAME = re.compile(
    r"(.*[._])?(__getitem__|__getitems__|collate\w*|(load|fetch|get|next|read|prefetch)_(\w+_)?(batch|data|sample|shard|example)\w*)"
)
_CHECKPOINT_NAME = re.compile(r"(.*[._])?(\w*checkpoint\w*|save_(state|model|weights|ckpt)\w*|\w*_ckpt)")
_HELD = ("stopped", "frozen")
_UNREAD = ("denied", "not-python", "failed", "timeout")


class StackClass(StrEnum):
    """What a thread is doing, according to its frames and the kernel."""

    COMM = "communication wait"
    DATA = "data loading"
    STORAGE = "storage"
    NETWORK = "network"
    COMPUTE = "compute"
    CUDA_SYNC = "cuda sync"
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


@dataclass(frozen=True, kw_only=True)
class StackLocation:
    """Where a thread is: in which operation, and the user's own line that led there."""

    operation: str = ""
    frame: Frame | None = None
    is_p2p: bool = False


@dataclass(frozen=True, kw_only=True)
class ThreadState:
    """What the samples of one process show of the thread that does the job's work.

    `moving`: it changed between the samples, None after one; `busy`: the share of a core that it used. `woke`: how
    often it went to wait between the samples; `runs`: it was running or runnable in all of them. `name`: of
    the thread, empty for the main one. `peer`: the rank that the `send` or `recv` it is in names. `groups`: how many
    process groups it is in, 0 where that is not known. `status`, `reason`: of the last sample, see Sample.
    """

    kind: StackClass
    location: StackLocation = StackLocation()
    frames: tuple[Frame, ...] = ()
    moving: bool | None = None
    busy: float | None = None
    counters: tuple[tuple[str, int], ...] = ()
    status: str = "ok"
    reason: str = ""
    woke: int = 0
    runs: bool = False
    name: str = ""
    peer: int | None = None
    groups: int = 0


@dataclass(frozen=True)
class RankState:
    """One member of a job, classified. Members whose samples are the same object share their `thread`."""

    member: Member
    thread: ThreadState

    @property
    def last_sample(self) -> Sample | None:
        """Its last sample; None if there is none."""
        samples = self.member.watched.samples if self.member.watched is not None else ()
        return samples[-1] if samples else None

    @property
    def standstill(self) -> Standstill | None:
        """What the kernel said in the last sample of the thread that is judged.

        Its clock leaves out what a hypervisor took: a thread that slept through all samples has slept for their time.
        """
        sample = self.last_sample
        still = sample.standstill[0] if sample is not None and sample.standstill else None
        if sample is None or still is None or still.since_s is None or self.member.watched is None:
            return still
        first = self.member.watched.samples[0]
        before = first.standstill[0] if first.standstill else None
        slept_on = before is not None and before.tid == still.tid and first.switches == sample.switches >= 0
        if before is None or before.since_s is None or not slept_on or still.state not in _ASLEEP:
            return still
        return replace(still, since_s=max(still.since_s, before.since_s + sample.at_s - first.at_s))


def rank_states(members: Iterable[Member]) -> tuple[RankState, ...]:
    """Classify each member; equal samples of saved dumps are one object, and classified once."""
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
    """Classify the main thread, or the one with this id, which then comes first in all samples."""
    if tid is None:
        return watched, thread_state(watched)
    ordered = replace(watched, samples=tuple(_with_first(sample, tid) for sample in watched.samples))
    return ordered, replace(thread_state(ordered), name=ordered.samples[-1].threads[0].name)


def thread_at_work(sample: Sample, entries: Container[object] = ()) -> int | None:
    """Find the thread that does the job's work where the main thread only waits for it; None: the main thread itself.

    It is the one in communication; else one that began in the same function as the threads that communicate in other
    ranks (`entries`); else the only one that runs code of the user's.
    """
    if len(sample.threads) < 2 or not leaves_work_to_threads(sample.threads[0].frames):
        return None
    if sample.gil_holder == sample.threads[0].os_thread_id:  # no other thread can run Python meanwhile
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
    """Collect where threads began that communicate while the main thread of their rank waits."""
    samples = [
        member.watched.samples[-1] for member in members if member.watched is not None and member.watched.samples
    ]
    return {_entry(thread) for sample in samples for thread in sample.threads[1:] if _communicates(thread)}


def _communicates(thread: Thread) -> bool:
    kind, operation = classify_stack(thread.frames)
    return user_frame(thread.frames) is not None and (kind is StackClass.COMM or operation == "backward")


def _entry(thread: Thread) -> object:
    """Name the outermost function of the user's own, in which a thread began."""
    frame = next((frame for frame in reversed(thread.frames) if library_path(frame.file) is None), None)
    return None if frame is None else (frame.function, frame.file)


def _with_first(sample: Sample, tid: int) -> Sample:
    """Put another thread in the place of the main one."""
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
    frames = _frames(last)
    if not frames:
        if last.status in _HELD:
            return _bare(StackClass.STOPPED, last.status, last.reason)
        reason = last.reason or "py-spy found no Python frames"
        return _bare(StackClass.UNREADABLE, last.status if last.status in _UNREAD else "failed", reason)
    busy = _busy(watched)
    first = watched.samples[0]
    kind, location = _locate(last, frames, watched, busy)
    return ThreadState(
        kind=kind,
        location=location,
        frames=frames,
        moving=_moving(watched.samples),
        busy=busy,
        counters=_counters(last),
        status=last.status,
        reason=last.reason,
        runs=len(watched.samples) > 1 and all(sample.state == "R" for sample in watched.samples),
        woke=_woke(first, last),
        peer=last.threads[0].peer,
        groups=last.groups,
    )


def _woke(first: Sample, last: Sample) -> int:
    """Count how often it went to wait between two samples. Who pauses it, as --native or a tracer, wakes it as well."""
    was_paused = any(sample.native or sample.tracer is not None for sample in (first, last))
    is_known = first.switches >= 0 and _same_thread(first, last)
    return last.switches - first.switches if is_known and not was_paused else 0


def _same_thread(first: Sample, second: Sample) -> bool:
    return bool(first.threads and second.threads) and first.threads[0].os_thread_id == second.threads[0].os_thread_id


def _not_sampled(member: Member) -> ThreadState:
    if member.process is not None and member.process.state != "Z":
        locked = "its memory map is locked by a thread stuck in the kernel; `ps` would hang on it too"
        reason = locked if member.process.kind == "locked" else "it was not sampled"
        return _bare(StackClass.UNREADABLE, "failed", reason)
    reason = "no process found: it exited or never started"
    if member.process is not None:
        reason = "it exited and is a zombie, not yet reaped by its parent"
    elif member.helpers:
        left = ", ".join(str(helper.process.pid) for helper in member.helpers[:4])
        reason = f"it exited, but its children are still running (pid {left})"
    return _bare(StackClass.EXITED, "gone", reason)


def helper_frames(watched: Watched | None) -> tuple[Frame, ...]:
    """Return the main thread's frames of the last sample of a helper."""
    return _frames(watched.samples[-1]) if watched is not None and watched.samples else ()


def in_event_loop(frames: Sequence[Frame]) -> bool:
    """Return whether a thread waits in Python's `selectors` for any of its descriptors, as asyncio does."""
    return bool(frames) and frames[0].file.endswith("selectors.py")


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Find the innermost frame of the user's own code."""
    return next((frame for frame in frames if library_path(frame.file) is None), None)


def classify_stack(frames: Sequence[Frame]) -> tuple[StackClass | None, str]:
    """Classify from frames alone what a thread does, and in which operation: (None, "") if they do not say.

    Of the library's frames at the inner end, down to the first of the user's own, all count: the innermost is often
    only how a library calls itself (torch/_ops.py below a collective, below the tracing of a compiler).
    """
    run = tuple(_library_run(frames))
    if any((library_path(frame.file) or "").startswith("importlib._bootstrap") for frame in run):
        # A compiler imports parts of itself when it needs them.
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
    """A frame and its class in knowledge/frames.toml; `kind` is empty if it has none."""

    frame: Frame
    kind: str
    is_weak: bool


_SAYS_LITTLE = ("backward", "compute")
"""What a collective, a compiler or a DataLoader is called from, or calls on its way."""
_COMPILER = "torch/_dynamo/convert_frame.py"


def _is_compiling(frames: Sequence[Frame]) -> bool:
    """Whether a compiler is at work: it may call the user's code (a backend), and is gone when what it made runs."""
    return any((library_path(frame.file) or "").endswith(_COMPILER) for frame in frames)


def _library_run(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Return the frames from the innermost to the first of the user's own."""
    return itertools.takewhile(lambda frame: library_path(frame.file) is not None, frames)


def _bare(kind: StackClass, status: str, reason: str) -> ThreadState:
    return ThreadState(kind=kind, status=status, reason=reason)


def _locate(
    sample: Sample, frames: tuple[Frame, ...], watched: Watched, busy: float | None
) -> tuple[StackClass, StackLocation]:
    frame = user_frame(frames)
    kind, operation = classify_stack(frames)
    main = sample.standstill[0] if sample.standstill else None
    if sample.status in _HELD:
        return StackClass.STOPPED, StackLocation(operation=operation, frame=frame)
    is_busy = busy is not None and busy >= BUSY
    hint = next((hint for file, line, hint in watched.hints if (file, line) == (frames[0].file, frames[0].line)), "")
    if operation == "backward" and not is_busy and sample.state != "R":
        # DDP and FSDP reduce gradients inside of it, in C++: who does not compute there waits for the others.
        return StackClass.COMM, StackLocation(operation="backward", frame=frame)
    if kind is None and hint == "comm" and not (main is not None and _is_no_work(main.syscall)):
        kind, operation = StackClass.COMM, "Work.wait"
    if kind is None and hint == "gpu":
        kind, operation = StackClass.CUDA_SYNC, "a call that waits for the GPU"
    if kind is None or kind is StackClass.LOCK:
        kind = _by_name(frames) or _by_kernel(watched, main.syscall if main else "", busy=is_busy) or kind
    if main is not None and main.state == "D" and kind is not StackClass.COMM:
        kind = StackClass.STORAGE
    is_p2p = kind is StackClass.COMM and bool(_P2P.fullmatch(operation))
    return kind or StackClass.PYTHON, StackLocation(operation=operation, frame=frame, is_p2p=is_p2p)


def _is_no_work(syscall: str) -> bool:
    """Return whether the kernel knows better than a source line with `.wait(` in it."""
    return "sleep" in syscall or syscall in ("read", "readv", "pread64", "write", "wait4", "waitid", "openat")


def _by_name(frames: Sequence[Frame]) -> StackClass | None:
    """Classify by the names people give to their own functions, weak evidence: the innermost two of their frames."""
    own = [frame for frame in frames if library_path(frame.file) is None][:2]
    for frame in own:
        if _DATA_NAME.fullmatch(frame.function):
            return StackClass.DATA
        if _CHECKPOINT_NAME.fullmatch(frame.function):
            return StackClass.CHECKPOINT
    return None


def _by_kernel(watched: Watched, syscall: str, *, busy: bool) -> StackClass | None:
    sample = watched.samples[-1]
    if busy or (sample.state == "R" and not syscall):
        return StackClass.COMPUTE
    if syscall == "futex" and _is_stuck_on_gil(watched):
        return StackClass.GIL
    main = sample.standstill[0] if sample.standstill else None
    if main is not None and main.path.startswith("/") and not main.path.startswith(("/dev/", "/proc/")):
        return StackClass.STORAGE
    return None


def _is_stuck_on_gil(watched: Watched) -> bool:
    """Return whether another thread has the GIL, or this one waits for a thread and has kept it in all samples.

    The latter is a deadlock when that thread needs the GIL to end, as below `~ProcessGroupGloo`.
    """
    samples = watched.samples
    if samples[-1].gil_holder != samples[-1].threads[0].os_thread_id:
        return samples[-1].gil_holder is not None
    kept = all(sample.threads and sample.gil_holder == sample.threads[0].os_thread_id for sample in samples)
    return kept and _moving(samples) is False


def _operation(frames: Sequence[Frame], found: Frame) -> str:
    """Name the call as the user wrote it: of a run of frames of one module, the outermost that is public."""
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


def _frames(sample: Sample) -> tuple[Frame, ...]:
    return sample.threads[0].frames if sample.threads else ()


def _busy(watched: Watched) -> float | None:
    """Return the share of a core that the main thread used between the first sample and the last."""
    first, last = watched.samples[0], watched.samples[-1]
    elapsed = last.at_s - first.at_s
    if not _same_thread(first, last) and last.threads:
        return None
    return (last.main_cpu_s - first.main_cpu_s) / elapsed if elapsed > 0.05 else None


def _moving(samples: Sequence[Sample]) -> bool | None:
    """Return whether the user's own lines or loop counters changed between two samples; None after one sample."""
    if len(samples) < 2 or not samples[0].threads or not samples[-1].threads:
        return None
    if _slept_through(samples[0], samples[-1]):
        return False
    # One in the middle may have come to nothing.
    return any(_differ(first, second) for first, second in itertools.pairwise(filter(lambda s: s.threads, samples)))


def _slept_through(first: Sample, last: Sample) -> bool:
    """Return whether the kernel says that the thread did not run between two samples, whatever was read of its frames.

    It went to wait as often at the end as at the beginning, and sleeps for longer than lies between them.
    """
    still = last.standstill[0] if last.standstill else None
    is_asleep = first.state in _ASLEEP and last.state in _ASLEEP and first.switches == last.switches >= 0
    return is_asleep and still is not None and still.since_s is not None and still.since_s > last.at_s - first.at_s


_ASLEEP = ("S", "D")


def _differ(first: Sample, second: Sample) -> bool:
    """Compare the lines of the user's own, and those counters that both have: py-spy tells none of a module's."""
    if _own_lines(first) != _own_lines(second):
        return True
    before, after = _counters_by_place(first), _counters_by_place(second)
    return any(before[place] != after[place] for place in before.keys() & after.keys())


def _counters_by_place(sample: Sample) -> dict[tuple[int, str, str], int]:
    counters = sample.threads[0].counters
    return {(counter.depth, counter.function, counter.name): counter.value for counter in counters}


def _own_lines(sample: Sample) -> tuple[tuple[str, str, int], ...]:
    frames = _frames(sample)
    own = tuple((frame.function, frame.file, frame.line) for frame in frames if library_path(frame.file) is None)
    return own or tuple((frame.function, frame.file, frame.line) for frame in frames)


def _counters(sample: Sample) -> tuple[tuple[str, int], ...]:
    """Return the loop counters of the main thread, the outermost frame's first: ("epoch", 0), ("step", 2)."""
    counters = sample.threads[0].counters
    # Of two with one name that of a function counts, also where a module has it: py-spy tells none of a module's.
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
