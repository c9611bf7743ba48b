"""Progress of a rank, from its samples over time and from activity beside it. Pure.

Progress is a change in Python frames that a step causes: the user's own lines, loop counters, or local variables of the
functions that called a wait. CPU time and wake-ups do not count: a wait for a GPU spins, and a tracer wakes a sleeping
thread.
"""

from __future__ import annotations

import itertools
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.facts.process.syscall_names import MAY_WAIT_FOR_OWN
from distdiag.knowledge.frames import kind_of, library_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts.stacks.stack_types import Frame, Sample, Thread
    from distdiag.jobs.collect import Watched

BUSY = 0.5
"""Share of a core from which a thread counts as computing rather than waiting."""
RUNS = 0.1
"""The same for a thread that also blocks at times, as between disk reads."""
_WOKE = 2
"""A signal may wake a waiting thread once."""
_STEP_CPU_S = 75e-6
"""CPU time per wake-up. Seen on a small machine: 150 us in an all_reduce of four numbers, 22 us under `py-spy dump`."""
_OFTEN_S = 20.0
"""Wake-ups per second; no tool that dumps stacks causes as many, so the rank may be in a fast loop."""
_ASLEEP = ("S", "D")
_WAIT = "communication wait"


class Motion(StrEnum):
    """The change between a rank's samples; the first that applies."""

    MOVES = "moves"
    """Its Python frames changed: progress."""
    COMPUTES = "computes"
    """It used CPU at one place: a long operation or an endless loop."""
    WORKS = "works"
    """Its children, other threads, files or connections moved."""
    POLLS = "polls"
    """It slept and polled, at one place."""
    STILL = "still"
    UNKNOWN = "unknown"
    """Only one sample."""


def motion_of(watched: Watched, *, waits: bool) -> Motion:
    """Classify the change between samples. `waits`: the rank is in a call that waits for other ranks or its GPU."""
    samples = watched.samples
    if len(samples) < 2 or not samples[0].threads or not samples[-1].threads:
        return Motion.UNKNOWN
    if has_moved(samples, waits=waits):
        return Motion.MOVES
    busy = busy_share(samples) or 0.0
    is_running = all(sample.state == "R" for sample in samples) or (samples[-1].state == "R" and busy >= RUNS)
    if not waits and (busy >= BUSY or is_running):
        return Motion.COMPUTES
    if not waits and works_beside(watched):
        return Motion.WORKS
    return Motion.POLLS if polls(samples) else Motion.STILL


def works_beside(watched: Watched) -> bool:
    """Return whether children, threads, files or connections moved that the rank may be waiting for.

    A thread that slept through all samples in a sleep, or in a call about one file, waits for no thread of its own
    process: those may be monitors or recorders.
    """
    if watched.activity is None:
        return False
    still = watched.samples[-1].standstill[0] if watched.samples[-1].standstill else None
    is_alone = still is not None and still.syscall not in ("", *MAY_WAIT_FOR_OWN) and _slept_throughout(watched.samples)
    return any(moved.role != "self" or not is_alone for moved in watched.activity.moved)


def has_moved(samples: Sequence[Sample], *, waits: bool) -> bool:
    """Return whether the judged thread's Python frames changed between two samples."""
    if len(samples) < 2 or not samples[0].threads or not samples[-1].threads or _slept_throughout(samples):
        return False
    # A sample in the middle may lack frames.
    return any(
        _differ(first, last, waits=waits) for first, last in itertools.pairwise(filter(lambda s: s.threads, samples))
    )


def _slept_throughout(samples: Sequence[Sample]) -> bool:
    """Return whether the thread did not run between the first and last sample, even if frames are missing."""
    first, last = samples[0], samples[-1]
    still = last.standstill[0] if last.standstill else None
    is_asleep = first.state in _ASLEEP and last.state in _ASLEEP and first.switches == last.switches >= 0
    return is_asleep and still is not None and still.since_s is not None and still.since_s > last.at_s - first.at_s


def _differ(first: Sample, last: Sample, *, waits: bool) -> bool:
    before, after = first.threads[0], last.threads[0]
    if _own_lines(before.frames, waits=waits) != _own_lines(after.frames, waits=waits):
        return True
    # py-spy reads no module-level counters: compare those in both readings.
    counters, later = _counters(before), _counters(after)
    if any(counters[place] != later[place] for place in counters.keys() & later.keys()):
        return True
    return _callers_changed(before, after, waits=waits)


