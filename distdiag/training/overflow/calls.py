"""Threads that run a model, and the thread that replays it."""

from __future__ import annotations

import contextlib
import sys
from threading import Condition, get_ident
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.training.overflow.replay import Call

_LONGEST_S = 60.0
"""How long a thread waits while another replays."""
_LEAVE_S = 2.0
"""How long a replay waits for the calls of other threads to end."""


class Callers:
    """The running calls of one model, by thread id; 0 is no thread."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._gate = Condition()
        self._replays = self._framed = 0

    @property
    def replays(self) -> bool:
        """Whether this thread replays, so that its call is not the script's."""
        return self._replays == get_ident()

    @property
    def has_frames(self) -> bool:
        """Whether the frames are those of this thread's call."""
        return self._framed == get_ident()

    @property
    def is_inside(self) -> bool:
        """Whether this thread has begun a call."""
        return get_ident() in self._calls

    def wait(self) -> None:
        """Wait while another thread replays."""
        if self._replays:
            with self._gate:
                self._gate.wait_for(lambda: not self._replays, _LONGEST_S)

    def begin(self, call: Call) -> bool:
        """Begin a call of this thread; return False if another thread has the frames.

        Then only the outputs of this call are judged.
        """
        self._calls[get_ident()] = call
        with self._gate:
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
        me = get_ident()
        with self._gate:
            self._gate.wait_for(lambda: not self._replays, _LEAVE_S)
            why = "another thread is running the model" if self._replays else ""
            if not why:
                self._replays = me  # from here on no call begins
                until = monotonic() + _LEAVE_S
                while self._has_others(me) and monotonic() < until:
                    self._gate.wait(0.01)
                if self._has_others(me):
                    self._replays, why = 0, "another thread is running the model"
                    self._gate.notify_all()
        try:
            yield why
        finally:
            if not why:
                with self._gate:
                    self._replays = 0
                    self._gate.notify_all()

    def _has_others(self, me: int) -> bool:
        living = sys._current_frames()
        return any(thread != me and thread in living for thread in list(self._calls))
