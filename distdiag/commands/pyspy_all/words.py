"""How a rank and its place are put into words. Pure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, fold_ranks, name_ranks
from distdiag.commands.pyspy_all.model import FrameClass
from distdiag.commands.pyspy_all.standing import BUSY, helper_frames, user_frame
from distdiag.knowledge.frames import library_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.pyspy_all.model import Standing
    from distdiag.jobs.model import Helper
    from distdiag.node.capture import Capture, Frame, Thread
    from distdiag.node.procs import Standstill

_NAMED = 4
"""Processes to name one by one; more are only counted."""
_WORKER_FILE = "torch/utils/data/_utils/worker.py"
_IDLE_FILES = ("queue.py", "connection.py", "queues.py", "selectors.py", "synchronize.py")


def spot(frame: Frame) -> str:
    """Write a place in the code: `load_batch train.py:26`."""
    line = f":{frame.line}" if frame.line else ""
    return f"`{frame.function}` {os.path.basename(frame.file)}{line}"


def named(ranks: Sequence[int], room: int = 60) -> str:
    """Name ranks: "rank 3", "ranks 0-2,8"; with their number where the list would be too long to be read."""
    text = name_ranks(ranks)
    if len(text) <= room:
        return text
    folded = fold_ranks(ranks)
    cut = folded.rfind(",", 0, room - 30)
    return f"{len(set(ranks))} ranks ({folded[:cut] if cut > 0 else folded[: room - 30]},...)"


def looks(samples: int, interval_s: float) -> str:
    """Say how often was looked: "2 looks, 1 s apart"."""
    return "one look" if samples == 1 else f"{samples} looks, {interval_s:g} s apart"


def who(members: Sequence[Standing]) -> str:
    """Name members: "rank 2 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])", "pid 812 (node07)"."""
    ranks = [one.rank for one in members if one.rank is not None]
    pids = [one.pid for one in members if one.pid is not None]
    hosts = fold(dict.fromkeys(one.member.host for one in members if one.member.host))
    if len(ranks) < len(members):
        shown = f"pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids[:_NAMED]))}"
        more = f" and {len(pids) - _NAMED} more" if len(pids) > _NAMED else ""
        return f"{shown}{more}" + (f" ({hosts})" if hosts else "")
    place = ", ".join([part for part in (hosts, f"pid {pids[0]}" if len(pids) == 1 else "") if part])
    return named(ranks) + (f" ({place})" if place else "")


def briefly(members: Sequence[Standing]) -> str:
    """Name members without their hosts: "ranks 0-1,3"."""
    ranks = [one.rank for one in members if one.rank is not None]
    if len(ranks) == len(members):
        return named(ranks)
    pids = [one.pid for one in members if one.pid is not None]
    return f"pids {fold_ranks(pids)}" if len(pids) > 1 else f"pid {pids[0]}" if pids else "a process"


def waits(one: Standing, *, alone: bool = False) -> str:
    """Say where a waiting member stands: "in `all_reduce` called from `train_step train.py:25`".

    `alone`: it is not an example of many, so the rank that its `send` or `recv` names is said as well.
    """
    frame = one.site.frame
    called = f" called from {spot(frame)}" if frame is not None else ""
    if one.site.operation == "backward":
        return f"inside `backward`{called}, without computing"
    if one.kind is FrameClass.CUDA_SYNC:
        return f"for the GPU, in {spot(frame)}" if frame is not None else "for the GPU"
    peer = f" {_DIRECTIONS['recv' in one.site.operation]} rank {one.stance.peer}" if alone and _has_peer(one) else ""
    return f"in `{one.site.operation}`{peer}{called}" if one.site.operation else f"in {_where(one)}"


_DIRECTIONS = {True: "from", False: "to"}


def _has_peer(one: Standing) -> bool:
    return one.site.is_p2p and one.stance.peer is not None


def does(one: Standing) -> str:
    """Say what an odd member does, beginning with its place in the code."""
    parts = [_where(one)]
    if one.kind is FrameClass.STOPPED:
        reason = one.reason.partition(": ")[0]
        parts = [f"{reason}, at {_where(one)}" if one.frames else reason]
    elif one.kind is FrameClass.EXITED:
        return one.reason
    elif one.status == "traced":
        parts.append(one.reason)
    worker = worker_in_words(one)
    parts += [part for part in ([worker] if worker else [_doing(one)]) if part]
    return ", ".join(parts)


def _where(one: Standing) -> str:
    frame = one.site.frame
    thread = f" (thread {one.stance.thread})" if one.stance.thread else ""
    if frame is None:
        return (spot(one.frames[0]) if one.frames else "an unknown place") + thread
    if one.site.operation and one.kind not in (FrameClass.PYTHON, FrameClass.DEBUGGER):
        return f"{spot(frame)} (in `{one.site.operation}`){thread}"
    return spot(frame) + thread


def _doing(one: Standing) -> str:
    if one.kind in (FrameClass.STOPPED, FrameClass.EXITED):
        return ""
    if one.stance.runs and (one.busy or 0.0) < BUSY and one.kind is not FrameClass.COMPILE:
        share = "" if one.busy is None else f", it gets {one.busy:.0%} of one"
        return f"waiting for a processor{share}"
    if one.busy is not None and one.busy >= BUSY and one.kind is not FrameClass.COMPILE:
        moves = "and moving between the looks" if one.moving else "at the same line in each look"
        return f"computing ({one.busy:.0%} of a core, {moves})"
    main = _main_standstill(one)
    words = in_kernel(main) if main is not None else ""
    kind = {
        FrameClass.DATA: "loading data",
        FrameClass.CHECKPOINT: "in a checkpoint",
        FrameClass.COMPILE: "compiling",
        FrameClass.STORAGE: "",
        FrameClass.GIL: f"waiting for the GIL{_holder(one)}",
        FrameClass.LOCK: _waits_for(one, main),
        FrameClass.DEBUGGER: "in the debugger, waiting for input",
        FrameClass.CUDA_SYNC: "waiting for its GPU",
        FrameClass.TEARDOWN: "ending",
        FrameClass.IMPORT: "importing",
    }.get(one.kind, "")
    if one.moving:
        words = "moving between the looks"
    return ", ".join(part for part in (kind, words) if part)


def _waits_for(one: Standing, main: Standstill | None) -> str:
    if main is not None and main.syscall in ("wait4", "waitid"):
        return "" if main.path else "waiting for a program that it started"
    others = _other_threads(one)
    if len(others) == 1:
        return f"waiting for a lock or its thread {_at(others[0])}"
    return "waiting for a lock or another thread"


def _holder(one: Standing) -> str:
    """Name the thread that holds the interpreter lock."""
    look = _last_look(one)
    holder = (
        next((thread for thread in look.threads[1:] if thread.os_thread_id == look.gil_holder), None) if look else None
    )
    return f", which its thread {_at(holder)} holds" if holder is not None else ""


def _other_threads(one: Standing) -> list[Thread]:
    """List the threads besides the judged one that run code of the user's."""
    look = _last_look(one)
    return [thread for thread in look.threads[1:] if user_frame(thread.frames) is not None] if look is not None else []


