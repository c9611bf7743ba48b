"""Whether a forward, a loss or gradients are bad, alone or with the other ranks; a replay finds the module."""

from __future__ import annotations

import gc
import sys
from dataclasses import field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distdiag.facts.machine import host_name
from distdiag.facts.process.rank_identity import own_rank
from distdiag.record import record
from distdiag.training.overflow import extrema, modules, ranks
from distdiag.training.overflow.cause import FIXES, Origins, except_for_masks, from_frames, how
from distdiag.training.overflow.frames import Found, Recorder
from distdiag.training.overflow.gradients import NO_GRADIENTS, StepGradients
from distdiag.training.overflow.modules import kind_of, named
from distdiag.training.overflow.replay import Terms
from distdiag.training.overflow.report import BACKWARD, LOSS, UNSEEN, WEIGHTS, Detection, Place, is_of_script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    from torch import Tensor
    from torch.nn import Module

    from distdiag.training.overflow.extrema import Watched
    from distdiag.training.overflow.replay import Call
    from distdiag.training.overflow.report import When


_FIRST = 1_000_000
"""The weight of the first forward since the last step; one less for each later one."""
_IN_LOSS, _IN_GRADIENTS = 2, 1
_MOST = 16
"""Limit on forwards pending until an optimizer step; beyond it they are judged without one."""
_FEW = 4
"""The same where the process has no optimizer."""
_MOST_BYTES = 1 << 30
"""Inputs kept for replays of waiting forwards; those of later forwards are not."""
_NOT_EACH = "With gradients='each' the first bad gradient is named, before clipping spreads it."
_OPERATIONS = 8
_INSTEAD = {"log": "Where it is of a softmax: log_softmax."}
_TEST_DEVICE = (
    "call sync_check to find the step in which the replicas diverge; test whether the device computes wrongly: "
    "distdiag gpu-test --compute 60s"
)
_FINITE = "All module inputs and outputs in the forward were finite"
_ORDER = {LOSS: 1, BACKWARD: 2}


@record
class Forward:
    """A finished forward not yet judged; `found`: the result of its frames (mode="full")."""

    when: When
    call: Call | None
    outputs: Sequence[Watched] = ()
    found: Found | None = None


class Loss(NamedTuple):
    """A tensor passed to backward."""

    value: Watched
    when: When
    hints: tuple[str, ...]


class Seen(NamedTuple):
    """Everything since the last judgement; `last` is the last forward, possibly judged before.

    `since_step`: forwards since the last optimizer step, of which only the last can be replayed.
    """

    when: When
    last: Forward | None
    forwards: Sequence[Forward] = ()
    losses: Sequence[Loss] = ()
    gradients: StepGradients = NO_GRADIENTS
    since_step: int = 1

    def weighted(self) -> list[tuple[Tensor, int]]:
        """Return the extrema to fetch, each with its weight: the earlier in the step, the larger."""
        found = [
            (value, _FIRST - number)
            for number, forward in enumerate(self.forwards)
            for output in forward.outputs
            for value in output.extrema
        ]
        found += [(value, _IN_LOSS) for loss in self.losses for value in loss.value.extrema]
        return found + [(value, _IN_GRADIENTS) for gradient in self.gradients.now for value in gradient.extrema]


