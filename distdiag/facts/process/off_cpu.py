"""Seconds since threads last ran, by the scheduler's clock of each thread's last processor.

Processors have separate clocks, which exclude interrupts and time stolen by a hypervisor, and may differ by many
seconds.
"""

from __future__ import annotations

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
    ran = {tid: _ran_at(f"/proc/{pid}/task/{tid}") for tid in tids}
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


def _ran_at(folder: str) -> tuple[int, float] | None:
    """Read a thread's last processor, and the time it ran there: (processor, seconds of its clock)."""
    started = re.search(r"^se\.exec_start\s*:\s*([\d.]+)", machine.read_text(f"{folder}/sched"), re.MULTILINE)
    fields = machine.read_text(f"{folder}/stat").rpartition(")")[2].split()
    # 0: moved to another processor, and not run there yet.
    known = started is not None and float(started[1]) > 0
    return (int(fields[36]), float(started[1]) / 1e3) if started and known and len(fields) > 36 else None
