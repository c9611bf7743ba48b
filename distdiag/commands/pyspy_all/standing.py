"""Where one process stands, from its frames, the kernel's word, and what changed between two looks. Pure."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from distdiag.commands.pyspy_all.model import FrameClass, Site, Stance, Standing
from distdiag.knowledge.frames import is_native, kind_of, library_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.jobs.collect import Watched
    from distdiag.jobs.model import Member
    from distdiag.node.capture import Capture, Frame

BUSY = 0.5
"""Share of a core from which on a thread counts as computing, not as waiting."""
_P2P = re.compile(r"i?(send|recv)(_object_list)?|batch_isend_irecv|_?(forward|backward)?_?(recv|send)\w*")
_HIDDEN = re.compile(r"_.*|wrapper|.*<locals>.*")
_DATA_NAME = re.compile(
    r"(.*[._])?(__getitem__|__getitems__|collate\w*|(load|fetch|get|next|read|prefetch)_(\w+_)?(batch|data|sample|shard|example)\w*)"
)
_CHECKPOINT_NAME = re.compile(r"(.*[._])?(\w*checkpoint\w*|save_(state|model|weights|ckpt)\w*|\w*_ckpt)")
_UNREAD = ("denied", "not-python", "failed", "timeout")


def judge_all(members: Iterable[Member]) -> tuple[Standing, ...]:
    """Say where each member stands; equal looks of saved dumps are one object, and judged once."""
    known: dict[int, Stance] = {}
    standings = []
    for member in members:
        watched = member.watched
        if watched is None or not watched.looks:
            standings.append(Standing(member, _not_looked_at(member)))
            continue
        key = id(watched.looks)
        if key not in known:
            known[key] = judge(watched)
        standings.append(Standing(member, known[key]))
    return tuple(standings)


def judge(watched: Watched) -> Stance:
    """Say what the looks at one process come to."""
    last = watched.looks[-1]
    if last.status == "gone":
        return _bare(FrameClass.EXITED, "gone", last.reason)
    frames = _frames(last)
    if not frames:
        if last.status == "stopped":
            return _bare(FrameClass.STOPPED, "stopped", last.reason)
        reason = last.reason or "py-spy saw no Python frames"
        return _bare(FrameClass.UNREADABLE, last.status if last.status in _UNREAD else "failed", reason)
    busy = _busy(watched)
    return Stance(
        site=_site(last, frames, watched, busy),
        frames=frames,
        moving=_moving(watched.looks),
        busy=busy,
        counters=_counters(last),
        status=last.status,
        reason=last.reason,
        woke=last.switches > watched.looks[0].switches >= 0,
    )


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
    """Tell from frames alone what a thread does, and in which operation: (None, "") if they do not say."""
    weak: tuple[FrameClass | None, str] = (None, "")
    if any((library_path(frame.file) or "").startswith("importlib._bootstrap") for frame in _library_run(frames)):
        return FrameClass.IMPORT, "import"
    native: tuple[FrameClass | None, str] = (None, "")
    for frame in _library_run(frames):
        kind, is_weak = kind_of(frame.function, frame.file)
        if kind == "backward":
            return FrameClass.COMPUTE, "backward"
        if kind and is_native(frame.file):
            native = (FrameClass(kind), _plain(frame.function)) if native[0] is None else native
        elif kind and not is_weak:
            return FrameClass(kind), _operation(frames, frame)
        if kind and weak[0] is None:
            weak = FrameClass(kind), _plain(frame.function)
    return weak if native[0] is None else native


def _library_run(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Give the frames from the innermost to the first of the user's own."""
    return itertools.takewhile(lambda frame: library_path(frame.file) is not None, frames)


def _bare(kind: FrameClass, status: str, reason: str) -> Stance:
    return Stance(site=Site(kind=kind, operation="", frame=None), status=status, reason=reason)


def _site(look: Capture, frames: tuple[Frame, ...], watched: Watched, busy: float | None) -> Site:
    frame = user_frame(frames)
    kind, operation = site_of(frames)
    main = look.standstill[0] if look.standstill else None
    if look.status == "stopped":
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
    return (last.main_cpu_s - first.main_cpu_s) / elapsed if elapsed > 0.05 else None


def _moving(looks: Sequence[Capture]) -> bool | None:
    """Tell whether the user's own lines or loop counters changed between two looks; None after one look."""
    if len(looks) < 2 or not looks[0].threads or not looks[-1].threads:
        return None
    marks = {(_own_lines(look), look.threads[0].counters) for look in looks}
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
