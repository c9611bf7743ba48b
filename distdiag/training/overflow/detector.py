"""DebugUnderflowOverflow: checks a model for nan and inf, at the cost of one check of its outputs per step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import weakref
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distdiag.facts.machine import host_name
from distdiag.facts.process.rank_identity import own_rank
from distdiag.training.overflow import extrema, modules, ranks
from distdiag.training.overflow.advice import Underflow
from distdiag.training.overflow.calls import Callers, are_for_shapes
from distdiag.training.overflow.cause import diverges
from distdiag.training.overflow.gradients import GradientReader, listen, stop
from distdiag.training.overflow.judge import Forward, Judge, Pending, Seen, losses_of, outputs_of
from distdiag.training.overflow.modules import Hook
from distdiag.training.overflow.replay import Call, State
from distdiag.training.overflow.report import (
    BACKWARD,
    LOSS,
    WEIGHTS,
    Aborted,
    OverflowDetected,
    WatchedModel,
    When,
)
from distdiag.training.overflow.writer import ReportWriter, TracedBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import Literal

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from distdiag.training.overflow.frames import Found, Recorder
    from distdiag.training.overflow.report import Detection


_MOST_SKIPPED = 20
"""Consecutive skipped steps: a GradScaler that starts at 2**16 and halves is below 1 by then, no longer searching for
its scale."""
_order = itertools.count(1)
_detectors: weakref.WeakKeyDictionary[Module, weakref.ref[DebugUnderflowOverflow]] = weakref.WeakKeyDictionary()
"""By watched model, as returned by `within_ddp`."""


def detector_of(module: Module) -> DebugUnderflowOverflow | None:
    """Return the detector of a model."""
    found = _detectors.get(module)
    return found() if found is not None else None


class DebugUnderflowOverflow:
    """Find the first nan or inf in a model: which rank, batch, module and tensor, and which module produced it.

    In normal operation only the outputs of the model are checked and, before each optimizer step, the gradients: one
    device synchronization. After a detection the same forward is replayed with the same random numbers and buffers, and
    every tensor of every module is read. The report shows the last of these frames, in the format of the detector of
    this name in transformers.

    Several ranks agree before each optimizer step whether any of them has detected something (one reduction of one
    number); then one report is printed and all ranks raise the same error. Each rank needs its own detector.

    Args:
        model: any module; also inside DistributedDataParallel, before or after fully_shard, or the result of
            torch.compile (not the module passed to it).
        max_frames_to_save: number of frames to show.
        trace_batch_nums: batches (counted from 0) whose frames are all printed.
        abort_after_batch_num: raise ValueError after this batch.
        mode: "step": as described above. "full": read every tensor of every module in each forward, for forwards that
            cannot be replayed.
        gradients: "step": check them before the optimizer uses them. "each": check each as it is computed, which finds
            the first bad gradient, before clipping. "off": do not check them.
        ignore: patterns of modules, or module:tensor, that may contain nan and inf: "lm_head", "*.attn:input*".
        on_detect: "raise": raise OverflowDetected, a ValueError, but not before the last batch to trace. "report":
            print the first detection and continue. Or a function that is called with the Detection.
        agree: False: ranks do not communicate; each raises alone. Ranks agree in DistributedDataParallel (except in its
            join()) and where fully_shard shards the weights; elsewhere equal numbers of steps are not guaranteed.
        save: file for the frames shown and for the detection, to be read by `distdiag overflow show`; "{rank}" is
            replaced by the rank.

    An additive mask of 0 and -inf is not reported, nor is -inf that goes into a softmax. Underflow is a warning.

    Raises:
        ValueError: the model is in DataParallel or already has a detector, or an argument is invalid.
    """

    gives_way = False
    """Whether another detector may replace it: True for detectors that the script did not create."""

    def __init__(  # noqa: PLR0913 - the first four are transformers' own, the others go by name
        self,
        model: Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Iterable[int] | None = (),
        abort_after_batch_num: int | None = None,
        *,
        mode: Literal["step", "full"] = "step",
        gradients: Literal["step", "each", "off"] = "step",
        ignore: Sequence[str] | str = (),
        on_detect: Literal["raise", "report"] | Callable[[Detection], object] = "raise",
        agree: bool = True,
        save: str = "",
    ) -> None:
        _check("mode", mode, "step", "full")
        _check("gradients", gradients, "step", "each", "off")
        if not callable(on_detect):
            _check("on_detect", on_detect, "raise", "report")
        if max_frames_to_save < 1:
            raise ValueError(f"max_frames_to_save must be at least 1, not {max_frames_to_save}")
        self._root = modules.within_ddp(model)
        other = detector_of(self._root)
        if other is not None and other.gives_way:
            other.detach()
        elif other is not None:
            raise ValueError(f"this {type(self._root).__name__} already has a detector; detach() that first")
        self._model, self._ddp = modules.innermost(self._root), modules.ddp_in(self._root)
        self._last, self._on_detect, self._agree = abort_after_batch_num, on_detect, agree
        self._sharing, self._state = ranks.Sharing(self._model), State(self._model)
        self._callers, self._pending = Callers(), Pending()
        self._judge = Judge(
            self._model,
            self._sharing,
            max_frames_to_save,
            (ignore,) if isinstance(ignore, str) else tuple(ignore),
            self._callers.alone,
            each=gradients == "each",
            goes_on=on_detect != "raise" or bool(trace_batch_nums),
        )
        self._output = ReportWriter(save, type(self._model).__name__)
        self._traced = TracedBatches(self._model, trace_batch_nums, self._output)
        self._compiled = getattr(self._root, "_compiled_call_impl", None)
        self._is_compiled = self._root is not self._model or self._compiled is not None
        self._full = self._judge.recorder(exact=False) if mode == "full" and not self._is_compiled else None
        if self._is_compiled and (mode == "full" or trace_batch_nums):
            self._output.note("a compiled model has no frames to read: only its outputs are checked")
        self._gradients = GradientReader(self._model, gradients)
        self._underflow = Underflow()
        self._handles: list[RemovableHandle] = []
        self._recent: deque[Tensor] = deque(maxlen=8)
        """The last losses."""
        self._steps_of: dict[int, int] = {}
        self._skipped = 0
        self._is_scaled = False
        self.last_forward = 0
        """When the last forward ended, in the order of all detectors."""
        self.counts = WatchedModel(modules.kind_of(self._model))
        self._by = type(self).__name__
        self._pid = os.getpid()
        self._at_end = functools.partial(_weakly, weakref.WeakMethod(self.finish))
        atexit.register(self._at_end)
        self._attach()

    def __enter__(self) -> DebugUnderflowOverflow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._judge_the_rest(at_end=False)
        finally:
            self.detach()

    @property
    def found(self) -> int:
        """The number of detections."""
        return self.counts.found

    def serve_command(self) -> None:
        """Give way to a detector of the script, and print as `distdiag overflow` does."""
        self.gives_way, self._by, self._output.classic = True, "distdiag overflow", False

    def detach(self) -> None:
        """Remove all hooks and restore the model. Safe to call repeatedly."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        atexit.unregister(self._at_end)
        self._stop_looking()
        self._pending = Pending()
        if detector_of(self._root) is self:
            del _detectors[self._root]
            if self._compiled is not None:
                self._root._compiled_call_impl = self._compiled

    def finish(self) -> None:
        """Judge the remaining forwards at exit of the process; raise no error, contact no other rank."""
        self._judge_the_rest(at_end=True)

    def around(self, call: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call the model between our hooks."""
        self._before(self._root, args, kwargs)
        output = call(*args, **kwargs)
        self._after(self._root, args, kwargs, output)
        return output

    def before_backward(self, tensors: object) -> None:
        """Read the tensors that backward is called on, unless a GradScaler scaled them."""
        if self.counts.off or self._is_not_the_scripts() or self._pending.last is None:
            return
        was_scaled, self._is_scaled = self._is_scaled, False
        if was_scaled:
            return
        found = None
        with self._harmless(), torch.no_grad():
            losses = losses_of(tensors, self._pending.last.when)
            self._recent += [loss.value.extrema[1] for loss in losses if loss.value.tensor.dim() == 0]
            if self._pending.is_alone:
                last = self._pending.last
                found = self._judge.judge(Seen(last.when, last, losses=losses))
            else:
                self._pending.add_losses(losses)
        self._settle(found)

    def before_scale(self, tensors: object, *, scales: bool) -> None:
        """Read the loss before a GradScaler scales it, instead of the result."""
        self.before_backward(tensors)
        self._is_scaled = True
        self._underflow.scaled |= scales

    def before_update(self, *, skips: bool) -> None:
        """Check the gradients where a GradScaler keeps skipping steps: it no longer looks for its scale."""
        if self.counts.off or self._is_not_the_scripts():
            return
        found = None
        self._skipped = self._skipped + 1 if skips else 0
        if self._skipped and self._skipped % _MOST_SKIPPED == 0:
            with self._harmless(), torch.no_grad():
                found = self._judge.judge(self._pending.take(self._when_pending(), self._gradients.now()))
                if found is not None:
                    hint = f"The GradScaler skipped {self._skipped} steps in a row."
                    found = found.but(hints=(*found.detection.hints, hint))
        self._settle(found)

    def _attach(self) -> None:
        if self._compiled is not None:
            # Model.compile() compiles the model's hooks with it, so these wrap the compiled call.
            self._root._compiled_call_impl = functools.partial(self.around, self._compiled)
        else:
            before = self._root.register_forward_pre_hook(Hook(self._before), with_kwargs=True)
            self._handles += (before, self._root.register_forward_hook(Hook(self._after), with_kwargs=True))
        # torch holds these hooks globally: no strong reference to the model.
        before_step = functools.partial(_weakly, weakref.WeakMethod(self._before_step))
        after_step = functools.partial(_weakly, weakref.WeakMethod(self._after_step))
        self._handles.append(register_optimizer_step_pre_hook(before_step))
        self._handles.append(register_optimizer_step_post_hook(after_step))
        if self._full is not None:
            self._full.attach()
        listen(self)
        _detectors[self._root] = weakref.ref(self)

    def _stop_looking(self) -> None:
        self._traced.stop()
        self._callers.clear()
        self._pending.last = None
        self._gradients.detach()
        stop(self)
        if self._full is not None:
            self._full.detach()

    def _is_not_the_scripts(self) -> bool:
        """Return whether this call is a replay, in a fork, compiled, for shapes only, or in a torch.func transform."""
        if torch.compiler.is_compiling() or self._callers.replays or os.getpid() != self._pid or are_for_shapes():
            return True
        look = getattr(torch._C._functorch, "peek_interpreter_stack", None)  # such tensors have no memory to be read
        return look is not None and look() is not None

    def _before(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._is_not_the_scripts():
            return
        with self._harmless(), self._callers.no_replay():
            if self.counts.off:
                return
            grad = torch.is_grad_enabled()
            with torch.no_grad():
                self._sharing.look(self.counts.batches > 1)
                call = Call(self._state, args, kwargs)
                if self._callers.begin(call):
                    self._begin_frames(call, args, kwargs, grad=grad)

    def _begin_frames(self, call: Call, args: tuple[object, ...], kwargs: dict[str, object], *, grad: bool) -> None:
        self._traced.stop()  # of a forward left by an exception
        if grad:
            self._underflow.autocast = call.casts_to(torch.float16)
        if self._full is not None:
            self._full.begin(args, kwargs, grad=grad)
        if self.counts.batches in self._traced and not self._is_compiled:
            self._traced.begin(self.counts.batches, args, kwargs)

    def _after(self, module: Module, args: object, kwargs: object, output: object) -> None:
        if self._is_not_the_scripts():
            return
        call = self._callers.end()
        if call is None and not self.counts.off:  # it was attached while the model ran
            return
        grad = torch.is_grad_enabled()
        trains = self._agree and self._root.training and grad
        found = None
        with self._harmless(), torch.no_grad():
            forward = self._seen(call, output)
            self._pending.last = forward if grad else None
            self._pending.since_step += grad
            self.counts.batches += 1
            self.last_forward = next(_order)
            group = ranks.group_of(self._sharing, self._ddp) if trains else None
            self._pending.is_alone = group is None
            if not grad:
                found, warning = self._judge.inference(forward)
                self._warn(warning)
            elif group is None:
                found = self._judge.judge(Seen(forward.when, forward, [forward]))
            elif self._pending.wait(forward, group, any_step=self.counts.steps > 0):
                found = self._judge.judge(self._pending.take(self._when_pending()))
        self._settle(found)
        self._maybe_abort()

    def _seen(self, call: Call | None, output: object) -> Forward:
        when = self._when(self.counts.batches)
        if call is None:
            return Forward(when, None)
        call.returned()
        if not self._callers.has_frames:
            return Forward(when, call, outputs_of(output))
        try:
            self._traced.end(output)
            if self._full is not None:
                return self._seen_by_frames(self._full, when, call, output)
        finally:
            self._callers.release_frames()
        outputs = outputs_of(output)
        if not outputs and next(modules.tensors(output, ""), None) is None:
            self.counts.unread, self.counts.kind = self.counts.unread + 1, type(output).__name__
        return Forward(when, call, outputs)

    def _seen_by_frames(self, recorder: Recorder, when: When, call: Call, output: object) -> Forward:
        recorder.end(output)
        if recorder.failed:
            raise RuntimeError(recorder.failed)
        at_end = any(mask.phase == "output" and mask.frame.parent is None for mask in recorder.masks)
        outputs = outputs_of(output) if at_end and not torch.is_grad_enabled() else ()
        return Forward(when, call, outputs, found=self._judge.of_recorder(recorder, when))

    def _before_step(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._is_not_the_scripts():
            return
        found = None
        with self._harmless(), torch.no_grad():
            if not self._gradients.are_stepped_by(optimizer):
                return
            has_closure = len(args) > 1 or "closure" in kwargs  # the step itself calls the forward, as LBFGS does
            if self.counts.steps == self.counts.batches == 0 and not has_closure:
                self._output.note(
                    "no forward seen before this step: with torch.compile, pass the compiled model to the detector"
                )
            made = self._gradients.start(optimizer)
            self._pending.begin_step(optimizer)
            group = self._pending.group
            seen = self._pending.take(self._when_pending(), made)
            found = self._judge.judge(seen, group)
            if found is None and not self.counts.off:
                self._warn(self._underflow.look(made.now, self.counts.steps))
        self._settle(found)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._is_not_the_scripts() or not self._gradients.are_stepped_by(optimizer):
            return
        self._state.steps += 1
        self._pending.end_step()
        # With several optimizers per model, a training step has one step of each.
        self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        self.counts.steps = max(self._steps_of.values())

    def _judge_the_rest(self, *, at_end: bool) -> None:
        if self.counts.off or self._is_not_the_scripts():
            return
        found = None
        with self._harmless(), torch.no_grad():
            if self._pending.forwards or self._pending.losses:
                found = self._judge.judge(self._pending.take(self._when_pending()))
        self._settle(found, at_end=at_end)

    def _when(self, batch: int) -> When:
        return When(batch, self.counts.steps, "training" if self._root.training else "evaluation")

    def _when_pending(self) -> When:
        return self._when(max(0, self.counts.batches - 1))

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """On an error in the detector, disable it and let the script continue.

        If other ranks meet this rank before each step, it still takes part: otherwise they would wait forever.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - never fail the job
            self.counts.off = self.counts.off or f"{type(error).__name__} {error}".splitlines()[0][:300]
            self._stop_looking()
            if ranks.count() == 1 or not self._agree:
                self.detach()
            self._output.note(f"the detector is off from here on: {self.counts.off}")

    def _settle(self, found: Found | None, *, at_end: bool = False) -> None:
        """Report a detection and raise it if `on_detect` requires; at exit there is no caller to raise to."""
        if found is None:
            return
        self.counts.found += 1
        rank, told = own_rank(), found.detection
        if told.rank is None and rank is not None:
            told = replace(told, rank=rank, host=host_name())
        self.counts.began += told.rank == rank or rank in told.other_ranks
        if told.origin in (WEIGHTS, LOSS, BACKWARD):
            told = replace(told, hints=(*told.hints, *diverges(extrema.fetch(list(self._recent)))))
        told = replace(told, sentence=told.as_sentence())
        if self.counts.found == 1 or self._on_detect == "raise":
            self._output.detection(found._replace(detection=told), show=told.rank == rank)
        if callable(self._on_detect):
            self._on_detect(told)
        elif self._on_detect == "raise" and not at_end and told.batch >= self._traced.last:
            raise OverflowDetected(told, self._by)

    def _warn(self, what: str) -> None:
        if what:
            self.counts.warnings.append(what)
            self._output.note(what)

    def _maybe_abort(self) -> None:
        if self._last is not None and self.counts.batches > self._last:
            self.counts.aborted = True
            why = f"aborting after {self.counts.batches} batches due to `abort_after_batch_num={self._last}` arg"
            raise Aborted(f"{self._by}: {why}")


def _check(name: str, given: object, *known: str) -> None:
    if given not in known:
        raise ValueError(f"{name} is {' or '.join(map(repr, known))}, not {given!r}")


def _weakly(method: weakref.WeakMethod[Callable[..., None]], *args: object) -> None:
    call = method()
    if call is not None:
        call(*args)
