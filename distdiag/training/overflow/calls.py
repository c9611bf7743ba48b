"""The calls of a model: which threads are in it, and forwards and losses that are not judged yet.

Those of ranks that step together wait for the optimizer's step.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from threading import Condition, get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from distdiag.training.overflow.judge import Seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.training.overflow.gradients import StepGradients
    from distdiag.training.overflow.judge import Forward, Loss
    from distdiag.training.overflow.replay import Call
    from distdiag.training.overflow.report import When

_LONGEST_S = 60.0
"""How long a thread waits while another replays."""
_LEAVE_S = 2.0
"""How long a replay waits for the calls of other threads to end."""
_MOST = 16
"""Forwards that wait for a step of the optimizer; then they are judged without one."""
_FEW = 4
"""The same where the process has no optimizer."""
_MOST_BYTES = 1 << 30
"""Inputs kept for replays of waiting forwards; those of later forwards are not."""


class Callers:
    """The running calls of one model, by thread id; 0 is no thread."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._gate = Condition()
        self._replays = self._framed = 0

    @property
    def replays(self) -> bool:
        """Whether this thread is in a replay, which is not the script's own call."""
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
        """Begin a call of this thread; False if another one has the frames, and this call is judged by its outputs."""
        self._calls[get_ident()] = call
        with self._gate:
            if not self._framed or self._framed not in sys._current_frames():
                self._framed = get_ident()
            return self.has_frames

    def end(self) -> Call | None:
        """End the call of this thread; release_frames() follows."""
        return self._calls.pop(get_ident(), None)

    def release_frames(self) -> None:
        """Let the next call have the frames."""
        if self.has_frames:
            self._framed = 0

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    @contextlib.contextmanager
    def alone(self) -> Iterator[str]:
        """Keep other threads out of the model during a replay; yields the reason where that is not possible."""
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
        """Return whether a living thread other than this one has begun a call."""
        living = sys._current_frames()
        return any(thread != me and thread in living for thread in list(self._calls))


class Pending:
    """Since the last judgement. `last`: the last forward with gradients, until a step has changed the weights.

    `since_step` counts these. `is_alone`: the last forward was judged at once. `group`: the ranks that this one steps
    with, as its last forward with others showed.
    """

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.losses: list[Loss] = []
        self.last: Forward | None = None
        self.since_step = 0
        self.is_alone = True
        self.group: Any = None
        self._stepped: set[int] = set()
        """Optimizers that have made a step since that forward."""
        self._most = _MOST

    def wait(self, forward: Forward, group: Any, *, any_step: bool) -> bool:  # noqa: ANN401
        """Keep a forward until the step at which all ranks of the group meet; True if too many wait.

        Those are judged by this rank alone: the others may have made another number of them.
        """
        self.group, self._stepped = group, set()
        self.forwards.append(forward)
        kept = [forward.call for forward in self.forwards if forward.call is not None]
        if kept and sum(call.kept_bytes for call in kept) > _MOST_BYTES:
            kept[-1].forget()
        if len(self.forwards) == _FEW and not any_step:
            self._most = _MOST if _has_optimizer() else _FEW
        return len(self.forwards) >= self._most

    def add_losses(self, losses: list[Loss]) -> None:
        """Keep losses for the step."""
        self.losses = [*self.losses[1 - _MOST :], *losses]

    def begin_step(self, optimizer: object) -> None:
        """Leave the group where an optimizer steps again without a forward with others: the step may be this rank's."""
        if id(optimizer) in self._stepped:
            self.group = None
        self._stepped.add(id(optimizer))

    def end_step(self) -> None:
        """Note that the weights have changed."""
        self.last, self.since_step = None, 0

    def take(self, gradients: StepGradients, when: When) -> Seen:
        """Return all that is not judged yet."""
        seen = Seen(self.forwards, self.last, self.losses, gradients, when, self.since_step)
        self.forwards, self.losses = [], []
        return seen


def _has_optimizer() -> bool:
    """Return whether an optimizer exists that may make a step; takes about 30 ms."""
    return any(issubclass(type(thing), torch.optim.Optimizer) for thing in gc.get_objects())
