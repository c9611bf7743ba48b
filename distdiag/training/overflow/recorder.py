"""Frames: what each call of each module was given and gave back, read by hooks that touch each tensor once.

The lines are those of transformers' DebugUnderflowOverflow (abs min, abs max, what it is), so that what is written
about those applies to these.
"""

from __future__ import annotations

import math
import sys
from fnmatch import fnmatchcase
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from distdiag.training.overflow import extrema, nested
from distdiag.training.overflow.extrema import ExtremaReader
from distdiag.training.overflow.modules import Hook, kind_of, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

    from distdiag.training.overflow.detection import ReportWriter
    from distdiag.training.overflow.replay import Call, Terms


HEADING = "abs min  abs max  metadata"
"""As transformers' detector has it; COLUMNS says the same in words."""
COLUMNS = "abs min  abs max  module, class, and its tensors"
MODEL = "the model"
"""The outermost module, which has no name."""
_MARGIN = " " * 17
_UNKNOWN = "?"
NEAR = 0.5
"""From this share of a dtype's greatest number on, a tensor is worth a word: twice more overflows."""


class Reading:
    """What is known of one tensor, as it was at one moment; frames that show the same tensor share it.

    `source` is the tensor and `numbers` what is read of it, until they are let go of. `least` and `greatest` are known
    when they have been fetched from the device.
    """

    __slots__ = ("dtype", "exact", "greatest", "least", "numbers", "shape", "source", "version")

    def __init__(self, source: Tensor, found: Tensor, version: int) -> None:
        self.source: Tensor | None = source
        self.dtype, self.shape = source.dtype, (found if source.is_nested else source).shape
        self.numbers: Tensor | None = found
        self.version = version
        self.least = self.greatest = math.nan
        self.exact: float | None = None

    @property
    def is_bad(self) -> bool:
        """Whether there is nan or inf in it."""
        return extrema.is_bad(self.least, self.greatest)

    @property
    def not_finite(self) -> str:
        """Which of nan, inf and -inf are in it; nan hides the others."""
        if math.isnan(self.greatest):
            return "nan"
        kinds = ["inf"] if self.greatest == math.inf else []
        return ",".join([*kinds, *(["-inf"] if self.least == -math.inf else [])])

    @property
    def abs_max(self) -> float:
        """The greatest magnitude."""
        return extrema.abs_max(self.least, self.greatest)

    def abs_min(self) -> float | None:
        """Return the smallest magnitude; None if the numbers have changed since, or are gone."""
        if self.exact is None:
            self.exact = extrema.abs_min_of_extrema(self.least, self.greatest)
            if self.exact is None and self.numbers is not None and self.unchanged():
                self.exact = extrema.abs_min(self.numbers)
        return self.exact

    def unchanged(self) -> bool:
        """Return whether the numbers are still there, and are those that were read."""
        return self.source is not None and version_of(self.source) == self.version

    def release(self) -> None:
        """Let go of the tensor."""
        self.numbers = self.source = None

    @property
    def share_of_limit(self) -> float:
        """How much of what its dtype can hold the greatest magnitude is; 0 where that says nothing."""
        if not self.dtype.is_floating_point or not math.isfinite(self.abs_max):
            return 0.0
        most = extrema.limit(self.dtype)
        # Masks are made of the dtype's own least number.
        return 0.0 if self.abs_max == most else self.abs_max / most


class Line(NamedTuple):
    """One tensor of a frame, or what stands in its place: None, not a tensor, empty, meta, fake, unread.

    `order` counts the lines of a forward as they came; `phase`: weight, buffer, input or output.
    """

    frame: Frame
    order: int
    phase: str
    label: str
    what: Reading | str

    def text(self, *, classic: bool) -> str:
        """Write it: `3.18e-04 6.27e+04 output`; -inf is inf where it is `classic`."""
        if isinstance(self.what, str):
            return f"{self.what:>17} {self.label}"
        least = self.what.abs_min()
        shown = f"{_UNKNOWN:>8}" if least is None else f"{least:8.2e}"
        most = f"{self.what.abs_max:8.2e}" if classic else f"{self.what.not_finite or f'{self.what.abs_max:.2e}':>8}"
        return f"{shown} {most} {self.label}"


