"""Full frames: hooks on all modules of a model, which read each tensor that goes in or comes out once."""

from __future__ import annotations

import math
import sys
from fnmatch import fnmatchcase
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distdiag.training.overflow import numbers, walk
from distdiag.training.overflow.ends import Ends
from distdiag.training.overflow.frames import Frame, Line, Reading
from distdiag.training.overflow.hook import Hook
from distdiag.training.overflow.names import kind_of, named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

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
        self._ends = Ends()
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
        self._ends.forget()
        self._alarmed: set[Frame] = set()
        self._doubtful: list[Line] = []
        self._given: list[Line] = []
        self._judged = 0
        self._held = self._count = self._order = 0
        self._last, self._most = -1, self._keep
        self._any_bad, self.runs, self._grad = self._bad_weights, False, True

    def attach(self) -> None:
        """Put the hooks on."""
        for module in self._names:
            if module is self._model or isinstance(module, torch.jit.ScriptModule):
                continue
            if _leaves_inputs_alone(module):
                self._handles.append(module.register_forward_hook(Hook(self._around), with_kwargs=True))
                continue
            before = module.register_forward_pre_hook(Hook(self._before), with_kwargs=True)
            after = module.register_forward_hook(Hook(self._after), with_kwargs=True)
            self._handles += (before, after)

    def unhook(self) -> None:
        """Take the hooks off; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def detach(self) -> None:
        """Take the hooks off, and let go of all tensors."""
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
        self._bad_weights = self._any_bad and any(one.is_bad for one in self._weights.values())
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
            for label, value in walk.inputs(args, kwargs):
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
            for label, value in walk.leaves(output, "output"):
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
        found = self._ends.start(tensor)
        if isinstance(found, str):
            return found
        reading = known[id(tensor)] = Reading(tensor, found[0], version)
        found[1].append(reading)
        self._held += found[0].nbytes
        return reading

    def _fetch(self) -> None:
        """Get all numbers that are still on the device, and look at them."""
        self._held = 0
        values, readings = self._ends.fetch()
        if self.exact:
            for reading in readings:
                reading.abs_min()
        self._any_bad = self._any_bad or numbers.any_bad(values)
        if self._any_bad:
            self._judge()
        if len(self.frames) > self._most:
            self.frames = self.frames[-self._most :]
            if self._seen:  # the frames that are gone are to take their tensors with them
                kept = {id(one[3]) for frame in (*self.frames, *self._stack) for one in frame.raw}
                self._seen = {key: one for key, one in self._seen.items() if id(one) in kept}

    def _judge(self) -> None:
        """Look for what went wrong; from the first frame that shows it on, no more frames are kept."""
        was_bad = self.bad is not None
        lines = [line for frame in (*self.frames, *self._stack) for line in frame.lines if line.order > self._judged]
        lines = sorted([*self._doubtful, *lines], key=lambda one: one.order)
        self._doubtful = []
        for line in lines:
            if isinstance(line.what, Reading) and line.what.is_bad and not self._is_fine(line, line.what):
                self._alarmed.add(line.frame)
                self.bad = self.bad or line
        if self.bad is not None and not was_bad:
            # What went into it, or into the calls around it, and did not count by itself.
            before = [*self._given, *(one for one in self._doubtful if one.phase == "input")]
            self.bad = min(self.bad, *before, key=lambda one: one.order) if before else self.bad
        self._judged = self._order
        if self._last < 0:
            self._last = next((one.number for one in self.frames if one in self._alarmed), -1)
        if self._last >= 0:
            self.frames = [frame for frame in self.frames if frame.number <= self._last]

    def _is_fine(self, line: Line, reading: Reading) -> bool:
        """Tell whether what is not finite is meant so, or is ignored; what only its outputs can tell waits for them."""
        where = (line.frame.name, f"{line.frame.name}:{line.label}")
        if any(fnmatchcase(one, pattern) for one in where for pattern in self._ignore):
            return True
        masked = numbers.may_be_masked(reading.least, reading.greatest, reading.dtype)
        if masked:
            self.masks.append(line)
        if masked:
            return True
        if line.phase == "input" and (line.frame.parent is None or any(one.what is reading for one in self._given)):
            self._given.append(line)  # labels, of which some are missing: it counts if something comes of it
            return True
        if line.phase == "input" and reading.greatest == math.inf:  # filled in before the least is looked for
            if line.frame.number < 0:
                self._doubtful.append(line)
                return True
            return not any(_is_bad_output(one) for one in line.frame.lines)
        if line.phase == "buffer":  # of observers, caches: filled with what is never used
            if line.frame.number < 0:
                self._doubtful.append(line)
                return True
            return not any(_is_bad_output(one) for one in line.frame.lines)
        return False


def _is_bad_output(line: Line) -> bool:
    return line.phase == "output" and isinstance(line.what, Reading) and line.what.is_bad


def _leaves_inputs_alone(module: Module) -> bool:
    """Tell whether what goes into a module is the same when it comes out: one hook costs half of two."""
    ours = type(module).__module__.startswith("torch.nn.modules.")
    return ours and not module._modules and not getattr(module, "inplace", False)
