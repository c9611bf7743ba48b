"""Seconds since threads last ran, by the scheduler's clock of each thread's last processor.

Processors have separate clocks, which exclude interrupts and time stolen by a hypervisor, and may differ by many
seconds.
"""

from __future__ import annotations

import math
import os
import re
import time

from distdiag.facts import deadlines, machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PATIENCE_S = 0.2
"""Deadline per CPU: one that is busy with a real-time thread lets no other thread run."""

_TRIES, _AT_ONCE_S = 3, 0.01


def seconds(
    pid: int, tids: Iterable[int], clocks: dict[int, float], *, patience_s: float = PATIENCE_S
) -> dict[int, float]:
    """Return the seconds since threads of a process last ran; omits threads without a record in the kernel.

    `clocks`: by processor, seconds its clock is ahead of time.monotonic(); missing ones are added. They drift: keep
    them for one reading only.
    """
    ran = {tid: last_ran(f"/proc/{pid}/task/{tid}") for tid in tids}
    processors = {clock[0] for clock in ran.values() if clock is not None} - clocks.keys()
    ahead, _ = deadlines.each(processors, _ahead_s, patience_s=patience_s)
    clocks.update((processor, ahead_s) for processor, ahead_s in ahead.items() if ahead_s is not None)
    now = time.monotonic()
    return {
        tid: max(0.0, now + clocks[clock[0]] - clock[1])
        for tid, clock in ran.items()
        if clock is not None and clock[0] in clocks
    }


def _ahead_s(processor: int) -> float | None:
    """Compare a processor's clock with time.monotonic(); None if we may not run there.

    Reading it requires running on that processor, in a thread that may be abandoned.
    """
    try:
        os.sched_setaffinity(0, {processor})
    except OSError:
        return None
    ran, ahead_s = None, 0.0
    for _ in range(_TRIES):
        began = time.monotonic()
        ran = _ran_at("/proc/thread-self")
        now = time.monotonic()
        ahead_s = ran[1] - now if ran is not None else 0.0
        if now - began < _AT_ONCE_S:  # else this thread was preempted between the two clocks
            break
    return ahead_s if ran is not None and ran[0] == processor else None


def last_ran(folder: str) -> tuple[int, float] | None:
    """Read a thread's last processor, and when it last ran by that one's clock: infinite if it runs meanwhile.

    None without a record in the kernel, or if it has not run on its new processor yet.
    """
    ran = None
    for _ in range(_TRIES):
        ran = _ran_at(folder)
        # If it has run between the two files, perhaps elsewhere, the time may be of another clock.
        if ran is None or _exec_start_s(folder) == ran[1]:
            return ran
    return (ran[0], math.inf) if ran is not None else None


def _exec_start_s(folder: str) -> float:
    """Read when a thread last ran, by its processor's clock; 0 if it has moved to another and not run there yet."""
    started = re.search(r"^se\.exec_start\s*:\s*([\d.]+)", machine.read_text(f"{folder}/sched"), re.MULTILINE)
    return float(started[1]) / 1e3 if started else 0.0


def _ran_at(folder: str) -> tuple[int, float] | None:
    """Read a thread's last processor, and the time it ran there: (processor, seconds of its clock)."""
    ran_s = _exec_start_s(folder)
    fields = machine.read_text(f"{folder}/stat").rpartition(")")[2].split()
    return (int(fields[36]), ran_s) if ran_s > 0 and len(fields) > 36 else None
