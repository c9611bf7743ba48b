"""Whether something is wrong, alone or with the other ranks; what it was is seen by running the forward again."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from distdiag.facts.machine import host_name
from distdiag.facts.rank_identity import own_rank
from distdiag.training.overflow import extrema, nested, ranks
from distdiag.training.overflow.cause import except_for_masks, from_frames, how
from distdiag.training.overflow.detection import BACKWARD, LOSS, UNSEEN, Detection, Place
from distdiag.training.overflow.fixes import fix_of
from distdiag.training.overflow.modules import kind_of, named
from distdiag.training.overflow.origins import Origins
from distdiag.training.overflow.recorder import Recorder
from distdiag.training.overflow.replay import Terms
from distdiag.training.overflow.script import is_of_script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    from torch import Tensor
    from torch.nn import Module

    from distdiag.training.overflow.backward import Gradient, StepGradients
    from distdiag.training.overflow.detection import When
    from distdiag.training.overflow.replay import Call


_FIRST = 1_000_000
"""What a rank says when the first forward since the last step went wrong; one less for each later one."""
_IN_LOSS, _IN_GRADIENTS = 2, 1
_NOT_EACH = "With gradients='each' the first bad gradient is named, before clipping spreads it."
_OPERATIONS = 8
_MASKED = "masked: "
_INSTEAD = {"log": "Where it is of a softmax: log_softmax."}
_FINITE = "All module inputs and outputs in the forward were finite"


@dataclass(frozen=True)
class ModelOutput:
    """One tensor that the model gave back; its extrema are still on the device.

    The tensor itself is not kept: until the next step of the optimizer that would be the logits of many forwards.
    """

    label: str
    extrema: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Forward:
    """A forward that is over and not judged yet: by its outputs, or by its frames, which came to `found`."""

    when: When
    call: Call | None
    outputs: tuple[ModelOutput, ...] = ()
    found: Detection | None = None


@dataclass(frozen=True)
class Loss:
    """What backward was called on; its extrema are still on the device."""

    tensor: Tensor
    extrema: tuple[Tensor, Tensor]
    when: When
    hints: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """All that came since the last judgement; `last` is the last forward, which may have been judged before."""

    forwards: Sequence[Forward]
    last: Forward | None
    losses: Sequence[Loss]
    gradients: StepGradients
    when: When
    since_step: int = 1
    """So many forwards there were since the last step of the optimizer; only the last can be run again."""

    def extrema(self) -> list[Tensor]:
        """List what is to be fetched: of the forwards, the losses, the gradients."""
        values = [value for forward in self.forwards for output in forward.outputs for value in output.extrema]
        values += [value for loss in self.losses for value in loss.extrema]
        return values + [value for gradient in self.gradients.now for value in gradient.extrema]

    def weights(self) -> list[int]:
        """Describe how bad it is, for each of these, if it is not finite: what came first is the worst."""
        weights = [
            _FIRST - number for number, forward in enumerate(self.forwards) for _ in range(2 * len(forward.outputs))
        ]
        weights += [_IN_LOSS] * (2 * len(self.losses))
        return weights + [_IN_GRADIENTS] * (2 * len(self.gradients.now))


@dataclass(frozen=True)
class Judge:
    """Judges the forwards, the losses and the gradients of one model."""

    model: Module
    sharing: ranks.Sharing
    keep: int
    ignore: tuple[str, ...]
    alone_in_it: Callable[[], AbstractContextManager[str]]
    """Keeps other threads out of the model; gives a reason where that is not possible."""
    each: bool = False
    goes_on: bool = True

    def recorder(self, *, exact: bool) -> Recorder:
        """Return a new recorder for the model."""
        return Recorder(self.model, self.keep, self.ignore, exact=exact)

    def alone(self, seen: Seen) -> Detection | None:
        """Judge without asking anybody; the device is waited for once."""
        values = extrema.fetch(seen.extrema())
        if not any(forward.found for forward in seen.forwards) and not extrema.any_bad(values):
            return None
        bad = next((forward for forward in seen.forwards if self._is_bad(forward)), None)
        if bad is not None:
            return self._of_forward(bad, *self._again(bad, self._terms(None)), asked=True)
        found = self._of_loss(seen) or self._of_gradients(seen.gradients, seen.when)
        return None if found is None else self._unless_in_forward(found, seen, *self._last_again(seen))

    def inference(self, forward: Forward, known: set[str]) -> tuple[Detection | None, str]:
        """Judge a forward that no loss and no backward will tell of, or warn of what is not finite in its output.

        `known`: outputs of which that was looked into before.
        """
        values = extrema.fetch([value for output in forward.outputs for value in output.extrema])
        if forward.found is None and not extrema.any_bad(values):
            return None, ""
        if self._is_bad(forward):
            return self._of_forward(forward, *self._again(forward, self._terms(None)), asked=True), ""
        new = [output.label for output in forward.outputs if output.label not in known and self._is_masked(output)]
        known.update(new)
        return None, self._minus_inf(forward, new) if new else ""

    def _is_masked(self, output: ModelOutput) -> bool:
        least, greatest = extrema.fetch(output.extrema)
        return extrema.is_bad(least, greatest) and not self._is_ignored(output)

    def _minus_inf(self, forward: Forward, labels: Sequence[str]) -> str:
        """Run it again to see whether -inf in an output was filled in; say so if not, or that it is not known."""
        when, model = forward.when, Place("", kind_of(self.model))
        where = f"{when}: -inf in `{labels[0]}` of {model}"
        recorder = self.recorder(exact=True)
        origins = Origins(recorder)
        if forward.call is None:
            return ""
        with self.alone_in_it() as crowded:
            why = crowded or forward.call.again(recorder, self._terms(None), origins)
        if why:
            return (
                f"{where}: it is unknown whether it is intended, as in masks: the forward cannot be replayed ({why})."
            )
        for label, tensor in nested.tensors(recorder.output, "output"):
            maker = origins.maker_of(tensor) if label in labels else None
            if maker is not None:
                where = where.replace(f"`{labels[0]}`", f"`{label}`")
                instead = _INSTEAD.get(maker.operation, "")
                return f"{where} is not a mask: {how(maker)} produced it from finite values. {instead}".rstrip()
        return ""

    def together(self, seen: Seen, group: Any) -> Detection | None:  # noqa: ANN401
        """Judge what all ranks of a group have; all of them must come here. Returns the same to all."""
        known = max((_FIRST - number for number, forward in enumerate(seen.forwards) if forward.found), default=0)
        if not ranks.agree(seen.extrema(), seen.weights(), known, group):
            return None
        # Somewhere a number is not finite: that may be a mask, which takes a second look.
        mine = max(
            (_FIRST - number for number, forward in enumerate(seen.forwards) if self._is_bad(forward)), default=0
        )
        found = self._of_loss(seen) or self._of_gradients(seen.gradients, seen.when)
        mine = mine or (0 if found is None else _IN_LOSS if found.origin == LOSS else _IN_GRADIENTS)
        (worst,) = ranks.greatest([mine], group)
        if not worst:
            return None
        if worst > _IN_LOSS:
            number = _FIRST - worst
            forward = seen.forwards[number] if number < len(seen.forwards) else None
            again = self._again_together(forward, number, group)
            found = None if forward is None else self._of_forward(forward, *again, asked=mine == worst)
        else:
            again = self._again_together(seen.last, len(seen.forwards), group)
            if found is not None or again[0] is not None:
                found = self._unless_in_forward(found, seen, *again)
        return self._first_of(found, group)

    def _terms(self, group: Any) -> Terms:  # noqa: ANN401
        return Terms(ranks.members(group), self.sharing.is_shared, self.goes_on)

    def _again_together(self, forward: Forward | None, number: int, group: Any) -> tuple[Detection | None, str]:  # noqa: ANN401
        """Run a forward again, if all ranks can: there may be collectives in it."""
        terms = self._terms(group)
        why = "the model no longer exists" if forward is None or forward.call is None else forward.call.why_not(terms)
        cannot, most, least = ranks.greatest([int(bool(why)), number, -number], group)
        if cannot or most != -least:
            return None, why or "another rank cannot replay its forward"
        return self._again(forward, terms)

    def _last_again(self, seen: Seen) -> tuple[Detection | None, str]:
        return self._again(seen.last, self._terms(None))

    def _again(self, forward: Forward | None, terms: Terms) -> tuple[Detection | None, str]:
        """Run a forward again: what went wrong in it, or why that is not known; neither, if all of it is finite."""
        if forward is None or forward.call is None:
            return None, "the model no longer exists"
        recorder = self.recorder(exact=True)
        origins = Origins(recorder)
        with self.alone_in_it() as crowded:
            why = crowded or forward.call.again(recorder, terms, origins)
        if why or recorder.bad is not None:
            return (None, why) if why else (self.of_recorder(recorder, forward.when, origins), "")
        masked = except_for_masks(recorder.masks, origins)
        return None, masked and f"{_MASKED}{masked}"

    def _of_forward(self, forward: Forward, found: Detection | None, why: str, *, asked: bool) -> Detection | None:
        """Describe what went wrong in a forward; `asked`: whether its outputs, on this rank, were bad."""
        found = found or forward.found
        if found is not None or not asked:
            return found
        label = next(output.label for output in forward.outputs if self._is_bad_output(output))
        why = "" if why.startswith(_MASKED) else why
        hint = f"The forward cannot be replayed ({why})" if why else "When replayed, everything was finite"
        return self._bare(forward.when, label, UNSEEN, f"{hint}: mode='full' (--full) finds the module.")

    def _unless_in_forward(
        self, detection: Detection | None, seen: Seen, found: Detection | None, why: str
    ) -> Detection | None:
        """Describe what is wrong with a loss or with gradients, or where in the forward that began."""
        if found is not None:
            after = "loss" if detection is not None and detection.origin == LOSS else "gradients"
            hint = f"No output of the model contains it, but the {after} do{'es' * (after == 'loss')}."
            return replace(found, hints=(*found.hints, hint))
        assert detection is not None
        masked = why.removeprefix(_MASKED) if why.startswith(_MASKED) else ""
        why = "" if masked else why
        if detection.origin == LOSS:
            return replace(
                detection, seen=_of_loss("The model's output was finite" if why else _finite(1, masked), masked)
            )
        return replace(
            detection, seen=_of_backward(_finite(seen.since_step, masked), seen.since_step, why, detection.number == 0)
        )

    def of_recorder(self, recorder: Recorder, when: When, origins: Origins | None = None) -> Detection | None:
        """Describe what a recorder has seen in a forward."""
        if recorder.bad is None:
            return None
        return from_frames(recorder.bad, recorder.frames, recorder.masks, when, origins)

    def _is_bad(self, forward: Forward) -> bool:
        return forward.found is not None or any(self._is_bad_output(output) for output in forward.outputs)

    def _is_bad_output(self, output: ModelOutput) -> bool:
        least, greatest = extrema.fetch(output.extrema)
        if not extrema.is_bad(least, greatest) or extrema.may_be_masked(least, greatest, output.extrema[0].dtype):
            return False
        return not self._is_ignored(output)

    def _is_ignored(self, output: ModelOutput) -> bool:
        return any(fnmatchcase(name, pattern) for name in ("", f":{output.label}") for pattern in self.ignore)

    def _of_loss(self, seen: Seen) -> Detection | None:
        for loss in seen.losses:
            least, greatest = extrema.fetch(loss.extrema)
            dtype = loss.extrema[0].dtype
            if extrema.is_bad(least, greatest) and not extrema.may_be_masked(least, greatest, dtype):
                bare = self._bare(loss.when, "loss", LOSS, "")
                return replace(bare, tally=extrema.tally(loss.tensor), hints=loss.hints)
        return None

    def _of_gradients(self, gradients: StepGradients, when: When) -> Detection | None:
        if not _bad_gradients(gradients.now):
            return None
        early = _bad_gradients(gradients.early)
        first, count = (early or _bad_gradients(gradients.now))[0], len(_bad_gradients(gradients.now))
        hint = f"{count} of {len(gradients.now)} gradients contain nan or inf."
        module, _, weight = first.name.rpartition(".")
        kind = next((kind_of(submodule) for submodule, name in named(self.model).items() if name == module), "")
        place = Place(module, kind)
        bare = self._bare(when, f"{weight}.grad", BACKWARD, hint if self.each else f"{hint} {_NOT_EACH}")
        return replace(bare, place=place, made_by=place, tally=extrema.tally(first.tensor), number=int(not early))

    def _bare(self, when: When, tensor: str, origin: str, hint: str) -> Detection:
        root = Place("", kind_of(self.model))
        fix = fix_of(origin, None, None, root, root)
        return Detection(when, root, tensor, origin, made_by=root, tally=None, hints=(hint,) if hint else (), fix=fix)

    def _first_of(self, mine: Detection | None, group: Any) -> Detection | None:  # noqa: ANN401
        """Choose, of what the ranks have found, what came first; of equals the lowest rank's."""
        rank = own_rank()
        answers = ranks.gather(None if mine is None else replace(mine, rank=rank, host=host_name(), frames=()), group)
        found = [answer for answer in answers if answer is not None]
        if not found:
            return None
        first = min(found, key=lambda detection: (_ORDER.get(detection.origin, 0), detection.number, detection.rank))
        alike = [
            detection
            for detection in found
            if _ORDER.get(detection.origin, 0) == _ORDER.get(first.origin, 0) and detection is not first
        ]
        chosen: Detection = replace(first, other_ranks=tuple(sorted(detection.rank for detection in alike)))
        return replace(chosen, frames=mine.frames) if mine is not None and chosen.rank == rank else chosen


