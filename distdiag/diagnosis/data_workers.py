"""Which DataLoader worker a rank waits for, and whether that rank or worker has stood still for long. Pure."""

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
"""Whoever has slept for longer is most likely stuck; a slow sample, a retry or a download wakes up more often."""


def ran_lately(state: RankState) -> bool:
    """Return whether a rank, or the DataLoader worker that it waits for, has slept for a moment only."""
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
    """Find the DataLoader worker that has not delivered a batch: it does not wait for work."""
    if state.thread.kind is not StackClass.DATA:
        return None
    workers = [helper for helper in state.member.helpers if _is_worker(helper)]
    still = [helper for helper in workers if state_of(helper) in ("T", "t", "D", "Z")]
    busy = [
        helper for helper in workers if helper not in still and helper_frames(helper.watched) and not _is_idle(helper)
    ]
    return next(iter([*still, *busy]), None)


def state_of(helper: Helper) -> str:
    """Return the state of a helper when it was sampled, else when it was found."""
    samples = helper.watched.samples if helper.watched is not None else ()
    return samples[-1].state if samples else helper.process.state


def _is_worker(helper: Helper) -> bool:
    return helper.process.kind == "data-worker" or any(
        (library_path(frame.file) or "").endswith(_WORKER_FILE) for frame in helper_frames(helper.watched)
    )


def _is_idle(helper: Helper) -> bool:
    """Return whether a worker waits for its next index: between its queue and the worker loop there is nothing else."""
    for frame in helper_frames(helper.watched):
        path = library_path(frame.file) or ""
        if path.endswith(_WORKER_FILE):
            return frame.function == "_worker_loop"
        if not path.endswith(_IDLE_FILES):
            return False
    return False