def _callers_changed(before: Thread, after: Thread, *, waits: bool) -> bool:
    """Return whether a caller of the current function has assigned a variable, so that this is a new call.

    For a waiting rank the direct caller of the wait counts too; elsewhere that may be a polling loop, and does not
    count.
    """
    if before.reader != after.reader or len(before.frames) != len(after.frames):
        return False
    own = _own(after.frames)
    start = own if waits else own + 1
    pairs = zip(before.digests[start:], after.digests[start:], strict=False)
    return any(one and other and one != other for one, other in pairs)


def _own(frames: Sequence[Frame]) -> int:
    """Return the index of the innermost frame of user code; len(frames) without any."""
    return next((at for at, frame in enumerate(frames) if library_path(frame.file) is None), len(frames))


def _counters(thread: Thread) -> dict[tuple[int, str, str], int]:
    return {(counter.depth, counter.function, counter.name): counter.value for counter in thread.counters}


def _own_lines(frames: Sequence[Frame], *, waits: bool) -> tuple[tuple[str, str, int], ...]:
    """Return the user's own lines; for a server without any, the lines that called the wait, or all."""
    own = tuple((frame.function, frame.file, frame.line) for frame in frames if library_path(frame.file) is None)
    inside = [at for at, frame in enumerate(frames) if kind_of(frame.function, frame.file)[0] == _WAIT]
    callers = frames[inside[-1] + 1 :] if waits and inside else frames
    return own or tuple((frame.function, frame.file, frame.line) for frame in callers)


def busy_share(samples: Sequence[Sample]) -> float | None:
    """Return the share of a core the judged thread used between the first and last sample."""
    first, last = samples[0], samples[-1]
    elapsed = last.at_s - first.at_s
    if not same_thread(first, last) and last.threads:
        return None
    return (last.main_cpu_s - first.main_cpu_s) / elapsed if elapsed > 0.05 else None


def same_thread(first: Sample, last: Sample) -> bool:
    """Return whether the first thread of both samples is the same."""
    return bool(first.threads and last.threads) and first.threads[0].os_thread_id == last.threads[0].os_thread_id


def woke(samples: Sequence[Sample]) -> int:
    """Count how often the thread fell asleep between the samples; 0 if a tracer (such as --native) woke it."""
    first, last = samples[0], samples[-1]
    was_paused = any(sample.native or sample.tracer is not None for sample in samples)
    is_known = first.switches >= 0 and same_thread(first, last)
    return last.switches - first.switches if is_known and not was_paused else 0


def polls(samples: Sequence[Sample]) -> bool:
    """Return whether it sleeps and polls, like a rank at a FileStore."""
    still = samples[-1].standstill[0] if samples[-1].standstill else None
    return still is not None and "sleep" in still.syscall and (len(samples) < 2 or woke(samples) >= _WOKE)


def still_s(samples: Sequence[Sample]) -> float:
    """Return a lower bound of the seconds a rank without progress has been at its place.

    The kernel's time since the thread last ran is a lower bound: a tracer or a signal resets it.
    """
    if not samples:
        return 0.0
    first, last = samples[0], samples[-1]
    if _may_have_moved_unseen(samples):
        still = last.standstill[0] if last.standstill else None
        return (still.since_s or 0.0) if still is not None else 0.0
    watched_s = last.at_s - first.at_s
    known = [watched_s]
    for sample in (first, last):
        still = sample.standstill[0] if sample.standstill else None
        if still is not None and still.since_s is not None and still.state in _ASLEEP:
            known.append(still.since_s + (watched_s if sample is first else 0.0))
    return max(known)


def _may_have_moved_unseen(samples: Sequence[Sample]) -> bool:
    """Return whether a thread woke up repeatedly while its frames cannot show a repeated call at one place.

    A loop at module level has no local variables to compare. Polling and traced threads wake up too, at less CPU time.
    """
    times = woke(samples)
    if times < _WOKE or polls(samples):
        return False
    is_brief = samples[-1].main_cpu_s - samples[0].main_cpu_s < times * _STEP_CPU_S
    if is_brief and times < _OFTEN_S * (samples[-1].at_s - samples[0].at_s):
        return False
    return not any(_shows_calls(thread) for sample in samples for thread in sample.threads[:1])


def _shows_calls(thread: Thread) -> bool:
    """Return whether a repeated call at one place changes a local variable; module-level frames have none."""
    own = _own(thread.frames)
    names = [frame.function for frame in thread.frames]
    module = names.index("<module>", own) if "<module>" in names[own:] else len(names)
    return any(thread.digests[own:module])
