"""Texts about ranks, places in code, and activities. Pure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks
from distdiag.diagnosis.data_workers import state_of, stuck_worker
from distdiag.diagnosis.motion import BUSY, Motion
from distdiag.diagnosis.stack_classes import (
    FILE_LOCKS,
    StackClass,
    classify_stack,
    helper_frames,
    in_event_loop,
    user_frame,
)
from distdiag.diagnosis.wording import counted, format_hosts, format_members, format_titles, named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.facts.process.procs import Standstill
    from distdiag.facts.stacks.stack_types import Frame, Thread
    from distdiag.jobs.types import Helper, Job


def spot(frame: Frame) -> str:
    """Format a place in code: "`load_batch` train.py:26"; at module level "train.py:26"."""
    place = os.path.basename(frame.file) + (f":{frame.line}" if frame.line else "")
    return place if frame.function == "<module>" else f"`{frame.function}` {place}"


def place(frames: Sequence[Frame]) -> str:
    """Format the place of a stack: "`train_step` train.py:25 (in `all_reduce`)"."""
    kind, operation = classify_stack(frames)
    within = f" (in `{operation}`)" if operation and kind not in (StackClass.PYTHON, StackClass.DEBUGGER) else ""
    own = user_frame(frames)
    return spot(frames[0] if own is None else own) + (within if own is not None else "")


def counters_in_words(state: RankState) -> str:
    """Format the loop counters of a rank: "epoch 0, step 2"."""
    return ", ".join(f"{name} {value}" for name, value in state.thread.counters)


def samples_in_words(samples: int, interval_s: float) -> str:
    """Format the number of samples: "2 samples 1 s apart"."""
    return "1 sample" if samples == 1 else f"{samples} samples {round(interval_s, 2):g} s apart"


def who(members: Sequence[RankState]) -> str:
    """Format members: "rank 2 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])", "pid 812 (node07)"."""
    places = [(state.member.rank, state.member.pid, state.member.host) for state in members]
    return format_members(places, [state.member.title for state in members])


def briefly(members: Sequence[RankState]) -> str:
    """Format members without hosts: "ranks 0-1,3"."""
    ranks = [state.member.rank for state in members if state.member.rank is not None]
    if len(ranks) == len(members):
        return named(ranks)
    pids = [state.member.pid for state in members if state.member.pid is not None]
    titles = [state.member.title for state in members]
    if titles and all(titles):
        return format_titles(titles, pids)
    return f"pids {fold_ranks(pids)}" if len(pids) > 1 else f"pid {pids[0]}" if pids else "a process"


def unread_in_words(job: Job) -> str:
    """Describe a job this user may not read: "4 processes of uid 1000 below torchrun (pid 4711 on node07)"."""
    processes = [member.process for member in job.members if member.process is not None]
    users = sorted({process.user for process in processes})
    owners = " and ".join("root" if user == 0 else f"uid {user}" for user in users if user >= 0) or "another user"
    hosts = format_hosts(member.host for member in job.members)
    _, pid, name = job.name.split(" ", 2) if job.name.startswith("pid ") else ("", "", "")
    below = f" below {name} (pid {pid} on {hosts})" if pid else f" on {hosts}"
    return f"{counted(len(processes), 'process', 'processes')} of {owners}{below} cannot be read"


def rendezvous_in_words(job: Job) -> str:
    """Describe ranks of a starting job that use different rendezvous addresses."""
    places = [f"{place} for {named(ranks)}" for place, ranks in job.rendezvous[:_PLACES]]
    more = f", and {len(job.rendezvous) - _PLACES} more" if len(job.rendezvous) > _PLACES else ""
    return f"the ranks use different rendezvous addresses: MASTER_ADDR:MASTER_PORT is {', '.join(places)}{more}"


_PLACES = 4


def waits(state: RankState, *, alone: bool = False) -> str:
    """Describe where a waiting member is blocked: "in `all_reduce` called from `train_step train.py:25`".

    `alone`: not an example of many, so that the peer of its `send` or `recv` is included.
    """
    frame = state.thread.location.frame
    called = f" called from {spot(frame)}" if frame is not None else ""
    if state.thread.location.operation == "backward" and state.thread.kind is StackClass.COMM:
        return f"in `backward`{called}"
    if state.thread.kind is StackClass.GPU:
        return f"for {'its GPU' if alone else 'their GPUs'}{_in_call(state)}{f' at {spot(frame)}' if frame else ''}"
    peer = (
        f" {_DIRECTIONS['recv' in state.thread.location.operation]} rank {state.thread.peer}"
        if alone and state.thread.location.is_p2p and state.thread.peer is not None
        else ""
    )
    return (
        f"in `{state.thread.location.operation}`{peer}{called}"
        if state.thread.location.operation
        else f"in {_where(state)}"
    )


def _in_call(state: RankState) -> str:
    """Format the GPU library call if known; operations in words are skipped."""
    operation = state.thread.location.operation
    return f", in `{operation}`" if operation and " " not in operation else ""


_DIRECTIONS = {True: "from", False: "to"}


def does(state: RankState) -> str:
    """Describe an outlier's activity, starting with its place in the code."""
    parts = [_where(state)]
    if state.thread.kind is StackClass.STOPPED:
        reason = state.thread.reason.partition(": ")[0]
        parts = [f"{reason}, at {_where(state)}" if state.thread.frames else reason]
    elif state.thread.kind is StackClass.EXITED:
        return state.thread.reason
    elif state.thread.status == "traced":
        parts.append(state.thread.reason)
    worker = worker_in_words(state)
    parts += [part for part in ([worker] if worker else [_doing(state)]) if part]
    return ", ".join(parts)


