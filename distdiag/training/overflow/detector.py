"""DebugUnderflowOverflow: watches a model for nan and inf, at the cost of one look at its outputs for each step."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from dataclasses import dataclass, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distdiag.training import whoami
from distdiag.training.overflow import ranks, watching
from distdiag.training.overflow.detection import OverflowDetected, When
from distdiag.training.overflow.frames import batch_head
from distdiag.training.overflow.gradients import NONE, Gradients
from distdiag.training.overflow.hook import Hook
from distdiag.training.overflow.judge import Forward, Judge, outputs_of
from distdiag.training.overflow.names import ddp_in, innermost, within_ddp
from distdiag.training.overflow.output import Output
from distdiag.training.overflow.replay import Call, State
from distdiag.training.overflow.traced import Traced
from distdiag.training.overflow.underflow import Underflow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import Literal

    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from distdiag.training.overflow.detection import Detection
    from distdiag.training.overflow.gradients import Made

_MOST_WAITING = 16
"""So many forwards wait for a step of the optimizer; then they are judged without one."""
_MOST_KEPT_BYTES = 1 << 30
"""So much of inputs is kept of forwards that wait, to run them again; of later ones nothing is."""


@dataclass
class Counts:
    """What a detector has seen: forwards, steps of the optimizer, hits; `aborted`: by `abort_after_batch_num`."""

    forwards: int = 0
    steps: int = 0
    found: int = 0
    aborted: bool = False


class DebugUnderflowOverflow:
    """Find the first nan or inf in a model: which batch, rank, module and tensor, and which module made it.

    On the way nothing is looked at but the outputs of the model and, before each step of the optimizer, the gradients:
    one wait for the device. When something is wrong the same forward is run once more, with the same random numbers and
    buffers, and each tensor of each module is read; the report shows the last of those frames, in the lines of
    transformers' detector of this name.

    With many ranks they agree, before each step of the optimizer, whether one of them has found something (one
    reduction of one number): then one report is printed and all raise the same error. Each rank needs its own detector.

    Args:
        model: any module; also in DistributedDataParallel, before or after fully_shard, or what torch.compile returned
            (and not what it was given).
        max_frames_to_save: how many frames to show.
        trace_batch_nums: batches (from 0) of which all frames are printed.
        abort_after_batch_num: raise ValueError when this batch is over.
        mode: "step" as above; "full" reads all tensors of all modules in each forward: for what cannot be run again.
        unit: what a batch is: a "forward" of the model, or a "step" of the optimizer.
        gradients: "step" looks before the optimizer uses them; "each" while they are made, which names the first bad
            one, before clipping; "off".
        ignore: patterns of modules, or module:tensor, that may hold nan and inf: "lm_head", "*.attn:input*".
        on_detect: "raise" OverflowDetected, a ValueError; "report" the first and go on; or call it with the Detection.
        agree: False: each rank is on its own, and raises alone. Ranks agree in DistributedDataParallel (not in its
            join()) and where fully_shard shares out the weights; nothing else promises that all take the same steps.
        save: a file for the frames that are shown and what was found, for `distdiag overflow show`; "{rank}" in it
            becomes the rank.

    An additive mask of 0 and -inf is no fault, nor is -inf that goes into a softmax. What is lost at the other end,
    underflow, is a warning: gradients in float16 that are mostly zero or subnormal.

    Raises:
        ValueError: it is in DataParallel, is watched already, or an argument makes no sense.
    """

    def __init__(  # noqa: PLR0913 - the first four are transformers' own, the others go by name
        self,
        model: Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Iterable[int] | None = (),
        abort_after_batch_num: int | None = None,
        *,
        mode: Literal["step", "full"] = "step",
        unit: Literal["forward", "step"] = "forward",
        gradients: Literal["step", "each", "off"] = "step",
        ignore: Sequence[str] | str = (),
        on_detect: Literal["raise", "report"] | Callable[[Detection], object] = "raise",
        agree: bool = True,
        save: str = "",
    ) -> None:
        _check("mode", mode, "step", "full")
        _check("unit", unit, "forward", "step")
        _check("gradients", gradients, "step", "each", "off")
        if not callable(on_detect):
            _check("on_detect", on_detect, "raise", "report")
        if max_frames_to_save < 1:
            raise ValueError(f"max_frames_to_save is 1 at least, not {max_frames_to_save}")
        self._root = within_ddp(model)
        watching.make_way(self._root)
        if watching.is_watched(self._root):
            raise ValueError(f"this {type(self._root).__name__} is watched already; detach() the other detector first")
        self._model, self._ddp = innermost(self._root), ddp_in(self._root)
        self._last = abort_after_batch_num
        self._unit, self._on_detect, self._agree = unit, on_detect, agree
        patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        self._judge = Judge(self._model, max_frames_to_save, patterns, each=gradients == "each")
        self._output = Output(save, type(self._model).__name__)
        self._traced = Traced(self._model, trace_batch_nums, self._output)
        self._compiled = getattr(self._root, "_compiled_call_impl", None)
        self._full = self._judge.recorder(exact=False) if mode == "full" else None
        self._is_compiled = self._root is not self._model or self._compiled is not None
        if self._full is not None and self._is_compiled:
            self._full = None
            self._output.note("a compiled model cannot be read frame by frame: mode='step' is used")
        self._state = State(self._model)
        self._gradients = Gradients(self._model, each=gradients == "each")
        self._looks_at_gradients = gradients != "off"
        self._handles: list[RemovableHandle] = []
        self._waiting: list[Forward] = []
        self._call: Call | None = None
        self._busy = self._is_off = False
        self._group: Any = None
        """The ranks that this one steps together with, as its last forward with others said; None if there are none."""
        self._asked: set[int] = set()
        """The optimizers that have made a step since."""
        self.counts = Counts()
        self.gives_way = False
        """Whether another detector may take its place: one that the script did not ask for."""
        self._steps_of: dict[int, int] = {}
        self._underflow = Underflow()
        self._pid, self._thread = os.getpid(), 0
        self._attach()

    def __enter__(self) -> DebugUnderflowOverflow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @property
    def batch(self) -> int:
        """The batch that is on its way, or comes next."""
        return self.counts.forwards if self._unit == "forward" else self.counts.steps

    @property
    def found(self) -> int:
        """How often something was found."""
        return self.counts.found

    def detach(self) -> None:
        """Take all hooks off: the model is as it was. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting.clear()
        self._stop_looking()
        if watching.end(self._root, self) and self._compiled is not None:
            self._root._compiled_call_impl = self._compiled

    def _stop_looking(self) -> None:
        self._traced.stop()
        self._call = None
        self._gradients.detach()
        if self._full is not None:
            self._full.detach()

    def around(self, call: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call the model, looking at what goes in and comes out."""
        self._before(self._root, args, kwargs)
        output = call(*args, **kwargs)
        self._after(self._root, args, kwargs, output)
        return output

    def _attach(self) -> None:
        if self._compiled is not None:
            # Model.compile() compiles the model's hooks with it, so these stand around what was compiled.
            self._root._compiled_call_impl = functools.partial(self.around, self._compiled)
        else:
            before = self._root.register_forward_pre_hook(Hook(self._before), with_kwargs=True)
            self._handles += (before, self._root.register_forward_hook(Hook(self._after), with_kwargs=True))
        # These hooks are torch's, and not to keep a model alive that nobody else has.
        self._handles.append(
            register_optimizer_step_pre_hook(functools.partial(_weakly, weakref.WeakMethod(self._before_step)))
        )
        self._handles.append(
            register_optimizer_step_post_hook(functools.partial(_weakly, weakref.WeakMethod(self._after_step)))
        )
        if self._full is not None:
            self._full.attach()
        watching.begin(self._root, self)

    def _before(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.compiler.is_compiling() or self._is_elsewhere():
            return
        with self._harmless():
            grad = torch.is_grad_enabled()
            self._thread = get_ident()
            if self._is_off:
                return
            with torch.no_grad():
                self._call = Call(self._state, args, kwargs)
                if self._full is not None:
                    self._full.begin(args, kwargs, everything=self.batch in self._traced, grad=grad)
                    return
                self._traced.stop()  # of a forward that was left by an exception
                if self.batch in self._traced and not self._is_compiled:
                    self._traced.begin(self.batch, args, kwargs)

    def _after(self, module: Module, args: object, kwargs: object, output: object) -> None:
        if torch.compiler.is_compiling() or self._is_elsewhere() or self._thread != get_ident():
            return
        if self._call is None and not self._is_off:  # it was put on while the model ran
            return
        trains = self._agree and self._root.training and torch.is_grad_enabled()
        found = None
        with self._harmless(), torch.no_grad():
            forward = self._seen(output)
            self.counts.forwards += 1
            group = ranks.group_of(self._model, self._ddp) if trains else None
            if group is None:
                found = self._alone([forward], NONE, forward.when)
            else:
                found = self._wait_for_others(forward, group)
        self._settle(found)
        self._maybe_abort("forward", self.counts.forwards)

    def _is_elsewhere(self) -> bool:
        """Tell whether this call is none of the script's own: run again, in a fork, in a transform of torch.func."""
        if self._busy or os.getpid() != self._pid:
            return True
        return (self._call is not None and self._thread not in (0, get_ident())) or _is_transformed()

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Whatever goes wrong in the detector, the script goes on, without it.

        Where other ranks ask this one before each step, it still answers: they would wait for ever.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the job is what matters
            self._is_off = True
            self._stop_looking()
            if ranks.count() == 1 or not self._agree:
                self.detach()
            self._output.note(f"the detector is off from now on: {type(error).__name__} {error}".splitlines()[0][:300])

    def _wait_for_others(self, forward: Forward, group: Any) -> Detection | None:  # noqa: ANN401
        """Keep a forward until the next step of the optimizer, before which all ranks of the group come together."""
        self._group, self._asked = group, set()
        self._waiting.append(forward)
        kept = [one.call for one in self._waiting if one.call is not None]
        if kept and sum(call.kept_bytes for call in kept) > _MOST_KEPT_BYTES:
            kept[-1].forget()
        return self._judge_step(NONE) if len(self._waiting) >= _MOST_WAITING else None

    def _seen(self, output: object) -> Forward:
        call, self._call = self._call, None
        if call is None:
            return Forward(self._when(), None)
        call.returned()
        return self._seen_by_outputs(call, output) if self._full is None else self._seen_by_frames(call, output)

    def _seen_by_frames(self, call: Call, output: object) -> Forward:
        recorder = self._full
        assert recorder is not None
        recorder.end(output)
        if self.batch in self._traced:
            self._output.frames(batch_head(self.batch), self.batch, recorder.frames)
        return Forward(self._when(), call, found=self._judge.of_recorder(recorder, self._when()))

    def _seen_by_outputs(self, call: Call, output: object) -> Forward:
        if not self._traced.end(output) and self.batch in self._traced:
            with self._left_alone():
                self._traced.again(call, self.batch)
        return Forward(self._when(), call, outputs_of(output))

    def _when(self, batch: int | None = None) -> When:
        return When(self.batch if batch is None else batch, self.counts.steps, self._unit)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._busy or os.getpid() != self._pid:
            return
        found = None
        with self._harmless(), torch.no_grad():
            if not self._gradients.are_stepped_by(optimizer):
                return
            if self.counts.steps == self.counts.forwards == 0 and not _has_closure(args, kwargs):
                self._output.note(
                    "no forward was seen before this step: watch what torch.compile returned, if you use it"
                )
            made = self._gradients.start(optimizer) if self._looks_at_gradients and not self._is_off else NONE
            if id(optimizer) in self._asked:  # no forward with others since: this step may be this rank's own
                self._group = None
            self._asked.add(id(optimizer))
            found = self._judge_step(made)
            if found is None and (warning := self._underflow.look(made.now, self.counts.steps)):
                self._output.note(warning)
        self._settle(found)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._busy or os.getpid() != self._pid or not self._gradients.are_stepped_by(optimizer):
            return
        # Of several optimizers of one model each makes a step of its own in what users call a step.
        self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        self.counts.steps = max(self._steps_of.values())
        self._maybe_abort("step", self.counts.steps)

    def _judge_step(self, gradients: Made) -> Detection | None:
        waiting, self._waiting = self._waiting, []
        when = self._when(self.counts.steps if self._unit == "step" else max(0, self.counts.forwards - 1))
        if self._group is None:
            return self._alone(waiting, gradients, when)
        with self._left_alone():
            return self._judge.together(waiting, gradients, when, self._group)

    def _alone(self, waiting: list[Forward], gradients: Made, when: When) -> Detection | None:
        with self._left_alone():
            return self._judge.alone(waiting, gradients, when)

    @contextlib.contextmanager
    def _left_alone(self) -> Iterator[None]:
        """Let the model be called without being looked at: what is run again is no batch."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _settle(self, found: Detection | None) -> None:
        """Do with what was found as the user wishes."""
        if found is None:
            return
        self.counts.found += 1
        rank = whoami.rank()
        if found.rank is None and rank is not None:
            found = replace(found, rank=rank, host=whoami.host())
        if self.counts.found == 1 or self._on_detect == "raise":
            self._output.detection(found, show=found.rank == rank)
        if callable(self._on_detect):
            self._on_detect(found)
        elif self._on_detect == "raise":
            raise OverflowDetected(found)

    def _maybe_abort(self, unit: str, done: int) -> None:
        if unit == self._unit and self._last is not None and done > self._last:
            self.counts.aborted = True
            why = f"aborting after {done} batches due to `abort_after_batch_num={self._last}` arg"
            raise ValueError(f"DebugUnderflowOverflow: {why}")


def _check(name: str, given: object, *known: str) -> None:
    if given not in known:
        raise ValueError(f"{name} is {' or '.join(map(repr, known))}, not {given!r}")


def _weakly(method: weakref.WeakMethod[Callable[..., None]], *args: object) -> None:
    call = method()
    if call is not None:
        call(*args)


def _has_closure(args: Any, kwargs: Any) -> bool:  # noqa: ANN401 - what step() was called with, itself included
    """Tell whether the forward is called by the step itself, as LBFGS does."""
    return len(args) > 1 or "closure" in kwargs


def _is_transformed() -> bool:
    """Tell whether a transform of torch.func runs: its tensors have no memory to be read."""
    look = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return look is not None and look() is not None