_ORDER = {LOSS: 1, BACKWARD: 2}


def _finite(forwards: int, masked: str) -> str:
    """Describe what is known to be finite: what modules do between is not seen, nor other forwards than the last."""
    text = _FINITE if forwards < 2 else f"{_FINITE}, in the last of {forwards} forwards since the last step"
    return f"{text}, except for {masked}" if masked else text


def _of_loss(finite: str, masked: str) -> str:
    """Describe where a loss that is not finite may have been made."""
    made = "the script produced it between there and the loss"
    return f"{finite}: it came from there, or {made}." if masked else f"{finite}: {made}."


def _of_backward(finite: str, forwards: int, why: str, is_first: bool) -> str:
    """Describe where a gradient may have been made."""
    if why:
        return (
            "It was produced in the forward, the loss or backward; which is unknown, as the forward cannot "
            f"be replayed ({why})."
        )
    before = ", in an earlier forward" if forwards > 1 else ""
    if is_first:
        where = f"in the loss{before}, between modules or in backward, at this layer or a later layer"
        return f"{finite}, and so was each gradient before: it was produced {where}."
    return f"{finite}: it was produced in the loss{before}, between modules or in backward."


def losses_of(tensors: object, when: When) -> list[Loss]:
    """Start to look at what backward is called on, and say where that is and how it was calculated."""
    losses = []
    for _, tensor in nested.tensors(tensors, "loss"):
        found = extrema.start(tensor.detach())
        if not isinstance(found, str):
            losses.append(Loss(tensor.detach(), found[1], when, (*_place_of_call(), *_calculation(tensor))))
    return losses


