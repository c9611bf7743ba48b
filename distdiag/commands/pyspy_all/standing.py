"""Where one process stands, from its frames, the kernel's word, and what changed between two looks. Pure."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.pyspy_all.model import FrameClass, Site, Stance, Standing
from distdiag.knowledge.frames import is_native, kind_of, library_path
from distdiag.node.capture import leaves_work_to_threads

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from distdiag.jobs.collect import Watched
    from distdiag.jobs.model import Member
    from distdiag.node.capture import Capture, Frame, Thread

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


def judge_all(members: Iterable[Member]) -> tuple[Standing, ...]:
    """Say where each member stands; equal looks of saved dumps are one object, and judged once."""
    members = tuple(members)
    entries = _entries_of_threads(members)
    known: dict[int, tuple[Watched, Stance]] = {}
    standings = []
    for member in members:
        watched = member.watched
        if watched is None or not watched.looks:
            standings.append(Standing(member, _not_looked_at(member)))
            continue
        key = id(watched.looks)
        if key not in known:
            tid = thread_at_work(watched.looks[-1], entries)
            seen = (
                watched
                if tid is None
                else replace(watched, looks=tuple(_with_first(one, tid) for one in watched.looks))
            )
            known[key] = seen, replace(judge(seen), thread="" if tid is None else seen.looks[-1].threads[0].name)
        seen, stance = known[key]
        standings.append(Standing(member if seen is watched else replace(member, watched=seen), stance))
    return tuple(standings)


def thread_at_work(look: Capture, entries: Container[object] = ()) -> int | None:
    """Find the thread that does the job's work where the main thread only waits for it; None: the main thread itself.

    It is the one in communication; else one that began in the same function as the threads that communicate in other
    ranks (`entries`); else the only one that runs code of the user's.
    """
    if len(look.threads) < 2 or not leaves_work_to_threads(look.threads[0].frames):
        return None
    own = [thread for thread in look.threads[1:] if user_frame(thread.frames) is not None]
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
    looks = [one.watched.looks[-1] for one in members if one.watched is not None and one.watched.looks]
    return {_entry(thread) for look in looks for thread in look.threads[1:] if _communicates(thread)}


def _communicates(thread: Thread) -> bool:
    kind, operation = site_of(thread.frames)
    return user_frame(thread.frames) is not None and (kind is FrameClass.COMM or operation == "backward")


def _entry(thread: Thread) -> object:
    """Name the outermost function of the user's own, in which a thread began."""
    frame = next((one for one in reversed(thread.frames) if library_path(one.file) is None), None)
    return None if frame is None else (frame.function, frame.file)


def _with_first(look: Capture, tid: int) -> Capture:
    """Put another thread in the place of the main one."""
    chosen = next((thread for thread in look.threads if thread.os_thread_id == tid), None)
    if chosen is None:
        return look
    return replace(
        look,
        threads=(chosen, *(thread for thread in look.threads if thread is not chosen)),
        standstill=tuple(sorted(look.standstill, key=lambda still: still.tid != tid)),
        main_cpu_s=chosen.cpu_s,
        switches=chosen.switches,
        state=chosen.state or look.state,
    )


def judge(watched: Watched) -> Stance:
    """Say what the looks at one process come to."""
    last = watched.looks[-1]
    if last.status == "gone":
        return _bare(FrameClass.EXITED, "gone", last.reason)
    frames = _frames(last)
    if not frames:
        if last.status in _HELD:
            return _bare(FrameClass.STOPPED, last.status, last.reason)
        reason = last.reason or "py-spy saw no Python frames"
        return _bare(FrameClass.UNREADABLE, last.status if last.status in _UNREAD else "failed", reason)
    busy = _busy(watched)
    first = watched.looks[0]
    return Stance(
        site=_site(last, frames, watched, busy),
        frames=frames,
        moving=_moving(watched.looks),
        busy=busy,
        counters=_counters(last),
        status=last.status,
        reason=last.reason,
        runs=len(watched.looks) > 1 and all(look.state == "R" for look in watched.looks),
        woke=_woke(first, last),
        peer=last.threads[0].peer,
        groups=last.groups,
    )


