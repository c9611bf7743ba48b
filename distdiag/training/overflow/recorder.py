"""Full frames: hooks on all modules of a model, which read each tensor that goes in or comes out once."""

from __future__ import annotations

import sys
import weakref
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distdiag.training.overflow import numbers, walk
from distdiag.training.overflow.frames import Frame, Line, version_of
from distdiag.training.overflow.hook import Hook
from distdiag.training.overflow.names import kind_of, named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

_HELD_BYTES = 256 << 20
"""So much of tensors is kept, beside those of the last frames, until their numbers are fetched all at once."""


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
        self._model, self._names, self._keep, self._ignore = model, named(model), keep, tuple(ignore)
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Line]] = {}
        self._handles: list[RemovableHandle] = []
        self._clear()

    def _clear(self) -> None:
        self.frames: list[Frame] = []
        self.bad: Line | None = None
        self.masks: list[Line] = []
        self._stack: list[Frame] = []
        self._open: list[Line] = []
        self._held = self._count = 0
        self._last, self._most = -1, self._keep
        self.runs = False

    def attach(self) -> None:
        """Put the hooks on."""
        for module in self._names:
            if module is self._model or isinstance(module, torch.jit.ScriptModule):
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
        self._seen.clear()
        self._clear()

    def begin(self, args: tuple[object, ...], kwargs: dict[str, object], *, everything: bool = False) -> None:
        """Begin a forward of the model; `everything`: keep all of its frames."""
        self._clear()
        self._most = sys.maxsize if everything else self._keep
        self.runs = True
        self._before(self._model, args, kwargs)

    def end(self, output: object) -> None:
        """End it: now all numbers are known."""
        self._after(self._model, (), {}, output)
        self._fetch()
        self.runs = False
        self._trim()
        if len(self._seen) > 4 * len(self._names) + 4096:  # of tensors that are gone
            self._seen = {key: one for key, one in self._seen.items() if one[0]() is not None}

    def _before(self, module: Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.compiler.is_compiling() or not self.runs:
            return
        with torch.no_grad():
            frame = Frame(self._names[module], kind_of(module), self._stack[-1] if self._stack else None)
            self._stack.append(frame)
            for name, weight in module._parameters.items():
                if weight is not None:
                    self._read(frame, "weight", name, weight)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    self._read(frame, "buffer", name, buffer)
            for label, value in walk.inputs(args, kwargs):
                self._read(frame, "input", label, value)
            if self.exact:
                self._fetch()

    def _after(self, module: Module, args: object, kwargs: object, output: object) -> None:
        if torch.compiler.is_compiling() or not self.runs or not self._stack:
            return
        with torch.no_grad():
            name = self._names[module]
            while self._stack[-1].name != name and len(self._stack) > 1:  # a call that was left by an exception
                self._stack.pop()
            frame = self._stack.pop()
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

    def _read(self, frame: Frame, phase: str, label: str, value: object) -> None:
        line = Line(frame, phase, label)
        frame.lines.append(line)
        if not isinstance(value, Tensor):
            line.text = "None" if value is None else "not a tensor"
            return
        version = version_of(value)
        known = self._seen.get(id(value))
        if known is not None and known[0]() is value and known[1] == version != -1:
            self._repeat(line, value, known[2])
            return
        found = numbers.start(value)
        if isinstance(found, str):
            line.text = found
            return
        line.source, line.version = value, version
        line.numbers, least, greatest = found
        line.ends = (least, greatest)
        self._open.append(line)
        self._held += line.numbers.nbytes
        self._seen[id(value)] = (weakref.ref(value), version, line)

    def _repeat(self, line: Line, value: Tensor, known: Line) -> None:
        """Take over what is known of the same numbers; if that is still on the device, also from there."""
        line.source, line.version, line.numbers = value, known.version, known.numbers
        if line.numbers is None:  # `known` was let go of
            again = numbers.readable(value)
            line.numbers = None if isinstance(again, str) else again
        line.least, line.greatest, line.exact, line.ends = known.least, known.greatest, known.exact, known.ends
        if line.ends is not None or line.is_bad:
            self._open.append(line)

    def _fetch(self) -> None:
        opened, self._open, self._held = self._open, [], 0
        waiting = [line for line in opened if line.ends is not None]
        values = numbers.fetch([end for line in waiting for end in line.ends or ()])
        for line, least, greatest in zip(waiting, values[::2], values[1::2]):
            line.least, line.greatest, line.ends = least, greatest, None
        for line in opened:
            if self.exact:
                line.abs_min()
            if line.is_bad and not self._is_fine(line):
                line.alarm = True
                self.bad = self.bad or line
        self._trim()

    def _trim(self) -> None:
        """Keep the last frames; once something went wrong, those that lead there."""
        if self._last < 0 and self.bad is not None:
            self._last = next((one.number for one in self.frames if any(line.alarm for line in one.lines)), -1)
        if self._last >= 0:
            self.frames = [frame for frame in self.frames if frame.number <= self._last]
        gone, self.frames = self.frames[: -self._most], self.frames[-self._most :]
        for frame in gone:
            for line in frame.lines:
                line.release()

    def _is_fine(self, line: Line) -> bool:
        """Tell whether what is not finite is meant so: ignored, or a mask."""
        where = (line.frame.name, f"{line.frame.name}:{line.label}")
        if any(fnmatchcase(one, pattern) for one in where for pattern in self._ignore):
            return True
        if line.least != -float("inf") or line.greatest == float("inf"):
            return False
        given_to_softmax = line.phase == "input" and "softmax" in line.frame.kind.lower()
        mask = numbers.looks_like_mask(line.least, line.greatest)
        if mask and line.numbers is not None and line.unchanged():
            mask = numbers.is_mask(line.numbers)
        if mask or given_to_softmax:
            self.masks.append(line)
        return mask or given_to_softmax
