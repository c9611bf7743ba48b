"""DebugUnderflowOverflow: checks a model for nan and inf, at the cost of one check of its outputs per step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import os
import sys
import weakref
from collections import deque
from dataclasses import dataclass, field, replace
from threading import Condition, get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distdiag.facts.machine import host_name
from distdiag.facts.rank_identity import own_rank
from distdiag.training.overflow import backward, extrema, modules, nested, ranks
from distdiag.training.overflow.backward import NO_GRADIENTS, GradientReader
from distdiag.training.overflow.cause import diverges
from distdiag.training.overflow.detection import BACKWARD, LOSS, WEIGHTS, Aborted, OverflowDetected, ReportWriter, When
from distdiag.training.overflow.half_precision import Glance, Growth, Underflow, is_due
from distdiag.training.overflow.judge import Forward, Judge, Loss, Seen, losses_of, outputs_of
from distdiag.training.overflow.modules import Hook, ddp_in, innermost, within_ddp
from distdiag.training.overflow.recorder import TracedBatches
from distdiag.training.overflow.replay import Call, State, Terms
from distdiag.training.overflow.short_sums import ShortSums, ranks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import Literal

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from distdiag.training.overflow.backward import StepGradients
    from distdiag.training.overflow.detection import Detection


_MOST_WAITING = 16
"""So many forwards wait for a step of the optimizer; then they are judged without one."""
_FEW_WAITING = 4
"""The same where the process has no optimizer."""
_MOST_KEPT_BYTES = 1 << 30
"""So much of inputs is kept of forwards that wait, to run them again; of later ones nothing is."""


_MOST_SKIPPED = 20
"""A GradScaler that begins at 2**16 and halves has come below 1 by then: it does not look for its scale any more."""
_OTHERS_S = 60.0
"""So long a thread waits while another runs the model again."""
_order = itertools.count(1)


@dataclass
class Counts:
    """What a detector has seen: forwards, steps of the optimizer, hits; `aborted`: by `abort_after_batch_num`.

    `began`: of the hits those on this rank; the others it was told of.

    `off`: why it gave up. Of `unread` forwards no output could be read; the last was a `kind`. `warnings`: as said.
    """

    forwards: int = 0
    steps: int = 0
    found: int = 0
    began: int = 0
    aborted: bool = False
    off: str = ""
    unread: int = 0
    kind: str = ""
    warnings: list[str] = field(default_factory=list)


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
        unit: what counts as a batch: a "forward" of the model or a "step" of the optimizer.
        gradients: "step": check them before the optimizer uses them. "each": check each as it is computed, which names
            the first bad gradient, before clipping. "off": do not check them.
        ignore: patterns of modules, or module:tensor, that may contain nan and inf: "lm_head", "*.attn:input*".
        on_detect: "raise": raise OverflowDetected, a ValueError, but not before the last batch to trace. "report":
            print the first detection and continue. Or a function that is called with the Detection.
        agree: False: ranks do not communicate; each raises alone. Ranks agree in DistributedDataParallel (except in its
            join()) and where fully_shard shards the weights; elsewhere equal numbers of steps are not guaranteed.
        save: file for the frames shown and for the detection, to be read by `distdiag overflow show`; "{rank}" is
            replaced by the rank.

    An additive mask of 0 and -inf is not reported, nor is -inf that goes into a softmax. Underflow is a warning, and so
    are float16 outputs that grow towards the maximum of float16.

    Raises:
        ValueError: the model is in DataParallel or already has a detector, or an argument is invalid.
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
            raise ValueError(f"max_frames_to_save must be at least 1, not {max_frames_to_save}")
        self._root = within_ddp(model)
        modules.displace_watcher(self._root)
        if modules.is_watched(self._root):
            raise ValueError(f"this {type(self._root).__name__} already has a detector; detach() that first")
        self._model, self._ddp = innermost(self._root), ddp_in(self._root)
        self._last = abort_after_batch_num
        self._unit, self._on_detect, self._agree = unit, on_detect, agree
        patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        self._sharing = ranks.Sharing(self._model)
        self._judge = Judge(
            self._model,
            self._sharing,
            max_frames_to_save,
            patterns,
            self._alone_in_it,
            each=gradients == "each",
            goes_on=on_detect != "raise" or bool(trace_batch_nums),
        )
        self._output = ReportWriter(save, type(self._model).__name__)
        self._traced = TracedBatches(self._model, trace_batch_nums, self._output)
        self._compiled = getattr(self._root, "_compiled_call_impl", None)
        self._full = self._judge.recorder(exact=False) if mode == "full" else None
        self._is_compiled = self._root is not self._model or self._compiled is not None
        if self._full is not None and self._is_compiled:
            self._full = None
            self._output.note("a compiled model has no frames to read: using mode='step'")
        self._state = State(self._model)
        self._gradients = GradientReader(self._model, each=gradients == "each")
        self._looks_at_gradients = gradients != "off"
        self._handles: list[RemovableHandle] = []
        self._waiting: list[Forward] = []
        self._most_waiting = _MOST_WAITING
        self._losses: list[Loss] = []
        self._last_forward: Forward | None = None
        """The last one with gradients, until a step has changed the weights."""
        self._since_step = 0
        """So many with gradients there were since the last step."""
        self._known_masks: set[str] = set()
        """Outputs in inference whose -inf was looked into."""
        self._calls: dict[int, Call] = {}
        """Those that are on their way, by their threads."""
        self._gate = Condition()
        self._runs_again = self._framed = 0
        """The thread that runs the model again, for which the others wait; and the one of which frames are taken."""
        self.last_forward = 0
        """When the last forward ended, in the order of all detectors."""
        self._is_off, self._is_alone, self._is_scaled, self._was_scaled = False, True, False, False
        self._skipped = 0
        self._recent: deque[Tensor] = deque(maxlen=8)
        """The last losses."""
        self._group: Any = None
        """The ranks that this one steps together with, as its last forward with others said; None if there are none."""
        self._active_ddp: weakref.ref[Module] | None = None
        """What called the model in its last forward with others."""
        self._asked: set[int] = set()
        """The optimizers that have made a step since."""
        self.counts = Counts()
        self.gives_way = False
        """Whether another detector may take its place: one that the script did not ask for."""
        self._by = type(self).__name__
        self._steps_of: dict[int, int] = {}
        self._underflow, self._glance, self._growth = Underflow(), Glance(self._model), Growth()
        self._short_sums = ShortSums(self._model)
        self._glanced = -1
        """The last step of which one forward was looked at more closely."""
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
    def batch(self) -> int:
        """The batch that is on its way, or comes next."""
        return self.counts.forwards if self._unit == "forward" else self.counts.steps

    @property
    def found(self) -> int:
        """How often something was found."""
        return self.counts.found

    def serve_command(self) -> None:
        """Give way to a detector that the script asks for by its name, and write as `distdiag overflow` does."""
        self.gives_way, self._by, self._output.classic = True, "distdiag overflow", False

    def detach(self) -> None:
        """Remove all hooks and restore the model. Safe to call repeatedly."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        atexit.unregister(self._at_end)
        self._waiting.clear()
        self._losses.clear()
        self._stop_looking()
        if modules.unmark_watched(self._root, self) and self._compiled is not None:
            self._root._compiled_call_impl = self._compiled

    def _stop_looking(self) -> None:
        self._traced.stop()
        self._glance.stop()
        self._calls.clear()
        self._last_forward = None
        self._gradients.detach()
        backward.stop(self)
        if self._full is not None:
            self._full.detach()

    def finish(self) -> None:
        """Judge what still waits for a step that does not come any more; raise nothing, ask no other rank."""
        self._judge_the_rest(at_end=True)

    def _judge_the_rest(self, *, at_end: bool) -> None:
        if self._is_off or self._is_ours():
            return
        found = None
        with self._harmless(), torch.no_grad():
            seen = self._seen_so_far(NO_GRADIENTS)
            if seen.forwards or seen.losses:
                found = self._judge.alone(seen)
        self._settle(found, at_end=at_end)

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
        backward.listen(self)
        modules.mark_watched(self._root, self)

    def _before(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.compiler.is_compiling() or self._is_ours() or _is_transformed():
            return
        with self._harmless():
            self._wait_for_the_other()
            if self._is_off:
                return
            grad = torch.is_grad_enabled()
            with torch.no_grad():
                self._sharing.look(self.counts.forwards > 1)
                self._calls[get_ident()] = Call(self._state, args, kwargs)
                if not self._takes_frames():
                    return
                self._glance.stop()
                if grad and (self._underflow.wants_trace or is_due(self.counts.steps)):
                    self._maybe_glance(self._calls[get_ident()])
                if self._full is not None:
                    self._full.begin(args, kwargs, everything=self.batch in self._traced, grad=grad)
                    return
                self._traced.stop()  # of a forward that was left by an exception
                if self.batch in self._traced and not self._is_compiled:
                    self._traced.begin(self.batch, args, kwargs)

    def _after(self, module: Module, args: object, kwargs: object, output: object) -> None:
        if torch.compiler.is_compiling() or self._is_ours() or _is_transformed():
            return
        if get_ident() not in self._calls and not self._is_off:  # it was put on while the model ran
            return
        trains = self._agree and self._root.training and torch.is_grad_enabled()
        grad = torch.is_grad_enabled()
        found = None
        with self._harmless(), torch.no_grad():
            forward = self._seen(output)
            self._last_forward = forward if grad else None
            self.counts.forwards += 1
            self.last_forward = next(_order)
            group = ranks.group_of(self._sharing, self._ddp) if trains else None
            self._is_alone = group is None
            self._since_step += grad
            if grad and not self._is_compiled and (warning := self._short_sums.own_norms()):
                self._warn(f"step {self.counts.steps}: {warning}")
            if not grad:
                found, warning = self._judge.inference(forward, self._known_masks)
                if warning:
                    self._warn(warning)
            elif group is None:
                found = self._judge.alone(Seen([forward], forward, [], NO_GRADIENTS, forward.when))
            else:
                found = self._wait_for_others(forward, group)
        self._settle(found)
        self._maybe_abort("forward", self.counts.forwards)

    def _is_ours(self) -> bool:
        """Return whether this call is none of the script's own: run again by us, or in a fork."""
        return self._runs_again == get_ident() or os.getpid() != self._pid

    def _takes_frames(self) -> bool:
        """Begin to take frames in this thread, unless another one does: that one's forward is judged by its outputs."""
        with self._gate:
            if self._framed in (0, get_ident()) or self._framed not in sys._current_frames():
                self._framed = get_ident()
            return self._framed == get_ident()

    def _wait_for_the_other(self) -> None:
        if self._runs_again:
            with self._gate:
                self._gate.wait_for(lambda: not self._runs_again, _OTHERS_S)

    @contextlib.contextmanager
    def _alone_in_it(self) -> Iterator[str]:
        """Keep other threads out of the model, whose calls are none of the script's; gives a reason why that fails."""
        me = get_ident()
        with self._gate:
            living = sys._current_frames()
            others = [thread for thread in self._calls if thread != me and thread in living]
            why = "another thread is running the model" if others or self._runs_again else ""
            if not why:
                self._runs_again = me
        try:
            yield why
        finally:
            if not why:
                with self._gate:
                    self._runs_again = 0
                    self._gate.notify_all()

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Whatever goes wrong in the detector, the script goes on, without it.

        Where other ranks ask this one before each step, it still answers: they would wait for ever.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the job is what matters
            self._is_off = True
            self.counts.off = self.counts.off or f"{type(error).__name__} {error}".splitlines()[0][:300]
            self._stop_looking()
            if ranks.count() == 1 or not self._agree:
                self.detach()
            self._output.note(f"the detector is off from here on: {self.counts.off}")

    def _wait_for_others(self, forward: Forward, group: Any) -> Detection | None:  # noqa: ANN401
        """Keep a forward until the next step of the optimizer, before which all ranks of the group come together.

        Of many without a step this rank judges by itself: the others may have made another number of them.
        """
        self._group, self._asked = group, set()
        active = getattr(DistributedDataParallel, "_active_ddp_module", None)
        self._active_ddp = weakref.ref(active) if active is not None else None
        self._waiting.append(forward)
        kept = [forward.call for forward in self._waiting if forward.call is not None]
        if kept and sum(call.kept_bytes for call in kept) > _MOST_KEPT_BYTES:
            kept[-1].forget()
        if len(self._waiting) == _FEW_WAITING and self.counts.steps == 0:
            self._most_waiting = _MOST_WAITING if _has_optimizer() else _FEW_WAITING
        if len(self._waiting) < self._most_waiting:
            return None
        return self._judge.alone(self._seen_so_far(NO_GRADIENTS))

    def _seen_so_far(self, gradients: StepGradients) -> Seen:
        """Return all that nobody has judged yet."""
        waiting, self._waiting = self._waiting, []
        losses, self._losses = self._losses, []
        when = self._when(self.counts.steps if self._unit == "step" else max(0, self.counts.forwards - 1))
        return Seen(waiting, self._last_forward, losses, gradients, when, self._since_step)

    def before_backward(self, tensors: object) -> None:
        """Look at what backward is called on."""
        if self._is_off or self._is_ours() or _is_transformed() or self._last_forward is None:
            return
        was_scaled, self._is_scaled = self._is_scaled, False
        if self._underflow.wants_trace:
            with self._harmless():
                self._underflow.follow(tensors, self._glance.nodes)
        if was_scaled:
            return
        self._short_sums.count_backward()
        found = None
        with self._harmless(), torch.no_grad():
            losses = losses_of(tensors, self._last_forward.when)
            self._recent += [loss.extrema[1] for loss in losses if loss.tensor.dim() == 0]
            if self._is_alone:
                found = self._judge.alone(Seen([], self._last_forward, losses, NO_GRADIENTS, self._last_forward.when))
            else:
                self._losses = [*self._losses[1 - _MOST_WAITING :], *losses]
        self._settle(found)

    def before_scale(self, tensors: object, *, scales: bool) -> None:
        """Look at what a GradScaler is about to scale, instead of what comes of it."""
        self.before_backward(tensors)
        self._is_scaled = True
        self._was_scaled = self._was_scaled or scales

    def before_update(self, scaler: object, *, skips: bool) -> None:
        """Look at the gradients where a GradScaler goes on to skip steps: it does not look for its scale any more."""
        if self._is_off or self._is_ours():
            return
        found = None
        self._skipped = self._skipped + 1 if skips else 0
        if self._skipped and self._skipped % _MOST_SKIPPED == 0:
            with self._harmless(), torch.no_grad():
                found = self._judge.alone(self._seen_so_far(self._gradients.now()))
                if found is not None:
                    hint = f"The GradScaler skipped {self._skipped} steps in a row."
                    found = replace(found, hints=(*found.hints, hint))
        self._settle(found)

    def _maybe_glance(self, call: Call) -> None:
        """Look more closely at this forward, if something of it is in float16 and it is the first of its step."""
        if self._is_compiled or self.counts.steps == self._glanced:
            return
        if call.casts_to(torch.float16) or any(weight.dtype is torch.float16 for weight in self._model.parameters()):
            self._glanced = self.counts.steps
            self._glance.begin()

    def _end_glance(self, call: Call, output: object) -> None:
        if self._glance.is_on:
            self._glance.end(output)
            if warning := self._growth.look(self._glanced, self._glance, autocast=call.casts_to(torch.float16)):
                self._warn(warning)

    def _seen(self, output: object) -> Forward:
        call = self._calls.pop(get_ident(), None)
        if call is None:
            return Forward(self._when(), None)
        call.returned()
        if self._framed != get_ident():
            return Forward(self._when(), call, outputs_of(output))
        try:
            self._end_glance(call, output)
            return self._seen_by_outputs(call, output) if self._full is None else self._seen_by_frames(call, output)
        finally:
            self._framed = 0

    def _seen_by_frames(self, call: Call, output: object) -> Forward:
        recorder = self._full
        assert recorder is not None
        recorder.end(output)
        if recorder.failed:
            raise RuntimeError(recorder.failed)
        if self.batch in self._traced:
            self._output.frames(self.batch, recorder.frames)
        at_end = recorder.masks and any(mask.phase == "output" and mask.frame.parent is None for mask in recorder.masks)
        outputs = outputs_of(output) if at_end and not torch.is_grad_enabled() else ()
        return Forward(self._when(), call, outputs, found=self._judge.of_recorder(recorder, self._when()))

    def _seen_by_outputs(self, call: Call, output: object) -> Forward:
        if not self._traced.end(output) and self.batch in self._traced and self._is_compiled:
            with self._alone_in_it() as crowded:
                self._traced.again(call, self.batch, Terms(is_shared=self._sharing.is_shared), crowded)
        outputs = outputs_of(output)
        if not outputs and next(nested.tensors(output, ""), None) is None:
            self.counts.unread, self.counts.kind = self.counts.unread + 1, type(output).__name__
        return Forward(self._when(), call, outputs)

    def _when(self, batch: int | None = None) -> When:
        phase = "training" if self._root.training else "evaluation"
        return When(self.batch if batch is None else batch, self.counts.steps, self._unit, phase)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._is_ours():
            return
        found = None
        with self._harmless(), torch.no_grad():
            if not self._gradients.are_stepped_by(optimizer):
                return
            if self.counts.steps == self.counts.forwards == 0 and not _has_closure(args, kwargs):
                self._output.note(
                    "no forward seen before this step: with torch.compile, pass the compiled model to the detector"
                )
            made = self._gradients.start(optimizer) if self._looks_at_gradients and not self._is_off else NO_GRADIENTS
            if id(optimizer) in self._asked:  # no forward with others since: this step may be this rank's own
                self._group = None
            self._asked.add(id(optimizer))
            for warning in self._look_for_short_sums(made):
                self._warn(f"step {self.counts.steps}: {warning}")
            found = self._judge_step(made)
            if found is None and (warning := self._look_for_underflow(made)):
                self._warn(warning)
        self._settle(found)

    def _look_for_underflow(self, made: StepGradients) -> str:
        return self._underflow.look(made.now, self.counts.steps, scaled=self._was_scaled)

    def _look_for_short_sums(self, made: StepGradients) -> list[str]:
        active = self._active_ddp() if self._active_ddp is not None else None
        ddp = self._ddp if self._ddp is not None else active
        return self._short_sums.step(made.now, ddp, ranks=ranks_of(self._group), scaled=self._was_scaled)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._is_ours() or not self._gradients.are_stepped_by(optimizer):
            return
        self._state.steps += 1
        self._last_forward, self._since_step = None, 0
        # Of several optimizers of one model each makes a step of its own in what users call a step.
        self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        self.counts.steps = max(self._steps_of.values())
        self._maybe_abort("step", self.counts.steps)

    def _judge_step(self, gradients: StepGradients) -> Detection | None:
        seen = self._seen_so_far(gradients)
        return self._judge.alone(seen) if self._group is None else self._judge.together(seen, self._group)

    def _settle(self, found: Detection | None, *, at_end: bool = False) -> None:
        """Do with what was found as the user wishes; at the end nobody is left to be told by an error."""
        if found is None:
            return
        self.counts.found += 1
        rank = own_rank()
        if found.rank is None and rank is not None:
            found = replace(found, rank=rank, host=host_name())
        self.counts.began += found.rank == rank or rank in found.other_ranks
        if found.origin in (WEIGHTS, LOSS, BACKWARD):
            found = replace(found, hints=(*found.hints, *diverges(extrema.fetch(list(self._recent)))))
        if self.counts.found == 1 or self._on_detect == "raise":
            self._output.detection(found, show=found.rank == rank)
        if callable(self._on_detect):
            self._on_detect(found)
        elif self._on_detect == "raise" and not at_end and found.when.batch >= self._traced.last:
            raise OverflowDetected(found, self._by)

    def _warn(self, what: str) -> None:
        self.counts.warnings.append(what)
        self._output.note(what)

    def _maybe_abort(self, unit: str, done: int) -> None:
        if unit == self._unit and self._last is not None and done > self._last:
            self.counts.aborted = True
            why = f"aborting after {done} batches due to `abort_after_batch_num={self._last}` arg"
            raise Aborted(f"{self._by}: {why}")


def _check(name: str, given: object, *known: str) -> None:
    if given not in known:
        raise ValueError(f"{name} is {' or '.join(map(repr, known))}, not {given!r}")


def _weakly(method: weakref.WeakMethod[Callable[..., None]], *args: object) -> None:
    call = method()
    if call is not None:
        call(*args)


def _has_optimizer() -> bool:
    """Return whether an optimizer exists that may make a step; takes about 30 ms."""
    return any(issubclass(type(thing), torch.optim.Optimizer) for thing in gc.get_objects())


def _has_closure(args: Any, kwargs: Any) -> bool:  # noqa: ANN401 - what step() was called with, itself included
    """Return whether the forward is called by the step itself, as LBFGS does."""
    return len(args) > 1 or "closure" in kwargs


def _is_transformed() -> bool:
    """Return whether a transform of torch.func runs: its tensors have no memory to be read."""
    look = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return look is not None and look() is not None