class Frame:
    """One call of one module; `parent` is the call that it was made in, `number` counts the frames of a forward."""

    __slots__ = ("kind", "name", "number", "parent", "raw")

    def __init__(self, name: str, kind: str, parent: Frame | None) -> None:
        self.name, self.kind, self.parent = name, kind, parent
        self.raw: list[tuple[int, str, str, Reading | str]] = []
        """The lines, as cheaply as they can be kept: order, phase, label, what."""
        self.number = -1

    @property
    def lines(self) -> list[Line]:
        """What was read of it."""
        return [Line(self, *raw) for raw in self.raw]

    def text(self, *, classic: bool) -> str:
        """Write its lines; where it is `classic`, as transformers' detector does."""
        name = self.name if classic else self.name or MODEL
        return "\n".join([f"{_MARGIN} {name} {self.kind}", *[line.text(classic=classic) for line in self.lines]])

    def to_json(self, batch: int) -> dict[str, Any]:
        """Write for a file of frames; numbers that JSON lacks become "inf" and "nan", an unknown one null."""
        lines = [_line_to_json(line) for line in self.lines]
        return {"kind": "frame", "batch": batch, "number": self.number, "module": self.name, "class": self.kind} | {
            "lines": lines
        }


def _line_to_json(line: Line) -> dict[str, Any]:
    fields: dict[str, Any] = {"label": line.label, "phase": line.phase}
    what = line.what
    if isinstance(what, str):
        return {**fields, "text": what}
    fields |= {"dtype": str(what.dtype)[len("torch.") :], "shape": list(what.shape)}
    fields |= {"abs_min": finite_or_text(what.abs_min()), "abs_max": finite_or_text(what.abs_max)}
    return {**fields, "not_finite": what.not_finite} if what.not_finite else fields


def finite_or_text(value: float | None) -> float | str | None:
    """Write a number for JSON, which has no infinity and no nan."""
    return value if value is None or math.isfinite(value) else str(value)


def batch_head(number: int, *, classic: bool) -> str:
    """Write what stands before the first frame of a batch that is traced."""
    if classic:
        return f"\n\n{_MARGIN} *** Starting batch number={number} ***\n{HEADING}"
    return f"\nFrames of batch {number}:\n{COLUMNS}"


