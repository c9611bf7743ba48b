"""One forward in many of which more is looked at: what modules give back in float16, and where autograd has that."""

from __future__ import annotations

import math
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distdiag.training.overflow import numbers, walk
from distdiag.training.overflow.detection import Place, in_float32
from distdiag.training.overflow.hook import Hook
from distdiag.training.overflow.names import kind_of, named

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

_DENSE = 256
_LARGE = 1e4
"""In float16 the product of two such numbers is inf."""
_GROWN = 2.0


def is_due(step: int) -> bool:
    """Tell whether more of a step is looked at: of 0, 1, 2, 4 and so on, and of every 256th."""
    return step % _DENSE == 0 or (step < _DENSE and step & (step - 1) == 0)


class Glance:
    """Hooks on all modules of a model during one forward.

    `nodes`: which module's output autograd has there; `sizes`: the greatest magnitudes in float16, the first first.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._thread = 0
        self._ends: list[tuple[Place, tuple[Tensor, Tensor]]] = []
        self._places: dict[Module, Place] = {}
        self.nodes: dict[Any, Place] = {}
        self.sizes: dict[Place, float] = {}
        self.device = "cpu"

    def begin(self) -> None:
        """Put the hooks on."""
        self._thread = get_ident()
        self._places = {module: Place(name, kind_of(module)) for module, name in named(self._model).items()}
        if any(_is_compiled(module) for module in self._places):
            return
        for module in self._places:
            if module is not self._model and not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_forward_hook(Hook(self._after)))

    @property
    def is_on(self) -> bool:
        """Whether this thread's forward is looked at."""
        return self._thread == get_ident()

    def end(self, output: object) -> None:
        """Take them off; now the numbers are known."""
        self._look(self._model, output)
        values = numbers.fetch([end for _, ends in self._ends for end in ends])
        for (place, _), least, greatest in zip(self._ends, values[::2], values[1::2], strict=True):
            self.sizes[place] = max(self.sizes.get(place, 0.0), _size(least, greatest))
        self._unhook()

    def stop(self) -> None:
        """Take the hooks off, also where the forward was left by an exception, and let go of all."""
        self._unhook()
        self.nodes, self.sizes = {}, {}

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._thread = 0
        self._handles, self._ends, self._places = [], [], {}

    def _after(self, module: Module, args: object, output: object) -> None:
        if self._thread == get_ident() and not torch.compiler.is_compiling():
            with torch.no_grad():
                self._look(module, output)

    def _look(self, module: Module, output: object) -> None:
        place = self._places[module]
        for _, tensor in walk.tensors(output, "output"):
            if tensor.grad_fn is not None:
                self.nodes.setdefault(tensor.grad_fn, place)
            if tensor.dtype is torch.float16:
                found = numbers.start(tensor)
                if not isinstance(found, str):
                    self._ends.append((place, found[1]))
                    self.device = tensor.device.type


class Growth:
    """What the modules gave back in float16 in the steps that were looked at."""

    def __init__(self) -> None:
        self._seen: dict[Place, list[float]] = {}
        """The first, the last but one, the last."""
        self._first_step = -1
        self._told = 0.0

    def look(self, step: int, glance: Glance, *, autocast: bool) -> str:
        """Say what has grown over the last looks until it is near what float16 holds; empty if nothing new has."""
        if self._first_step < 0:
            self._first_step = step
        grown = [place for place, size in glance.sizes.items() if self._has_grown(place, size)]
        if not grown:
            return ""
        most = max(glance.sizes[one] for one in grown)
        if most < _GROWN * self._told:
            return ""
        self._told = most
        place = grown[0]
        share = 100 * glance.sizes[place] / numbers.limit(torch.float16)
        others = f", and that of {len(grown) - 1} modules after it" if len(grown) > 1 else ""
        return (
            f"step {step}: what {place} gives back in float16 grows{others}: {self._seen[place][0]:.1e} in step "
            f"{self._first_step}, {glance.sizes[place]:.1e} now, {share:.0f} % of float16's greatest number; "
            f"1e4 x 1e4 overflows. {in_float32(place.module, glance.device) if autocast else _BFLOAT}"
        )

    def _has_grown(self, place: Place, size: float) -> bool:
        known = self._seen.setdefault(place, [])
        known.append(size)
        if len(known) > 3:
            del known[1]
        rises = len(known) == 3 and known[2] > known[1] and (known[1] > known[0])
        return size >= _LARGE and rises and size >= _GROWN * known[0]


_BFLOAT = "In bfloat16: model.to(torch.bfloat16)"


def _size(least: float, greatest: float) -> float:
    """Give the greatest magnitude, but for what masks are made of."""
    most = numbers.limit(torch.float16)
    return max((abs(end) for end in (least, greatest) if math.isfinite(end) and abs(end) != most), default=0.0)


def _is_compiled(module: nn.Module) -> bool:
    """Tell whether torch.compile is at work in it, which is not to see other hooks now and then."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
