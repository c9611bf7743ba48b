"""Whether something is wrong, alone or with the other ranks; what it was is seen by running the forward again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from distdiag.training import whoami
from distdiag.training.overflow import numbers, ranks, walk
from distdiag.training.overflow.detection import BACKWARD, UNSEEN, Detection, Place, from_frames
from distdiag.training.overflow.names import kind_of, named
from distdiag.training.overflow.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.nn import Module

    from distdiag.training.overflow.detection import When
    from distdiag.training.overflow.gradients import Gradient, Made
    from distdiag.training.overflow.replay import Call

_FIRST = 1_000_000
"""What a rank says when the first forward since the last step went wrong; one less for each later one."""
_IN_GRADIENTS = 1
_NOT_EACH = "With gradients='each' (--grads) the first bad one is named, before clipping spreads it."


@dataclass(frozen=True)
class Output:
    """One tensor that the model gave back; its ends are still on the device.

    The tensor itself is not kept: until the next step of the optimizer that would be the logits of many forwards.
    """

    label: str
    ends: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Forward:
    """A forward that is over and not judged yet: by its outputs, or by its frames, which came to `found`."""

    when: When
    call: Call | None
    outputs: tuple[Output, ...] = ()
    found: Detection | None = None


@dataclass(frozen=True)
class Judge:
    """Judges the forwards and the gradients of one model."""

    model: Module
    keep: int
    ignore: tuple[str, ...]
    each: bool = False

    def recorder(self, *, exact: bool) -> Recorder:
        """Give a new recorder for the model."""
        return Recorder(self.model, self.keep, self.ignore, exact=exact)

    def alone(self, waiting: Sequence[Forward], gradients: Made, when: When) -> Detection | None:
        """Judge without asking anybody; the device is waited for once."""
        ends = _ends(waiting, gradients)
        values = numbers.fetch(ends)
        if not any(one.found for one in waiting) and not numbers.any_bad(values):
            return None
        bad = next((one for one in waiting if self._is_bad(one)), None)
        if bad is not None:
            return self.again(bad, alone=True)
        return self._of_gradients(gradients, when)

    def together(
        self,
        waiting: Sequence[Forward],
        gradients: Made,
        when: When,
        group: Any,  # noqa: ANN401
    ) -> Detection | None:
        """Judge what all ranks of a group have; all of them must come here. Gives the same answer to all."""
        weights = [_FIRST - number for number, one in enumerate(waiting) for _ in range(2 * len(one.outputs))]
        weights += [_IN_GRADIENTS] * (2 * len(gradients.now))
        found = max((_FIRST - number for number, one in enumerate(waiting) if one.found), default=0)
        if not ranks.agree(_ends(waiting, gradients), weights, found, group):
            return None
        # Somewhere a number is not finite: that may be a mask, which takes a second look.
        mine = max((_FIRST - number for number, one in enumerate(waiting) if self._is_bad(one)), default=0)
        told = self._of_gradients(gradients, when)
        worst = ranks.greatest(mine or (_IN_GRADIENTS if told else 0), group)
        if worst > _IN_GRADIENTS:
            # All ranks run it again, as there may be collectives in it.
            number = _FIRST - worst
            told = self.again(waiting[number], asked=mine == worst) if number < len(waiting) else None
        return self._first_of(told, group) if worst else None

    def again(self, forward: Forward, *, asked: bool = True, alone: bool = False) -> Detection | None:
        """Run a forward again to see what went wrong in it.

        `asked`: whether this rank has seen that something did; `alone`: whether it runs without the others.
        """
        if forward.call is None:  # of a rank that only answers
            return None
        recorder = self.recorder(exact=True)
        if alone and ranks.shares_weights(self.model):
            why = "other ranks have a part of its weights, and do not run it"
        else:
            why = forward.call.again(recorder)
        if not why and recorder.bad is not None:
            return self.of_recorder(recorder, forward.when)
        if forward.found is not None or not asked:
            return forward.found
        label = next(one.label for one in forward.outputs if self._is_bad_output(one))
        hint = f"It could not be run again ({why})" if why else "When it was run again, all of it was finite"
        return self._bare(forward.when, label, UNSEEN, f"{hint}: mode='full' (--full) names the module.")

    def of_recorder(self, recorder: Recorder, when: When) -> Detection | None:
        """Say what a recorder has seen in a forward."""
        if recorder.bad is None:
            return None
        return from_frames(recorder.bad, recorder.frames, recorder.masks, when)

    def _is_bad(self, forward: Forward) -> bool:
        return forward.found is not None or any(self._is_bad_output(one) for one in forward.outputs)

    def _is_bad_output(self, one: Output) -> bool:
        least, greatest = numbers.fetch(one.ends)
        if not numbers.is_bad(least, greatest) or numbers.may_be_masked(least, greatest, one.ends[0].dtype):
            return False
        return not any(fnmatchcase(name, pattern) for name in ("", f":{one.label}") for pattern in self.ignore)

    def _of_gradients(self, gradients: Made, when: When) -> Detection | None:
        if not _bad(gradients.now):
            return None
        bad = _bad(gradients.early) or _bad(gradients.now)
        first, count = bad[0], len(_bad(gradients.now))
        hint = f"{count} of {len(gradients.now)} gradients are bad."
        module, _, weight = first.name.rpartition(".")
        kind = next((kind_of(one) for one, name in named(self.model).items() if name == module), "")
        place = Place(module, kind)
        bare = self._bare(when, f"{weight}.grad", BACKWARD, hint if self.each else f"{hint} {_NOT_EACH}")
        return replace(bare, place=place, made_by=place, tally=numbers.tally(first.tensor))

    def _bare(self, when: When, tensor: str, origin: str, hint: str) -> Detection:
        root = Place("", kind_of(self.model))
        return Detection(when, root, tensor, origin, made_by=root, tally=None, hints=(hint,))

    def _first_of(self, mine: Detection | None, group: Any) -> Detection | None:  # noqa: ANN401
        """Choose, of what the ranks have found, what came first in the forward; of equals the lowest rank's."""
        rank = whoami.rank()
        told = ranks.gather(None if mine is None else replace(mine, rank=rank, host=whoami.host(), frames=()), group)
        found = [one for one in told if one is not None]
        if not found:
            return None
        first = min(found, key=lambda one: (one.number, one.rank))
        chosen: Detection = replace(first, other_ranks=tuple(sorted(one.rank for one in found if one is not first)))
        return replace(chosen, frames=mine.frames) if mine is not None and chosen.rank == rank else chosen


def outputs_of(value: object) -> tuple[Output, ...]:
    """Start to look at what a model gave back."""
    found = ((label, numbers.start(tensor)) for label, tensor in walk.tensors(value, "output"))
    return tuple(Output(label, one[1]) for label, one in found if not isinstance(one, str))


def _bad(gradients: Sequence[Gradient]) -> list[Gradient]:
    values = numbers.fetch([end for one in gradients for end in one.ends])
    ends = zip(gradients, values[::2], values[1::2])
    return [one for one, least, greatest in ends if numbers.is_bad(least, greatest)]


def _ends(waiting: Sequence[Forward], gradients: Made) -> list[Tensor]:
    ends = [end for forward in waiting for one in forward.outputs for end in one.ends]
    return ends + [end for one in gradients.now for end in one.ends]