class Pending:
    """Forwards and losses since the last judgement.

    `last`: the last forward with gradients, until a step changes the weights; `since_step` counts these. `is_alone`:
    the last forward was judged at once. `group`: the ranks that step with this rank, as observed in its last forward
    with others.
    """

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.losses: list[Loss] = []
        self.last: Forward | None = None
        self.since_step = 0
        self.is_alone = True
        self.group: Any = None
        self._stepped: set[int] = set()
        """Optimizers that stepped since that forward."""
        self._most = _MOST

    def wait(self, forward: Forward, group: Any, *, any_step: bool) -> bool:  # noqa: ANN401
        """Keep a forward until the step at which all ranks of the group meet; return True at the limit.

        The caller then judges them on this rank alone: other ranks may have run another number of forwards.
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
        """Leave the group if an optimizer steps twice without a forward with others: it may step on this rank only."""
        if id(optimizer) in self._stepped:
            self.group = None
        self._stepped.add(id(optimizer))

    def end_step(self) -> None:
        """Note that the weights have changed."""
        self.last, self.since_step = None, 0

    def take(self, when: When, gradients: StepGradients = NO_GRADIENTS) -> Seen:
        """Return and clear the pending forwards and losses."""
        seen = Seen(when, self.last, self.forwards, self.losses, gradients, self.since_step)
        self.forwards, self.losses = [], []
        return seen


def _has_optimizer() -> bool:
    """Return whether any optimizer exists; takes about 30 ms."""
    return any(issubclass(type(thing), torch.optim.Optimizer) for thing in gc.get_objects())


class Replayed(NamedTuple):
    """A detection, or why replay is impossible (`why`); without both, all values but `masked` were finite."""

    found: Found | None = None
    why: str = ""
    masked: str = ""


_GONE = "the model no longer exists"


@record
class Judge:
    """Judges one model. `keep`: frames to show; `alone_in_it`: excludes other threads, or yields the reason why not."""

    model: Module
    sharing: ranks.Sharing
    keep: int
    ignore: tuple[str, ...]
    alone_in_it: Callable[[], AbstractContextManager[str]]
    each: bool = False
    goes_on: bool = True
    known_masks: set[str] = field(default_factory=set)
    """Outputs in inference with -inf already examined."""

    def recorder(self, *, exact: bool) -> Recorder:
        """Return a new recorder for the model."""
        return Recorder(self.model, self.keep, self.ignore, exact=exact)

    def inference(self, forward: Forward) -> tuple[Found | None, str]:
        """Judge a forward without loss and backward; or return a warning of -inf in its outputs."""
        values = extrema.fetch([value for output in forward.outputs for value in output.extrema])
        if forward.found is None and not extrema.any_bad(values):
            return None, ""
        if self._is_bad(forward):
            return self._of_forward(forward, self._replay(forward, 0, None), asked=True), ""
        bad = (output for output in forward.outputs if extrema.any_bad(extrema.fetch(output.extrema)))
        new = [output.label for output in bad if output.label not in self.known_masks and not self._is_ignored(output)]
        self.known_masks.update(new)
        return None, self._minus_inf(forward, new) if new else ""

    def _minus_inf(self, forward: Forward, labels: Sequence[str]) -> str:
        """Return a warning if a replay shows calculated, not filled-in, -inf in an output, or cannot decide."""
        if forward.call is None:
            return ""
        where = f"{forward.when}: -inf in `{{}}` of {Place('', kind_of(self.model))}"
        recorder = self.recorder(exact=True)
        origins = Origins(recorder)
        with self.alone_in_it() as crowded:
            why = crowded or forward.call.again(
                recorder, Terms(is_shared=self.sharing.is_shared, goes_on=self.goes_on), origins
            )
        if why:
            unknown = "it is unknown whether it is intended, as in masks: the forward cannot be replayed"
            return f"{where.format(labels[0])}: {unknown} ({why})."
        for label, tensor in modules.tensors(recorder.output, "output"):
            maker = origins.maker_of(tensor) if label in labels else None
            if maker is not None:
                text = f"{where.format(label)} is not a mask: {how(maker)} produced it from finite values."
                return f"{text} {_INSTEAD.get(maker.operation, '')}".rstrip()
        return ""

    def judge(self, seen: Seen, group: Any = None) -> Found | None:  # noqa: ANN401
        """Judge alone, or with all ranks of a group, which must all call this; returns the same on all."""
        known = max((_FIRST - number for number, forward in enumerate(seen.forwards) if forward.found), default=0)
        if not ranks.agree(seen.weighted(), known, group):
            return None
        # Some value is not finite: nan, inf, or only a mask.
        bad = [_FIRST - number for number, forward in enumerate(seen.forwards) if self._is_bad(forward)]
        found = self._of_loss(seen) or self._of_gradients(seen.gradients, seen.when)
        mine = max(bad, default=0)
        mine = mine or (0 if found is None else _IN_LOSS if found.detection.origin == LOSS else _IN_GRADIENTS)
        (worst,) = ranks.greatest([mine], group)
        if not worst:
            return None
        if worst > _IN_LOSS:
            number = _FIRST - worst
            forward = seen.forwards[number] if number < len(seen.forwards) else None
            replayed = self._replay(forward, number, group)
            found = None if forward is None else self._of_forward(forward, replayed, asked=mine == worst)
        else:
            replayed = self._replay(seen.last, len(seen.forwards), group)
            if found is not None or replayed.found is not None:
                found = self._unless_in_forward(found, seen, replayed)
        return _first_of(found, group, replicas=not self.sharing.is_shared)

    def of_recorder(self, recorder: Recorder, when: When, origins: Origins | None = None) -> Found | None:
        """Describe the first bad line of a recorded forward."""
        if recorder.bad is None:
            return None
        return from_frames(recorder.bad, recorder.frames, recorder.masks, when, origins)

    def _replay(self, forward: Forward | None, number: int, group: Any) -> Replayed:  # noqa: ANN401
        """Replay a forward if all ranks of the group can, since it may contain collectives."""
        terms = Terms(ranks.members(group), self.sharing.is_shared, self.goes_on)
        why = _GONE if forward is None or forward.call is None else forward.call.why_not(terms)
        cannot, most, least = ranks.greatest([int(bool(why)), number, -number], group)
        if forward is None or forward.call is None or cannot or most != -least:
            return Replayed(why=why or "another rank cannot replay its forward")
        recorder = self.recorder(exact=True)
        origins = Origins(recorder)
        with self.alone_in_it() as crowded:
            why = crowded or forward.call.again(recorder, terms, origins)
        if why:
            return Replayed(why=why)
        found = self.of_recorder(recorder, forward.when, origins)
        return Replayed(found, masked="" if found else except_for_masks(recorder.masks, origins))

    def _of_forward(self, forward: Forward, replayed: Replayed, *, asked: bool) -> Found | None:
        """Describe a bad forward; `asked`: its outputs were bad on this rank."""
        found = replayed.found or forward.found
        if found is not None or not asked:
            return found
        label = next(output.label for output in forward.outputs if self._is_bad_output(output))
        finite = "When replayed, everything was finite"
        hint = f"The forward cannot be replayed ({replayed.why})" if replayed.why else finite
        return self._bare(forward.when, label, UNSEEN, f"{hint}: mode='full' (--full) finds the module.")

    def _unless_in_forward(self, found: Found | None, seen: Seen, replayed: Replayed) -> Found | None:
        """Describe a bad loss or gradient, or its origin in the forward."""
        is_loss = found is not None and found.detection.origin == LOSS
        if replayed.found is not None:
            hint = f"No output of the model contains it, but the {'loss does' if is_loss else 'gradients do'}."
            return replayed.found.but(hints=(*replayed.found.detection.hints, hint))
        assert found is not None
        describe = _of_loss if is_loss else _of_backward
        return found.but(why=describe(seen.since_step, replayed, found.detection.number == 0))

    def _is_bad(self, forward: Forward) -> bool:
        return forward.found is not None or any(self._is_bad_output(output) for output in forward.outputs)

    def _is_bad_output(self, output: Watched) -> bool:
        return output.is_bad and not self._is_ignored(output)

    def _is_ignored(self, output: Watched) -> bool:
        return any(fnmatchcase(name, pattern) for name in ("", f":{output.label}") for pattern in self.ignore)

    def _of_loss(self, seen: Seen) -> Found | None:
        loss = next((loss for loss in seen.losses if loss.value.is_bad), None)
        if loss is None:
            return None
        return self._bare(loss.when, "loss", LOSS, *loss.hints, tensor=loss.value.tensor)

    def _of_gradients(self, gradients: StepGradients, when: When) -> Found | None:
        bad = _bad_gradients(gradients.now)
        if not bad:
            return None
        early = _bad_gradients(gradients.early)
        first = (early or bad)[0]
        hint = f"{len(bad)} of {len(gradients.now)} gradients contain nan or inf."
        name, _, weight = first.label.rpartition(".")
        kind = next((kind_of(module) for module, other in named(self.model).items() if other == name), "")
        hint = hint if self.each else f"{hint} {_NOT_EACH}"
        found = self._bare(when, f"{weight}.grad", BACKWARD, hint, tensor=first.tensor, place=Place(name, kind))
        return found.but(number=int(not early))

    def _bare(
        self,
        when: When,
        label: str,
        origin: str,
        *hints: str,
        tensor: Tensor | None = None,
        place: Place | None = None,
    ) -> Found:
        """Make a detection without frames, in the model itself by default."""
        module, kind = place or Place("", kind_of(self.model))
        tally = None if tensor is None else extrema.tally(tensor)
        detection = Detection(
            "",
            *when,
            module=module,
            module_class=kind,
            tensor=label,
            origin=origin,
            made_by=module,
            made_by_class=kind,
            what=tally.kinds if tally else "",
            hints=hints,
            fix=FIXES.get(origin, ""),
            tally=tally,
        )
        return Found(detection)


def _first_of(mine: Found | None, group: Any, *, replicas: bool) -> Found | None:  # noqa: ANN401
    """Return the earliest detection, the lowest rank's among equals. `replicas`: ranks hold equal weights."""
    if group is None:
        return mine
    rank = own_rank()
    answers = ranks.gather(None if mine is None else replace(mine.detection, rank=rank, host=host_name()), group)
    found: list[Detection] = [answer for answer in answers if answer is not None]
    if not found:
        return None
    first = min(found, key=lambda each: (_ORDER.get(each.origin, 0), each.number, each.rank))
    alike = [each for each in found if _ORDER.get(each.origin) == _ORDER.get(first.origin) and each is not first]
    others = tuple(sorted(each.rank for each in alike if each.rank is not None))
    if replicas and first.origin == WEIGHTS and len(alike) + 1 < len(answers):
        hint = (
            f"The same weights are finite on {len(answers) - len(alike) - 1} of {len(answers)} ranks: replicas differ."
        )
        first = replace(first, hints=(*first.hints, hint), fix=_TEST_DEVICE)
    return Found(replace(first, other_ranks=others), mine.frames if mine is not None and first.rank == rank else ())


