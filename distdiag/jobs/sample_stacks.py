"""Facts of one node: the processes that may belong to a job, and their stacks. Nothing is judged here."""

from __future__ import annotations

import re
import time

from distdiag.facts import deadlines, procs, stack_sampler
from distdiag.facts.stack_sampler import SampleOptions
from distdiag.jobs.collect import Watched, facts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from typing import Any

    from distdiag.facts.stack_types import Sample

__all__ = ["facts", "more"]

_PATIENCE_S = 1.0
_LONG_S = 3.0
_SURE_S = 5.5
"""Who has slept for so long, a little more than the verdict asks for, is not waiting for a usual step any more."""
_WAITS_FOR_GPU = re.compile(r"\.(item|cpu|tolist|numpy|nonzero|synchronize|is_nonzero)\(|\.to\(|torch\.equal\(")
"""Calls that make Python wait until the GPU has done all that it was given."""
_WAITS_FOR_WORK = re.compile(r"\.wait\(")
"""What waits in C without a frame of its own; all of Python's own waits have frames."""


def more(ask: dict[str, Any], tell: Callable[[Watched], None]) -> None:
    """Sample processes, and tell of each one when its last sample is taken; before a long wait also of the first.

    Where a thread slept all the while, but not for long yet, there is one more sample of all: a slow step is over by
    then, and so is a slow sample of a DataLoader worker.

    {"pids", "once": those of which one sample is enough, "samples", "interval_s", "timeout_s" of one sample of one
    process, "native", "counters", "all_threads"}
    """
    options = SampleOptions(
        timeout_s=ask["timeout_s"], native=ask["native"], counters=ask["counters"], all_threads=ask["all_threads"]
    )
    pids, once = list(ask["pids"]), set(ask["once"])
    taken: dict[int, list[Sample]] = {pid: [] for pid in pids}
    began = time.monotonic()

    def sample_all(once: Container[int]) -> None:
        todo = [pid for pid in pids if not taken[pid] or _worth_another_sample(taken[pid], pid in once)]
        for pid, sample in stack_sampler.take_samples(todo, options).items():
            taken[pid].append(sample)

    for number in range(ask["samples"]):
        if number:
            time.sleep(max(0.0, began + number * ask["interval_s"] - time.monotonic()))
        sample_all(once)
        if number == 0 and ask["samples"] > 1 and ask["interval_s"] >= _LONG_S:
            for pid, samples in taken.items():  # whoever is interrupted in a long wait has this at least
                tell(Watched(pid, tuple(samples), ()))
    if (missing_s := _missing_s(taken, once)) > 0:
        time.sleep(missing_s)
        sample_all(())
    hints, _ = deadlines.each(pids, lambda pid: _hints(pid, taken[pid]), patience_s=_PATIENCE_S)
    for pid, samples in taken.items():
        tell(Watched(pid, tuple(samples), hints.get(pid, ())))


def _missing_s(taken: dict[int, list[Sample]], once: set[int]) -> float:
    """Return how much longer the youngest sleep has to last to be no usual step; 0 where that decides nothing."""
    young = [since for pid, samples in taken.items() if pid not in once and (since := _slept_s(samples)) is not None]
    is_clear = any(samples and samples[-1].status in ("stopped", "frozen", "gone") for samples in taken.values())
    return _SURE_S - min(young) if young and not is_clear else 0.0


def _slept_s(samples: list[Sample]) -> float | None:
    """Return the time that a process's youngest sleep has lasted that lasts since before the first sample."""
    watched_s = samples[-1].at_s - samples[0].at_s
    slept = [still.since_s for still in samples[-1].standstill if still.state == "S" and still.since_s is not None]
    return min((seconds for seconds in slept if seconds > watched_s), default=None) if len(samples) > 1 else None


def _worth_another_sample(samples: list[Sample], once: bool) -> bool:
    """Whoever could not be read in time would only cost its deadline again."""
    return not once and samples[-1].status not in ("timeout", "gone", "denied", "not-python")


def _hints(pid: int, samples: list[Sample]) -> tuple[tuple[str, int, str], ...]:
    """Classify by their source what innermost frames wait for: `.item()` and `.wait()` have no frames of their own.

    Nothing else of the source goes anywhere.
    """
    innermost = {
        (sample.threads[0].frames[0].file, sample.threads[0].frames[0].line)
        for sample in samples
        if _has_frames(sample)
    }
    found = []
    for file, line in innermost:
        text = _source_line(pid, file, line).partition("#")[0]
        if _WAITS_FOR_WORK.search(text):
            found.append((file, line, "comm"))
        elif _WAITS_FOR_GPU.search(text) and procs.uses_gpu(pid):
            found.append((file, line, "gpu"))
    return tuple(found)


def _has_frames(sample: Sample) -> bool:
    return bool(sample.threads and sample.threads[0].frames)


def _source_line(pid: int, file: str, line: int) -> str:
    """Read one line as the process sees its files (it may be in a container); empty if it cannot be read."""
    for path in (f"/proc/{pid}/root{file}", file):
        try:
            with open(path, encoding="utf-8", errors="replace") as source:
                for number, text in enumerate(source, 1):
                    if number == line:
                        return text[:400]
        except OSError:
            continue
    return ""
