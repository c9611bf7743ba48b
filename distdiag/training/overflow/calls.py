"""Threads that run a model, and the thread that replays it."""

from __future__ import annotations

import contextlib
import sys
import time
from threading import RLock, get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from distdiag.training.overflow.replay import Call

_LONGEST_S = 60.0
"""How long a thread waits while another replays."""
_LEAVE_S = 2.0
"""How long a replay waits for the calls of other threads to end."""
_STAGES = "torch.distributed.pipelining.stage"
_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")
"""Methods of its stages; the last one of older torch."""


def are_for_shapes() -> bool:
    """Return whether a PipelineStage calls the model only to learn shapes, on uninitialised memory."""
    if _STAGES not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in _INFERENCE and frame.f_globals.get("__name__") == _STAGES:
            return True
        frame = frame.f_back
    return False


class Callers:
    """The running calls of one model, by thread id; 0 is no thread."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._gate = RLock()
        self._replays = self._framed = 0

    @property
    def replays(self) -> bool:
        """Whether this thread replays, so that its call is not the script's."""
        return self._replays == get_ident()

    @property
    def has_frames(self) -> bool:
        """Whether the frames are those of this thread's call; of others only the outputs are judged."""
        return self._framed == get_ident()

    @contextlib.contextmanager
    def no_replay(self) -> Iterator[None]:
        """Wait while another thread replays, and keep others from it meanwhile."""
        is_held = self._gate.acquire(timeout=_LONGEST_S)
        try:
            yield
        finally:
            if is_held:
                self._gate.release()

    def begin(self, call: Call) -> bool:
        """Begin a call of this thread; return False if another thread has the frames."""
        self._calls[get_ident()] = call
        if not self._framed or self._framed not in sys._current_frames():
            self._framed = get_ident()
        return self.has_frames

    def end(self) -> Call | None:
        """End the call of this thread; release_frames() follows."""
        return self._calls.pop(get_ident(), None)

    def release_frames(self) -> None:
        """Release the frames to the next call."""
        if self.has_frames:
            self._framed = 0

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    @contextlib.contextmanager
    def alone(self) -> Iterator[str]:
        """Keep other threads out of the model during a replay; yields the reason if not possible, else ""."""
        until = time.monotonic() + _LEAVE_S
        is_held = self._gate.acquire(timeout=_LEAVE_S)  # from here on no call begins
        try:
            while is_held and self._has_others() and time.monotonic() < until:
                time.sleep(0.01)
            if not is_held or self._has_others():
                yield "another thread is running the model"
                return
            self._replays = get_ident()
            yield ""
        finally:
            if is_held:
                self._replays = 0
                self._gate.release()

    def _has_others(self) -> bool:
        living = sys._current_frames()
        return any(thread != get_ident() and thread in living for thread in list(self._calls))