def _at(thread: Thread) -> str:
    frame = user_frame(thread.frames) or (thread.frames[0] if thread.frames else None)
    return thread.name + (f" at {spot(frame)}" if frame is not None else "")


def in_kernel(still: Standstill) -> str:
    """Say what a thread waits for in the kernel; empty if that tells nothing."""
    state = f"D state{_for(still.since_s)}" if still.state == "D" else ""
    if still.path:
        verb = _VERBS.get(still.syscall, f"is in {still.syscall} of")
        return f"{verb} {still.path}" + (f" ({state})" if state else "")
    if state:
        return f"in the kernel ({state}{', ' + still.wait_channel if still.wait_channel else ''})"
    if "sleep" in still.syscall:
        return "sleeping"
    return ""


_VERBS = {
    **dict.fromkeys(("read", "pread64", "readv"), "reads"),
    **dict.fromkeys(("write", "pwrite64", "writev"), "writes"),
    **dict.fromkeys(("open", "openat"), "opens"),
    **dict.fromkeys(("recvfrom", "recvmsg"), "receives from"),
    **dict.fromkeys(("sendto", "sendmsg"), "sends to"),
    **dict.fromkeys(("accept", "accept4"), "waits for a connection at"),
    **dict.fromkeys(("poll", "ppoll"), "waits for data from"),
    **dict.fromkeys(("wait4", "waitid"), "waits for"),
    "connect": "connects to",
    "flock": "waits for the lock on",
}


def worker_in_words(one: Standing) -> str:
    """Name the DataLoader worker that a rank waits for; empty if it does not wait for one that is busy."""
    found = stuck_worker(one)
    if found is None:
        return ""
    return f"waiting for its DataLoader worker {found.process.pid}, which {worker_does(found)}"


def stuck_worker(one: Standing) -> Helper | None:
    """Find the DataLoader worker that has not delivered: the one that does not wait for work."""
    if one.kind is not FrameClass.DATA:
        return None
    workers = [helper for helper in one.member.helpers if _is_worker(helper)]
    still = [helper for helper in workers if _state(helper) in ("T", "t", "D", "Z")]
    busy = [
        helper for helper in workers if helper not in still and helper_frames(helper.watched) and not _is_idle(helper)
    ]
    return next(iter([*still, *busy]), None)


def worker_does(helper: Helper) -> str:
    """Say what a worker does: "reads /data/x (D state 214 s)", "is stopped", "is in `__getitem__` data.py:12"."""
    if _state(helper) == "Z":
        return "has died"
    if _state(helper) in ("T", "t"):
        return "is stopped"
    look = helper.watched.looks[-1] if helper.watched is not None and helper.watched.looks else None
    frames = helper_frames(helper.watched)
    own = user_frame(frames) or (frames[0] if frames else None)
    kernel = in_kernel(look.standstill[0]) if look is not None and look.standstill else ""
    place = f"is in {spot(own)}" if own is not None else ""
    return ", ".join(part for part in (place, kernel) if part) or "does not deliver"


def _state(helper: Helper) -> str:
    looks = helper.watched.looks if helper.watched is not None else ()
    return looks[-1].state if looks else helper.process.state


def _is_worker(helper: Helper) -> bool:
    return helper.process.kind == "data-worker" or any(
        (library_path(frame.file) or "").endswith(_WORKER_FILE) for frame in helper_frames(helper.watched)
    )


def _is_idle(helper: Helper) -> bool:
    """Tell whether a worker waits for its next index: between its queue and the worker loop there is nothing else."""
    for frame in helper_frames(helper.watched):
        path = library_path(frame.file) or ""
        if path.endswith(_WORKER_FILE):
            return frame.function == "_worker_loop"
        if not path.endswith(_IDLE_FILES):
            return False
    return False


def _last_look(one: Standing) -> Capture | None:
    return one.member.watched.looks[-1] if one.member.watched is not None and one.member.watched.looks else None


def _main_standstill(one: Standing) -> Standstill | None:
    look = _last_look(one)
    return look.standstill[0] if look is not None and look.standstill else None


def _for(seconds: float | None) -> str:
    return f" {seconds:.0f} s" if seconds is not None and seconds >= 1 else ""