def _woke(first: Capture, last: Capture) -> int:
    """Count how often it went to wait between two looks. Who pauses it, as --native or a tracer, wakes it as well."""
    was_paused = any(look.native or look.tracer is not None for look in (first, last))
    is_known = first.switches >= 0 and _same_thread(first, last)
    return last.switches - first.switches if is_known and not was_paused else 0


def _same_thread(one: Capture, other: Capture) -> bool:
    return bool(one.threads and other.threads) and one.threads[0].os_thread_id == other.threads[0].os_thread_id


def _not_looked_at(member: Member) -> Stance:
    if member.process is not None and member.process.state != "Z":
        locked = "the kernel holds its memory map locked: a thread of it is stuck there, and `ps` would hang on it too"
        reason = locked if member.process.kind == "locked" else "it was not looked at"
        return _bare(FrameClass.UNREADABLE, "failed", reason)
    reason = "there is no process of it: it has ended, or was never started"
    if member.process is not None:
        reason = "it has ended and is a zombie: its parent has not asked for its status"
    elif member.helpers:
        left = ", ".join(str(helper.process.pid) for helper in member.helpers[:4])
        reason = f"it has ended; what it had started lives on (pid {left})"
    return _bare(FrameClass.EXITED, "gone", reason)


def helper_frames(watched: Watched | None) -> tuple[Frame, ...]:
    """Give the main thread's frames of the last look at a helper."""
    return _frames(watched.looks[-1]) if watched is not None and watched.looks else ()


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Find the innermost frame of the user's own code."""
    return next((frame for frame in frames if library_path(frame.file) is None), None)


def site_of(frames: Sequence[Frame]) -> tuple[FrameClass | None, str]:
    """Tell from frames alone what a thread does, and in which operation: (None, "") if they do not say.

    Of the library's frames at the inner end, down to the first of the user's own, all count: the innermost is often
    only how a library calls itself (torch/_ops.py below a collective, below the tracing of a compiler).
    """
    run = tuple(_library_run(frames))
    if any((library_path(frame.file) or "").startswith("importlib._bootstrap") for frame in run):
        # A compiler imports parts of itself when it needs them.
        return (FrameClass.COMPILE, "torch.compile") if _is_compiling(frames) else (FrameClass.IMPORT, "import")
    said = [(frame, *kind_of(frame.function, frame.file)) for frame in run]
    strong = [(frame, kind) for frame, kind, is_weak in said if kind and not is_weak and not is_native(frame.file)]
    if found := next((one for one in strong if one[1] not in _SAYS_LITTLE), None):
        return FrameClass(found[1]), _operation(frames, found[0])
    if _is_compiling(frames):
        return FrameClass.COMPILE, "torch.compile"
    if any(kind == "backward" for _, kind in strong):
        return FrameClass.COMPUTE, "backward"
    native = next((one for one in said if one[1] and is_native(one[0].file)), None)
    if native is not None and not strong:
        return FrameClass(native[1]), _plain(native[0].function)
    if strong:
        return FrameClass(strong[0][1]), _operation(frames, strong[0][0])
    weak = next((one for one in said if one[1]), None)
    return (None, "") if weak is None else (FrameClass(weak[1]), _plain(weak[0].function))


_SAYS_LITTLE = ("backward", "compute")
"""What a collective, a compiler or a DataLoader is called from, or calls on its way."""
_COMPILER = "torch/_dynamo/convert_frame.py"


def _is_compiling(frames: Sequence[Frame]) -> bool:
    """Whether a compiler is at work: it may call the user's code (a backend), and is gone when what it made runs."""
    return any((library_path(frame.file) or "").endswith(_COMPILER) for frame in frames)