def _finite(forwards: int, masked: str) -> str:
    """State the observed finite values: module outputs of the last forward."""
    text = _FINITE if forwards < 2 else f"{_FINITE}, in the last of {forwards} forwards since the last step"
    return f"{text}, except for {masked}" if masked else text


def _of_loss(forwards: int, replayed: Replayed, is_first: bool) -> str:
    finite = "The model's output was finite" if replayed.why else _finite(1, replayed.masked)
    made = "the script produced it between there and the loss"
    return f"{finite}: it came from there, or {made}." if replayed.masked else f"{finite}: {made}."


def _of_backward(forwards: int, replayed: Replayed, is_first: bool) -> str:
    if replayed.why:
        return (
            "It was produced in the forward, the loss or backward; which is unknown, as the forward cannot "
            f"be replayed ({replayed.why})."
        )
    finite, before = _finite(forwards, replayed.masked), ", in an earlier forward" if forwards > 1 else ""
    if is_first:
        where = f"in the loss{before}, between modules or in backward, at this layer or a later layer"
        return f"{finite}, and so was each gradient before: it was produced {where}."
    return f"{finite}: it was produced in the loss{before}, between modules or in backward."


def losses_of(tensors: object, when: When) -> list[Loss]:
    """Start to read the tensors that backward is called on; note the line of the call and the last operations."""
    given = dict(modules.tensors(tensors, "loss"))
    read = extrema.watch(((label, tensor.detach()) for label, tensor in given.items()), keep=True)
    return [Loss(value, when, (*_place_of_call(), *_calculation(given[value.label]))) for value in read]


def _place_of_call() -> list[str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_script(file):
            return [f"backward is called in {frame.f_code.co_name}, {file}:{frame.f_lineno}."]
        frame = frame.f_back
    return []


def _calculation(tensor: Tensor) -> list[str]:
    """Name the last operations, from the tensor backwards, following the first input."""
    names: list[str] = []
    node = tensor.grad_fn
    while node is not None and len(names) < _OPERATIONS and "AccumulateGrad" not in node.name():
        names.append(node.name().removesuffix("0").removesuffix("Backward"))
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return [f"It is the output of: {' <- '.join(names)}."] if names else []


def outputs_of(value: object) -> list[Watched]:
    """Start to read the outputs of a model."""
    return extrema.watch(modules.tensors(value, "output"))


def _bad_gradients(gradients: Sequence[Watched]) -> list[Watched]:
    values = extrema.fetch([value for gradient in gradients for value in gradient.extrema])
    judged = zip(gradients, values[::2], values[1::2])
    return [gradient for gradient, least, greatest in judged if extrema.is_bad(least, greatest)]
