"""Frames: the inputs and outputs of each call of each module, read by hooks that touch each tensor once.

A line has the columns of transformers' DebugUnderflowOverflow: abs min, abs max, label.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from fnmatch import fnmatchcase
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from distdiag.training.overflow import extrema, modules
from distdiag.training.overflow.modules import Hook, kind_of, named
from distdiag.training.overflow.report import MODEL, Detection, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


_NOTHING = contextlib.nullcontext()
NEAR = 0.5
"""A share of a dtype's maximum worth a remark: twice as much overflows."""
_HELD_BYTES = 1 << 28
"""Limit on tensors kept until they are fetched: a tensor must not change between the hook and the fetch."""
_HELD_FRAMES = 4
"""Frames that keep their tensors without autograd: with all, a forward took 1.1 to 1.5 times as long."""


def finite_or_text(value: float | None) -> float | str | None:
    """Convert a number for JSON, which has no infinity and no nan."""
    return value if value is None or math.isfinite(value) else str(value)


class Reading:
    """Extrema of one tensor at one moment, shared by the frames that show it.

    `source` is the tensor and `numbers` the view read, both until released; `least` and `greatest` are nan until
    fetched from the device.
    """

    __slots__ = ("dtype", "exact", "extrema", "greatest", "least", "numbers", "shape", "source", "version")

    def __init__(self, source: Tensor, found: extrema.Started, version: int) -> None:
        self.source: Tensor | None = source
        self.numbers: Tensor | None = found[0]
        self.extrema, self.version = found[1], version
        self.dtype, self.shape = source.dtype, (found[0] if source.is_nested else source).shape
        self.least = self.greatest = math.nan
        self.exact: float | None = None

    @property
    def is_bad(self) -> bool:
        """Whether it has nan or inf."""
        return extrema.is_bad(self.least, self.greatest)

    @property
    def not_finite(self) -> str:
        """Which of nan, inf and -inf it has; nan hides the others."""
        if math.isnan(self.greatest):
            return "nan"
        kinds = ["inf"] if self.greatest == math.inf else []
        return ",".join([*kinds, *(["-inf"] if self.least == -math.inf else [])])

    @property
    def abs_max(self) -> float:
        """The largest magnitude."""
        return self.greatest if math.isnan(self.greatest) else max(abs(self.least), abs(self.greatest))

    def abs_min(self) -> float | None:
        """Return the smallest magnitude; None if the numbers have changed since, or were released."""
        if self.exact is None:
            self.exact = extrema.abs_min_of_extrema(self.least, self.greatest)
            if self.exact is None and self.numbers is not None and self.unchanged():
                self.exact = extrema.abs_min(self.numbers)
        return self.exact

    def unchanged(self) -> bool:
        """Return whether the tensor's values are still those that were read."""
        return self.source is not None and version_of(self.source) == self.version

    @property
    def share_of_limit(self) -> float:
        """The largest magnitude as a share of the dtype's maximum; 0 for masks, integers, nan and inf."""
        most = extrema.limit(self.dtype)
        return 0.0 if not math.isfinite(self.abs_max) or self.abs_max == most else self.abs_max / most