def _library_run(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Give the frames from the innermost to the first of the user's own."""
    return itertools.takewhile(lambda frame: library_path(frame.file) is not None, frames)


def _bare(kind: FrameClass, status: str, reason: str) -> Stance:
    return Stance(site=Site(kind=kind, operation="", frame=None), status=status, reason=reason)


def _site(look: Capture, frames: tuple[Frame, ...], watched: Watched, busy: float | None) -> Site:
    frame = user_frame(frames)
    kind, operation = site_of(frames)
    main = look.standstill[0] if look.standstill else None
    if look.status in _HELD:
        return Site(kind=FrameClass.STOPPED, operation=operation, frame=frame)
    is_busy = busy is not None and busy >= BUSY
    hint = next((hint for file, line, hint in watched.hints if (file, line) == (frames[0].file, frames[0].line)), "")
    if operation == "backward" and not is_busy and look.state != "R":
        # DDP and FSDP reduce gradients inside of it, in C++: who does not compute there waits for the others.
        return Site(kind=FrameClass.COMM, operation="backward", frame=frame)
    if kind is None and hint == "comm" and not (main is not None and _is_no_work(main.syscall)):
        kind, operation = FrameClass.COMM, "Work.wait"
    if kind is None and hint == "gpu":
        kind, operation = FrameClass.CUDA_SYNC, "a call that waits for the GPU"
    if kind is None or kind is FrameClass.LOCK:
        kind = _by_name(frames) or _by_kernel(look, main.syscall if main else "", busy=is_busy) or kind
    if main is not None and main.state == "D" and kind is not FrameClass.COMM:
        kind = FrameClass.STORAGE
    is_p2p = kind is FrameClass.COMM and bool(_P2P.fullmatch(operation))
    return Site(kind=kind or FrameClass.PYTHON, operation=operation, frame=frame, is_p2p=is_p2p)


def _is_no_work(syscall: str) -> bool:
    """Tell whether the kernel knows better than a source line with `.wait(` in it."""
    return "sleep" in syscall or syscall in ("read", "readv", "pread64", "write", "wait4", "waitid", "openat")


def _by_name(frames: Sequence[Frame]) -> FrameClass | None:
    """Take the names people give to their own functions as weak evidence: the innermost two of their frames."""
    own = [frame for frame in frames if library_path(frame.file) is None][:2]
    for frame in own:
        if _DATA_NAME.fullmatch(frame.function):
            return FrameClass.DATA
        if _CHECKPOINT_NAME.fullmatch(frame.function):
            return FrameClass.CHECKPOINT
    return None


def _by_kernel(look: Capture, syscall: str, *, busy: bool) -> FrameClass | None:
    if busy or (look.state == "R" and not syscall):
        return FrameClass.COMPUTE
    if look.gil_holder not in (None, look.threads[0].os_thread_id) and syscall == "futex":
        return FrameClass.GIL
    main = look.standstill[0] if look.standstill else None
    if main is not None and main.path.startswith("/") and not main.path.startswith(("/dev/", "/proc/")):
        return FrameClass.STORAGE
    return None


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


def _frames(look: Capture) -> tuple[Frame, ...]:
    return look.threads[0].frames if look.threads else ()


def _busy(watched: Watched) -> float | None:
    """Share of a core that the main thread used between the first look and the last."""
    first, last = watched.looks[0], watched.looks[-1]
    elapsed = last.at_s - first.at_s
    if not _same_thread(first, last) and last.threads:
        return None
    return (last.main_cpu_s - first.main_cpu_s) / elapsed if elapsed > 0.05 else None


def _moving(looks: Sequence[Capture]) -> bool | None:
    """Tell whether the user's own lines or loop counters changed between two looks; None after one look."""
    if len(looks) < 2 or not looks[0].threads or not looks[-1].threads:
        return None
    # One in the middle may have come to nothing.
    marks = {(_own_lines(look), look.threads[0].counters) for look in looks if look.threads}
    return len(marks) > 1


def _own_lines(look: Capture) -> tuple[tuple[str, str, int], ...]:
    frames = _frames(look)
    own = tuple((one.function, one.file, one.line) for one in frames if library_path(one.file) is None)
    return own or tuple((one.function, one.file, one.line) for one in frames)


def _counters(look: Capture) -> tuple[tuple[str, int], ...]:
    """Take the loop counters of the main thread, the outermost frame's first: ("epoch", 0), ("step", 2)."""
    found: dict[str, int] = {}
    for one in look.threads[0].counters:
        found[f"{one.function}.{one.name}"] = one.value
    short: dict[str, int] = {}
    for name, value in found.items():
        short.setdefault(name.rpartition(".")[2], value)
    return tuple(short.items())
