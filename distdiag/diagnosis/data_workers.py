"""DataLoader workers that block a rank. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.diagnosis.stack_classes import StackClass, helper_frames
from distdiag.knowledge.frames import library_path

if TYPE_CHECKING:
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.jobs.types import Helper

_WORKER_FILE = "torch/utils/data/_utils/worker.py"
_IDLE_FILES = ("queue.py", "connection.py", "queues.py", "selectors.py", "synchronize.py")
LONG_S = 5.0
"""Seconds asleep after which a process counts as stuck; slow samples, retries and downloads wake up more often."""


def ran_lately(state: RankState) -> bool:
    """Return whether a rank, or the DataLoader worker it waits for, ran within the last LONG_S seconds."""
    sample, still = state.last_sample, state.standstill
    helper = stuck_worker(state)
    if helper is not None:
        sample = helper.watched.samples[-1] if helper.watched is not None and helper.watched.samples else None
        still = sample.standstill[0] if sample is not None and sample.standstill else None
    if sample is None or sample.status in ("stopped", "frozen", "gone"):
        return False
    if sample.state == "R" or still is None or still.since_s is None:
        return sample.state == "R"
    return still.state == "S" and still.since_s <= LONG_S


def stuck_worker(state: RankState) -> Helper | None:
    """Find a DataLoader worker that is stopped, in uninterruptible sleep, dead or busy, rather than idle."""
    if state.thread.kind is not StackClass.DATA:
        return None
    workers = [helper for helper in state.member.helpers if _is_worker(helper)]
    still = [helper for helper in workers if state_of(helper) in ("T", "t", "D", "Z")]
    busy = [
        helper for helper in workers if helper not in still and helper_frames(helper.watched) and not _is_idle(helper)
    ]
    return next(iter([*still, *busy]), None)


def state_of(helper: Helper) -> str:
    """Return the state letter from the helper's last sample, else from when the process was listed."""
    samples = helper.watched.samples if helper.watched is not None else ()
    return samples[-1].state if samples else helper.process.state


def _is_worker(helper: Helper) -> bool:
    return helper.process.kind == "data-worker" or any(
        (library_path(frame.file) or "").endswith(_WORKER_FILE) for frame in helper_frames(helper.watched)
    )


def _is_idle(helper: Helper) -> bool:
    """Return whether only queue functions are above the worker loop, so that the worker waits for its next index."""
    for frame in helper_frames(helper.watched):
        path = library_path(frame.file) or ""
        if path.endswith(_WORKER_FILE):
            return frame.function == "_worker_loop"
        if not path.endswith(_IDLE_FILES):
            return False
    return False