class Line(NamedTuple):
    """One tensor of a frame, or a text in its place: None, not a tensor, empty, meta, fake, unread.

    `order` counts the lines of a forward; `phase`: weight, buffer, input or output.
    """

    frame: Frame
    order: int
    phase: str
    label: str
    what: Reading | str

    @property
    def reading(self) -> Reading | None:
        """The tensor's; None for a text."""
        return None if isinstance(self.what, str) else self.what

    @property
    def is_bad(self) -> bool:
        """Whether it is a tensor with nan or inf."""
        return self.reading is not None and self.reading.is_bad

    def text(self, *, classic: bool) -> str:
        """Format it: `3.18e-04 6.27e+04 output`; with `classic`, -inf is inf."""
        if isinstance(self.what, str):
            return f"{self.what:>17} {self.label}"
        least = self.what.abs_min()
        shown = f"{'?':>8}" if least is None else f"{least:8.2e}"
        most = "" if classic else self.what.not_finite
        return f"{shown} {most or f'{self.what.abs_max:.2e}':>8} {self.label}"

    def to_json(self) -> dict[str, object]:
        """Convert for a frame file."""
        fields: dict[str, object] = {"label": self.label, "phase": self.phase}
        what = self.what
        if isinstance(what, str):
            return {**fields, "text": what}
        fields |= {"dtype": str(what.dtype)[len("torch.") :], "shape": list(what.shape)}
        fields |= {"abs_min": finite_or_text(what.abs_min()), "abs_max": finite_or_text(what.abs_max)}
        return {**fields, "not_finite": what.not_finite} if what.not_finite else fields


class Frame:
    """One call of one module; `parent` is the call around it, `number` counts the frames of a forward.

    `raw` holds the lines without the frame: a cycle would keep the tensors alive.
    """

    __slots__ = ("kind", "name", "number", "parent", "raw")

    def __init__(self, name: str, kind: str, parent: Frame | None) -> None:
        self.name, self.kind, self.parent = name, kind, parent
        self.raw: list[tuple[int, str, str, Reading | str]] = []
        self.number = -1

    @property
    def place(self) -> Place:
        """The module."""
        return Place(self.name, self.kind)

    @property
    def lines(self) -> list[Line]:
        """The tensors in the order of reading."""
        return [Line(self, *raw) for raw in self.raw]

    def text(self, *, classic: bool) -> str:
        """Format its lines; with `classic`, as transformers' detector does."""
        name = self.name if classic else self.name or MODEL
        return "\n".join([f"{'':17} {name} {self.kind}", *[line.text(classic=classic) for line in self.lines]])

    def to_json(self, batch: int) -> dict[str, object]:
        """Convert for a frame file; inf and nan become text, an unknown number null."""
        about = {"kind": "frame", "batch": batch, "number": self.number, "module": self.name, "class": self.kind}
        return {**about, "lines": [line.to_json() for line in self.lines]}


class Found(NamedTuple):
    """A detection in the process that made it, and the frames up to it."""

    detection: Detection
    frames: tuple[Frame, ...] = ()

    def but(self, **changes: Any) -> Found:  # noqa: ANN401 - fields of the detection
        """Return it with changes in the detection."""
        return self._replace(detection=replace(self.detection, **changes))