def _where(state: RankState) -> str:
    frame = state.thread.location.frame
    thread = f" (thread {state.thread.name})" if state.thread.name else ""
    if frame is None:
        return (spot(state.thread.frames[0]) if state.thread.frames else "an unknown location") + thread
    if state.thread.location.operation and state.thread.kind not in (StackClass.PYTHON, StackClass.DEBUGGER):
        return f"{spot(frame)} (in `{state.thread.location.operation}`){thread}"
    return spot(frame) + thread


def _doing(state: RankState) -> str:
    if state.thread.kind in (StackClass.STOPPED, StackClass.EXITED):
        return ""
    if state.thread.motion is Motion.COMPUTES and state.thread.kind is not StackClass.COMPILE:
        busy = state.thread.busy
        if busy is not None and busy < BUSY:
            return f"on the same line in each sample, gets {busy:.0%} of a core"
        share = "" if busy is None else f"{busy:.0%} of a core, "
        return f"computing ({share}on the same line in each sample)"
    main = state.standstill
    words = in_kernel(main) if main is not None else ""
    kind = {
        StackClass.DATA: "loading data",
        StackClass.CHECKPOINT: "checkpointing",
        StackClass.COMPILE: "compiling",
        StackClass.STORAGE: "",
        StackClass.GIL: _gil_wait(state),
        StackClass.LOCK: _waits_for(state, main),
        StackClass.DEBUGGER: "in the debugger, waiting for input",
        StackClass.GPU: "waiting for its GPU",
        StackClass.TEARDOWN: "shutting down",
        StackClass.IMPORT: "importing",
    }.get(state.thread.kind, "")
    if state.thread.moving:
        words = "moving between samples"
    elif state.thread.motion is Motion.POLLS:
        words = "polling"
    return ", ".join(part for part in (kind, words) if part)


def _waits_for(state: RankState, main: Standstill | None) -> str:
    if state.thread.motion is Motion.POLLS:
        return "waiting for a lock"
    if main is not None and main.syscall in FILE_LOCKS:
        return "" if main.path else "waiting for a file lock"
    if main is not None and main.syscall in ("wait4", "waitid"):
        return "" if main.path else "waiting for a child process"
    if in_event_loop(state.thread.frames):
        return "waiting in an event loop"
    others = _other_threads(state)
    if len(others) == 1:
        return f"waiting for a lock or for its thread {_at(others[0])}"
    return "waiting for a lock or for another thread"


def _gil_wait(state: RankState) -> str:
    sample = state.last_sample
    if sample is not None and sample.threads and sample.gil_holder == sample.threads[0].os_thread_id:
        return "holds the GIL while it waits for another thread"
    return f"waiting for the GIL{_holder(state)}"


def _holder(state: RankState) -> str:
    sample = state.last_sample
    holder = (
        next((thread for thread in sample.threads[1:] if thread.os_thread_id == sample.gil_holder), None)
        if sample
        else None
    )
    return f", held by its thread {_at(holder)}" if holder is not None else ""


def _other_threads(state: RankState) -> list[Thread]:
    """List the threads that run user code, except the classified one."""
    sample = state.last_sample
    return (
        [thread for thread in sample.threads[1:] if user_frame(thread.frames) is not None] if sample is not None else []
    )


def _at(thread: Thread) -> str:
    frame = user_frame(thread.frames) or (thread.frames[0] if thread.frames else None)
    return thread.name + (f" at {spot(frame)}" if frame is not None else "")


def in_kernel(still: Standstill) -> str:
    """Describe a thread's wait in the kernel; empty if unknown."""
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
    **dict.fromkeys(("accept", "accept4"), "waits for a connection on"),
    **dict.fromkeys(("poll", "ppoll"), "waits for data from"),
    **dict.fromkeys(("wait4", "waitid"), "waits for"),
    "connect": "connects to",
    **dict.fromkeys(FILE_LOCKS, "waits for the lock on"),
}


def worker_in_words(state: RankState) -> str:
    """Describe the DataLoader worker a rank waits for; empty if none is busy or stuck."""
    found = stuck_worker(state)
    if found is None:
        return ""
    return f"waiting for its DataLoader worker {found.process.pid}, which {worker_does(found)}"


def worker_does(helper: Helper) -> str:
    """Describe a worker's activity: "reads /data/x (D state 214 s)", "is stopped", "is in `__getitem__` data.py:12"."""
    if state_of(helper) == "Z":
        return "has died"
    if state_of(helper) in ("T", "t"):
        return "is stopped"
    sample = helper.watched.samples[-1] if helper.watched is not None and helper.watched.samples else None
    frames = helper_frames(helper.watched)
    own = user_frame(frames) or (frames[0] if frames else None)
    kernel = in_kernel(sample.standstill[0]) if sample is not None and sample.standstill else ""
    place = f"is in {spot(own)}" if own is not None else ""
    return ", ".join(part for part in (place, kernel) if part) or "delivers no batch"


def _for(seconds: float | None) -> str:
    return f" {seconds:.0f} s" if seconds is not None and seconds >= 1 else ""