def version_of(tensor: Tensor) -> int:
    """Return the count of changes in place; -1 where torch does not keep it (inference tensors)."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


_HELD_BYTES = 256 << 20
"""So much of tensors is kept, beside those of the last frames, until their numbers are fetched all at once."""
_HELD_FRAMES = 4
"""Of so many frames tensors are kept where autograd does not keep them anyway: with all of them kept, each operation
gets new memory, and the forward of 49 modules took 1.1 to 1.5 times as long."""


class Recorder:
    """Records the frames of one forward of `model` after the other.

    Hooks are on all modules below it; for itself `begin` and `end` are called, with what it is given and gives back.
    `bad` is then the first line that went wrong, and `frames` lead up to the first frame that shows it.
    With `exact`, each number is fetched at once, for which the device is waited for again and again, and `on_frame` is
    called with each frame; without, nothing waits until the end of the forward.
    """

    def __init__(
        self,
        model: Module,
        keep: int,
        ignore: Sequence[str],
        *,
        exact: bool,
        on_frame: Callable[[Frame], object] | None = None,
    ) -> None:
        self.exact, self._on_frame = exact, on_frame
        self._model, self._keep, self._ignore = model, keep, tuple(ignore)
        self._names = {module: (name, kind_of(module)) for module, name in named(model).items()}
        self._weights: dict[int, Reading] = {}
        self._of_module: dict[Module, list[tuple[dict[str, Any], str, str, Reading]]] = {}
        self._bad_weights = False
        self._reader = ExtremaReader()
        self._handles: list[RemovableHandle] = []
        self._thread = 0
        self.failed = ""
        """Why it gave up; the forward goes on without it."""
        self._clear()

    def _clear(self) -> None:
        self.frames: list[Frame] = []
        self.bad: Line | None = None
        self.output: object = None
        self.masks: list[Line] = []
        self._seen: dict[int, Reading] = {}
        self._stack: list[Frame] = []
        self._reader.forget()
        self._alarmed: set[Frame] = set()
        self._doubtful: list[Line] = []
        self._given: list[Line] = []
        self._judged = 0
        self._held = self._count = self._order = 0
        self._last, self._most = -1, self._keep
        self._any_bad, self.runs, self._grad = self._bad_weights, False, True

    @property
    def current(self) -> Frame | None:
        """The call that is running now, the innermost; only with `exact` are all of them known before they end."""
        return self._stack[-1] if self._stack else None

    def attach(self) -> None:
        """Put the hooks on."""
        for module in self._names:
            if module is self._model or isinstance(module, torch.jit.ScriptModule):
                continue
            if not self.exact and _leaves_inputs_alone(module):
                self._handles.append(module.register_forward_hook(Hook(self._around), with_kwargs=True))
                continue
            before = module.register_forward_pre_hook(Hook(self._before), with_kwargs=True)
            after = module.register_forward_hook(Hook(self._after), with_kwargs=True)
            self._handles += (before, after)

    def unhook(self) -> None:
        """Remove the hooks; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def detach(self) -> None:
        """Remove the hooks, and let go of all tensors."""
        self.unhook()
        self._weights.clear()
        self._of_module.clear()
        self._clear()

    def begin(
        self, args: tuple[object, ...], kwargs: dict[str, object], *, everything: bool = False, grad: bool = True
    ) -> None:
        """Begin a forward of the model. `everything`: keep all of its frames; `grad`: autograd keeps what goes by."""
        self._clear()
        self._most = sys.maxsize if everything else self._keep
        self.runs, self._grad, self._thread = True, grad, get_ident()
        self._before(self._model, args, kwargs)

    def end(self, output: object) -> None:
        """End it: now all numbers are known."""
        self.output = output if self.exact else None
        self._after(self._model, (), {}, output)
        self._seen.clear()
        self._fetch()
        self.runs = False
        # A bad weight stays bad, without being read again.
        self._bad_weights = self._any_bad and any(reading.is_bad for reading in self._weights.values())
        if len(self._weights) > 4 * len(self._names) + 4096:  # weights that are made anew for each forward
            self._weights.clear()

    def _before(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not self.runs or torch.compiler.is_compiling() or self._thread != get_ident():
            return  # other threads may be in the model too
        try:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self._enter(module, args, kwargs)
            else:
                self._enter(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the job is what matters
            self._give_up(error)

    def _after(self, module: Module, args: object, kwargs: object, output: object) -> None:
        if not self.runs or not self._stack or torch.compiler.is_compiling() or self._thread != get_ident():
            return
        try:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self._leave(module, output)
            else:
                self._leave(module, output)
        except Exception as error:  # noqa: BLE001 - the job is what matters
            self._give_up(error)

    def _around(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        """Do as _before and _after do, for a module that changes nothing that it is given."""
        if not self.runs or torch.compiler.is_compiling() or self._thread != get_ident():
            return
        try:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self._enter(module, args, kwargs)
                    self._leave(module, output)
            else:
                self._enter(module, args, kwargs)
                self._leave(module, output)
        except Exception as error:  # noqa: BLE001 - the job is what matters
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.failed = f"{type(error).__name__} {error}".splitlines()[0][:200]
        self.runs = False

    def _enter(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        frame = Frame(*self._names[module], self._stack[-1] if self._stack else None)
        self._stack.append(frame)
        if module._parameters or module._buffers:
            self._read_weights(frame, module)
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            self._read(frame, "input", "input[0]", args[0])
        else:
            for label, value in nested.inputs(args, kwargs):
                self._read(frame, "input", label, value)
        if self.exact:
            self._fetch()

    def _read_weights(self, frame: Frame, module: Module) -> None:
        """Read its own parameters and buffers, unless all of them are as they were the last time."""
        self._order += 1
        known = self._of_module.get(module)
        if known is not None:
            for places, _, name, reading in known:
                weight = reading.source
                if weight is None or weight._version != reading.version or places.get(name) is not weight:
                    break
            else:
                frame.raw = [(self._order, phase, name, reading) for _, phase, name, reading in known]
                return
        own = []
        for phase, places in (("weight", module._parameters), ("buffer", module._buffers)):
            for name, tensor in places.items():
                if tensor is not None and (phase == "weight" or tensor.is_floating_point()):
                    what = self._reading(tensor, self._weights)
                    frame.raw.append((self._order, phase, name, what))
                    if isinstance(what, Reading) and what.version >= 0:
                        own.append((places, phase, name, what))
        if len(own) == len(frame.raw):
            self._of_module[module] = own
        else:  # meta tensors, or such whose changes torch does not count
            self._of_module.pop(module, None)

    def _leave(self, module: Module, output: object) -> None:
        name = self._names[module][0]
        while self._stack[-1].name != name and len(self._stack) > 1:  # a call that was left by an exception
            self._stack.pop()
        frame = self._stack.pop()
        if type(output) is Tensor:
            self._read(frame, "output", "output", output)
        else:
            for label, value in nested.leaves(output, "output"):
                self._read(frame, "output", label, value)
        frame.number = self._count
        self._count += 1
        self.frames.append(frame)
        if self.exact:
            self._fetch()
            if self._on_frame is not None:
                self._on_frame(frame)
        elif self._held > _HELD_BYTES:
            self._fetch()
        elif not self._grad and len(self.frames) > _HELD_FRAMES:
            for _, phase, _, what in self.frames[-1 - _HELD_FRAMES].raw:
                if isinstance(what, Reading) and phase in ("input", "output"):
                    what.release()

    def _read(self, frame: Frame, phase: str, label: str, value: object) -> None:
        self._order += 1
        if isinstance(value, Tensor):
            what = self._reading(value, self._seen)
        else:
            what = "None" if value is None else "not a tensor"
        frame.raw.append((self._order, phase, label, what))

    def _reading(self, tensor: Tensor, known: dict[int, Reading]) -> Reading | str:
        """Start to read a tensor, unless that was done already and it has not changed since."""
        reading = known.get(id(tensor))
        try:
            version = tensor._version
        except RuntimeError:  # an inference tensor: torch does not count its changes
            reading, version = None, -1
        if reading is not None and reading.source is tensor and reading.version == version:
            return reading
        found = self._reader.start(tensor)
        if isinstance(found, str):
            return found
        reading = known[id(tensor)] = Reading(tensor, found[0], version)
        found[1].append(reading)
        self._held += found[0].nbytes
        return reading

    def _fetch(self) -> None:
        """Get all numbers that are still on the device, and look at them."""
        self._held = 0
        values, readings = self._reader.fetch()
        if self.exact:
            for reading in readings:
                reading.abs_min()
        self._any_bad = self._any_bad or extrema.any_bad(values)
        if self._any_bad:
            self._judge()
        if len(self.frames) > self._most:
            self.frames = self.frames[-self._most :]
            if self._seen:  # the frames that are gone are to take their tensors with them
                kept = {id(raw[3]) for frame in (*self.frames, *self._stack) for raw in frame.raw}
                self._seen = {key: reading for key, reading in self._seen.items() if id(reading) in kept}

    def _judge(self) -> None:
        """Look for what went wrong; from the first frame that shows it on, no more frames are kept."""
        was_bad = self.bad is not None
        lines = [line for frame in (*self.frames, *self._stack) for line in frame.lines if line.order > self._judged]
        lines = sorted([*self._doubtful, *lines], key=lambda line: line.order)
        self._doubtful = []
        for line in lines:
            if isinstance(line.what, Reading) and line.what.is_bad and not self._is_fine(line, line.what):
                self._alarmed.add(line.frame)
                self.bad = self.bad or line
        if self.bad is not None and not was_bad:
            # What went into it, or into the calls around it, and did not count by itself.
            before = [*self._given, *(line for line in self._doubtful if line.phase == "input")]
            self.bad = min(self.bad, *before, key=lambda line: line.order) if before else self.bad
        self._judged = self._order
        if self._last < 0:
            self._last = next((frame.number for frame in self.frames if frame in self._alarmed), -1)
        if self._last >= 0:
            self.frames = [frame for frame in self.frames if frame.number <= self._last]

    def _is_fine(self, line: Line, reading: Reading) -> bool:
        """Return whether what is not finite is meant or ignored; what only its outputs can tell waits for them."""
        where = (line.frame.name, f"{line.frame.name}:{line.label}")
        if any(fnmatchcase(name, pattern) for name in where for pattern in self._ignore):
            return True
        masked = extrema.may_be_masked(reading.least, reading.greatest, reading.dtype)
        if masked:
            self.masks.append(line)
        if masked:
            return True
        if line.phase == "input" and (line.frame.parent is None or any(given.what is reading for given in self._given)):
            self._given.append(line)  # labels, of which some are missing: it counts if something comes of it
            return True
        if line.phase == "input" and reading.greatest == math.inf:  # filled in before the least is looked for
            if line.frame.number < 0:
                self._doubtful.append(line)
                return True
            return not any(_is_bad_output(output) for output in line.frame.lines)
        if line.phase == "buffer":  # of observers, caches: filled with what is never used
            if line.frame.number < 0:
                self._doubtful.append(line)
                return True
            return not any(_is_bad_output(output) for output in line.frame.lines)
        return False


def _is_bad_output(line: Line) -> bool:
    return line.phase == "output" and isinstance(line.what, Reading) and line.what.is_bad


def _leaves_inputs_alone(module: Module) -> bool:
    """Return whether what goes into a module is the same when it comes out: one hook costs half of two."""
    ours = type(module).__module__.startswith("torch.nn.modules.")
    return ours and not module._modules and not getattr(module, "inplace", False)


class TracedBatches:
    """The batches that are asked for; of one at a time the frames are on their way."""

    def __init__(self, model: Module, batches: Iterable[int] | None, output: ReportWriter) -> None:
        self._model, self._output = model, output
        self._batches = set(batches or ())
        self._recorder: Recorder | None = None

    @property
    def last(self) -> int:
        """The last batch to be traced; -1 if there is none."""
        return max(self._batches, default=-1)

    def __contains__(self, batch: int) -> bool:
        return batch in self._batches

    def begin(self, batch: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Begin with a forward of this batch."""
        self._recorder = self._new(batch)
        self._recorder.attach()
        self._recorder.begin(args, kwargs)

    def end(self, output: object) -> bool:
        """End it; False if none was on its way."""
        if self._recorder is None:
            return False
        self._recorder.end(output)
        self.stop()
        return True

    def stop(self) -> None:
        """Remove the hooks, also where the forward was left by an exception."""
        if self._recorder is not None:
            self._recorder.detach()
            self._recorder = None

    def again(self, call: Call, batch: int, terms: Terms, why: str) -> None:
        """Print the frames of a compiled model, by running it once more as it was written; or `why` that is not so."""
        why = why or call.again(self._new(batch), terms)
        if why:
            self._output.note(f"batch {batch} cannot be traced: {why}")

    def _new(self, batch: int) -> Recorder:
        def show(frame: Frame) -> None:
            self._output.frames(batch, [frame])

        return Recorder(self._model, 1, ("*",), exact=True, on_frame=show)