def version_of(tensor: Tensor) -> int:
    """Return torch's count of in-place changes; -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


class Recorder:
    """Hooks on all modules that read their tensors; keeps `keep` frames, and none after the first bad one.

    `exact`: fetch after each call, so that later in-place changes are not seen; else once, at the end of the forward.
    `ignore`: patterns of modules, or module:tensor, that may be bad. `on_frame` is called with each frame (`exact`).
    """

    def __init__(
        self,
        model: Module,
        keep: int,
        ignore: Sequence[str],
        *,
        exact: bool,
        on_frame: Callable[[Frame], None] | None = None,
    ) -> None:
        self.exact = exact
        self._model, self._keep, self._ignore, self._on_frame = model, keep, ignore, on_frame
        self._names = {module: Place(name, kind_of(module)) for module, name in named(model).items()}
        self._handles: list[RemovableHandle] = []
        self._weights: dict[int, Reading] = {}
        self._bad_weights = False
        self._thread = 0
        self.failed = ""
        """Why it gave up; the forward continues without it."""
        self._clear()

    def _clear(self) -> None:
        self.frames: list[Frame] = []
        self.bad: Line | None = None
        self.output: object = None
        self.masks: list[Line] = []
        self._seen: dict[int, Reading] = {}
        self._pending: list[Reading] = []
        self._stack: list[Frame] = []
        self._alarmed: set[Frame] = set()
        self._doubtful: list[Line] = []
        self._given: list[Line] = []
        self._judged = self._held = self._count = self._order = 0
        self._last = -1
        self._any_bad, self.runs, self._grad = self._bad_weights, False, True

    @property
    def current(self) -> Frame | None:
        """The innermost running call; complete only with `exact`."""
        return self._stack[-1] if self._stack else None

    def attach(self) -> None:
        """Register the hooks."""
        for module in self._names:
            if module is self._model or isinstance(module, torch.jit.ScriptModule):
                continue
            if self.exact or not _leaves_inputs_alone(module):
                before = module.register_forward_pre_hook(Hook(self._before), with_kwargs=True)
                self._handles += (before, module.register_forward_hook(Hook(self._after), with_kwargs=True))
            else:
                self._handles.append(module.register_forward_hook(Hook(self._around), with_kwargs=True))

    def unhook(self) -> None:
        """Remove the hooks; the frames stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def detach(self) -> None:
        """Remove the hooks, and release all tensors."""
        self.unhook()
        self._weights.clear()
        self._clear()

    def begin(self, args: tuple[object, ...], kwargs: dict[str, object], *, grad: bool = True) -> None:
        """Begin a forward. `grad`: autograd keeps the tensors alive."""
        self._clear()
        self.runs, self._grad, self._thread = True, grad, get_ident()
        self._before(self._model, args, kwargs)

    def end(self, output: object) -> None:
        """End it and fetch all numbers."""
        self.output = output if self.exact else None
        self._after(self._model, (), {}, output)
        self._seen.clear()
        self._fetch()
        self.runs = False
        # A bad weight stays bad, without being read again.
        self._bad_weights = self._any_bad and any(reading.is_bad for reading in self._weights.values())
        if len(self._weights) > 4 * len(self._names) + 4096:  # weights recreated in each forward
            self._weights.clear()

    def _before(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._safely(self._enter, module, args, kwargs)

    def _after(self, module: Module, args: object, kwargs: object, output: object) -> None:
        self._safely(self._leave, module, output)

    def _around(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        self._safely(self._enter, module, args, kwargs)
        self._safely(self._leave, module, output)

    def _safely(self, act: Callable[..., None], *given: object) -> None:
        """Run `act` unless another thread runs the model; on an error, give up."""
        if not self.runs or torch.compiler.is_compiling() or self._thread != get_ident():
            return
        try:
            with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
                act(*given)
        except Exception as error:  # noqa: BLE001 - never fail the job
            self.failed = f"{type(error).__name__} {error}".splitlines()[0][:200]
            self.runs = False

    def _enter(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        frame = Frame(*self._names[module], self._stack[-1] if self._stack else None)
        self._stack.append(frame)
        for name, weight in module._parameters.items():
            if weight is not None:
                self._read(frame, "weight", name, weight, self._weights)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                self._read(frame, "buffer", name, buffer, self._weights)
        for label, value in modules.inputs(args, kwargs):
            self._read(frame, "input", label, value, self._seen)
        if self.exact:
            self._fetch()

    def _leave(self, module: Module, output: object) -> None:
        if not self._stack:
            return
        name = self._names[module].module
        while self._stack[-1].name != name and len(self._stack) > 1:  # a call left by an exception
            self._stack.pop()
        frame = self._stack.pop()
        for label, value in modules.leaves(output, "output"):
            self._read(frame, "output", label, value, self._seen)
        frame.number = self._count
        self._count += 1
        self.frames.append(frame)
        if self.exact or self._held > _HELD_BYTES:
            self._fetch()
        if self.exact and self._on_frame is not None:
            self._on_frame(frame)
        if not (self.exact or self._grad) and len(self.frames) > _HELD_FRAMES:
            for _, phase, _, what in self.frames[-1 - _HELD_FRAMES].raw:
                if isinstance(what, Reading) and phase in ("input", "output"):
                    what.numbers = what.source = None

    def _read(self, frame: Frame, phase: str, label: str, value: object, known: dict[int, Reading]) -> None:
        self._order += 1
        what: Reading | str = "None" if value is None else "not a tensor"
        if isinstance(value, Tensor):
            what = self._reading(value, known)
        frame.raw.append((self._order, phase, label, what))

    def _reading(self, tensor: Tensor, known: dict[int, Reading]) -> Reading | str:
        """Start to read a tensor, or return the reading of its current version."""
        reading, version = known.get(id(tensor)), version_of(tensor)
        if reading is not None and reading.source is tensor and reading.version == version >= 0:
            return reading
        found = extrema.start(tensor)
        if isinstance(found, str):
            return found
        reading = known[id(tensor)] = Reading(tensor, found, version)
        self._pending.append(reading)
        self._held += found[0].nbytes
        return reading

    def _fetch(self) -> None:
        """Fetch all pending values from the device and judge them."""
        self._held, pending, self._pending = 0, self._pending, []
        values = extrema.fetch([value for reading in pending for value in reading.extrema])
        for reading, least, greatest in zip(pending, values[::2], values[1::2]):
            reading.least, reading.greatest, reading.extrema = least, greatest, ()
            if self.exact:
                reading.abs_min()
        self._any_bad = self._any_bad or extrema.any_bad(values)
        if self._any_bad:
            self._judge()
        if len(self.frames) > self._keep:
            self.frames = self.frames[-self._keep :]
            if self._seen:  # dropped frames release their tensors
                kept = {id(raw[3]) for frame in (*self.frames, *self._stack) for raw in frame.raw}
                self._seen = {key: reading for key, reading in self._seen.items() if id(reading) in kept}

    def _judge(self) -> None:
        """Find the first bad line; later frames are not kept."""
        was_bad = self.bad is not None
        lines = [line for frame in (*self.frames, *self._stack) for line in frame.lines if line.order > self._judged]
        lines = sorted([*self._doubtful, *lines], key=lambda line: line.order)
        self._doubtful = []
        for line in lines:
            if line.is_bad and not self._is_fine(line, line.what):  # type: ignore[arg-type] # is_bad: a Reading
                self._alarmed.add(line.frame)
                self.bad = self.bad or line
        if self.bad is not None and not was_bad:
            # Inputs of it, or of the calls around it, that did not count by themselves.
            before = [*self._given, *(line for line in self._doubtful if line.phase == "input")]
            self.bad = min(self.bad, *before, key=lambda line: line.order) if before else self.bad
        self._judged = self._order
        if self._last < 0:
            self._last = next((frame.number for frame in self.frames if frame in self._alarmed), -1)
        if self._last >= 0:
            self.frames = [frame for frame in self.frames if frame.number <= self._last]

    def _is_fine(self, line: Line, reading: Reading) -> bool:
        """Return whether a bad tensor is ignored or intended; doubtful if only the outputs can decide."""
        where = (line.frame.name, f"{line.frame.name}:{line.label}")
        if any(fnmatchcase(name, pattern) for name in where for pattern in self._ignore):
            return True
        if extrema.may_be_masked(reading.least, reading.greatest, reading.dtype):
            self.masks.append(line)
            return True
        if line.phase == "input" and (line.frame.parent is None or any(given.what is reading for given in self._given)):
            self._given.append(line)  # labels, some missing: bad only if nan or inf follows
            return True
        # A caller may fill in +inf before a minimum; buffers (caches, observers) may never be used.
        if line.phase == "buffer" or (line.phase == "input" and reading.greatest == math.inf):
            if line.frame.number < 0:
                self._doubtful.append(line)
                return True
            return not any(output.is_bad for output in line.frame.lines if output.phase == "output")
        return False


def _leaves_inputs_alone(module: Module) -> bool:
    """Return whether a module never writes to its inputs: one hook instead of two."""
    ours = type(module).__module__.startswith("torch.nn.modules.")
    return ours and not module._modules and not getattr(module, "inplace", False)
