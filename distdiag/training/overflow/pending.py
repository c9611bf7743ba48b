"""Forwards and losses that are not judged yet: those of ranks that step together wait for the optimizer's step."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distdiag.training.overflow.judge import Seen

if TYPE_CHECKING:
    from torch.nn import Module

    from distdiag.training.overflow.gradients import StepGradients
    from distdiag.training.overflow.judge import Forward, Loss
    from distdiag.training.overflow.report import When

_MOST = 16
"""Forwards that wait for a step of the optimizer; then they are judged without one."""
_FEW = 4
"""The same where the process has no optimizer."""
_MOST_BYTES = 1 << 30
"""Inputs kept for replays of waiting forwards; those of later forwards are not."""


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
        self._ddp: weakref.ref[Module] | None = None
        self._most = _MOST

    def wait(self, forward: Forward, group: Any, *, any_step: bool) -> bool:  # noqa: ANN401
        """Keep a forward until the step at which all ranks of the group meet; True if too many wait.

        Those are judged by this rank alone: the others may have made another number of them.
        """
        self.group, self._stepped = group, set()
        active = getattr(DistributedDataParallel, "_active_ddp_module", None)
        self._ddp = weakref.ref(active) if active is not None else None
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

    @property
    def ddp(self) -> Module | None:
        """The DistributedDataParallel that called the model in its last forward with others."""
        return self._ddp() if self._ddp is not None else None

    def take(self, gradients: StepGradients, when: When) -> Seen:
        """Return all that is not judged yet."""
        seen = Seen(self.forwards, self.last, self.losses, gradients, when, self.since_step)
        self.forwards, self.losses = [], []
        return seen


def _has_optimizer() -> bool:
    """Return whether an optimizer exists that may make a step; takes about 30 ms."""
    return any(issubclass(type(thing), torch.optim.Optimizer) for thing in gc.get_objects())