def _place_of_call() -> list[str]:
    """Name the line of the script that calls backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_script(file):
            return [f"backward is called in {frame.f_code.co_name}, {file}:{frame.f_lineno}."]
        frame = frame.f_back
    return []


def _calculation(tensor: Tensor) -> list[str]:
    """Name the operations that came last, from the tensor backwards, along the first input of each."""
    names: list[str] = []
    node = tensor.grad_fn
    while node is not None and len(names) < _OPERATIONS and "AccumulateGrad" not in node.name():
        names.append(node.name().removesuffix("0").removesuffix("Backward"))
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return [f"It is the output of: {' <- '.join(names)}."] if names else []


def outputs_of(value: object) -> tuple[ModelOutput, ...]:
    """Start to look at what a model gave back."""
    found = ((label, extrema.start(tensor)) for label, tensor in nested.tensors(value, "output"))
    return tuple(ModelOutput(label, pair[1]) for label, pair in found if not isinstance(pair, str))


def _bad_gradients(gradients: Sequence[Gradient]) -> list[Gradient]:
    values = extrema.fetch([value for gradient in gradients for value in gradient.extrema])
    judged = zip(gradients, values[::2], values[1::2])
    return [gradient for gradient, least, greatest in judged if extrema.is_bad(least, greatest)]
