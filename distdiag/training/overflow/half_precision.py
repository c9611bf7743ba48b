"""What float16 is too short or too coarse for: outputs that grow towards its limit, gradients that underflow."""

from __future__ import annotations

import math
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from distdiag.training.overflow import extrema, nested
from distdiag.training.overflow.detection import Place
from distdiag.training.overflow.fixes import in_float32
from distdiag.training.overflow.modules import Hook, kind_of, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

    from distdiag.training.overflow.backward import Gradient


_DENSE = 256
_LARGE = 1e4
"""In float16 the product of two such numbers is inf."""
_GROWTH = 2.0


def is_due(step: int) -> bool:
    """Return whether more of a step is looked at: of 0, 1, 2, 4 and so on, and of every 256th."""
    return step % _DENSE == 0 or (step < _DENSE and step & (step - 1) == 0)


class Glance:
    """Hooks on all modules of a model during one forward.

    `nodes`: which module's output autograd has there; `sizes`: the greatest magnitudes in float16, the first first.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._thread = 0
        self._extrema: list[tuple[Place, tuple[Tensor, Tensor]]] = []
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
        """Remove them; now the numbers are known."""
        self._look(self._model, output)
        values = extrema.fetch([value for _, pair in self._extrema for value in pair])
        for (place, _), least, greatest in zip(self._extrema, values[::2], values[1::2], strict=True):
            self.sizes[place] = max(self.sizes.get(place, 0.0), _size(least, greatest))
        self._unhook()

    def stop(self) -> None:
        """Remove the hooks, also where the forward was left by an exception, and let go of all."""
        self._unhook()
        self.nodes, self.sizes = {}, {}

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._thread = 0
        self._handles, self._extrema, self._places = [], [], {}

    def _after(self, module: Module, args: object, output: object) -> None:
        if self._thread == get_ident() and not torch.compiler.is_compiling():
            with torch.no_grad():
                self._look(module, output)

    def _look(self, module: Module, output: object) -> None:
        place = self._places[module]
        for _, tensor in nested.tensors(output, "output"):
            if tensor.grad_fn is not None:
                self.nodes.setdefault(tensor.grad_fn, place)
            if tensor.dtype is torch.float16:
                found = extrema.start(tensor)
                if not isinstance(found, str):
                    self._extrema.append((place, found[1]))
                    self.device = tensor.device.type


class Growth:
    """What the modules gave back in float16 in the steps that were looked at."""

    def __init__(self) -> None:
        self._seen: dict[Place, list[float]] = {}
        """The first, the last but one, the last."""
        self._first_step = -1
        self._told = 0.0

    def look(self, step: int, glance: Glance, *, autocast: bool) -> str:
        """Describe what has grown over the last looks until it is near what float16 holds; empty if nothing new has."""
        if self._first_step < 0:
            self._first_step = step
        grown = [place for place, size in glance.sizes.items() if self._has_grown(place, size)]
        if not grown:
            return ""
        most = max(glance.sizes[place] for place in grown)
        if most < _GROWTH * self._told:
            return ""
        self._told = most
        place = grown[0]
        share = 100 * glance.sizes[place] / extrema.limit(torch.float16)
        others = f", as in {len(grown) - 1} modules after it" if len(grown) > 1 else ""
        return (
            f"step {step}: the float16 output of {place} grows{others}: {self._seen[place][0]:.1e} in step "
            f"{self._first_step}, {glance.sizes[place]:.1e} now, {share:.0f}% of float16 max; 1e4 x 1e4 overflows. "
            f"{in_float32(place.module, glance.device) if autocast else _BFLOAT}"
        )

    def _has_grown(self, place: Place, size: float) -> bool:
        known = self._seen.setdefault(place, [])
        known.append(size)
        if len(known) > 3:
            del known[1]
        rises = len(known) == 3 and known[2] > known[1] and (known[1] > known[0])
        return size >= _LARGE and rises and size >= _GROWTH * known[0]


_BFLOAT = "In bfloat16: model.to(torch.bfloat16)"


def _size(least: float, greatest: float) -> float:
    """Return the greatest magnitude, but for what masks are made of."""
    most = extrema.limit(torch.float16)
    return max((abs(value) for value in (least, greatest) if math.isfinite(value) and abs(value) != most), default=0.0)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile is at work in it, which is not to see other hooks now and then."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


_MOST_NODES = 100_000
_SMALL = 2.0**-14
"""Below it float16 loses digits. What is larger does not become 0 by a product with an ordinary number."""
_ROUND = ("ToCopy", "Mean", "Div")
"""These give 0 by rounding only."""
_CHOOSE = (
    *("Relu", "Threshold", "Hardtanh", "Clamp", "Where", "MaskedFill", "Max", "Min", "Amax", "Amin", "Index"),
    *("Select", "Slice", "Gather", "Sort", "Topk", "NativeDropout", "Abs", "Sign", "Round", "Floor", "Ceil"),
)
"""These give 0 for what they left out."""


class LostGradient(NamedTuple):
    """An operation into whose backward a gradient went, of this magnitude at most, and out of which came zeros.

    `behind`: the nearest module on the way to the loss; None between the model and the loss.
    """

    operation: str
    behind: Place | None
    size: float


class _Step(NamedTuple):
    operation: str
    behind: Place | None
    arrives: bool
    given: list[Tensor]
    made: list[tuple[torch.dtype, tuple[Tensor, Tensor]]]


class BackwardTrace:
    """Reads what goes in and out of each operation of one backward; what it reads stays on the device."""

    def __init__(self, losses: object, places: Mapping[Any, Place]) -> None:
        """Follow the gradients of what backward is called on; `places`: of which modules some operations end."""
        self._steps: list[_Step] = []
        roots = [tensor.grad_fn for _, tensor in nested.tensors(losses, "") if tensor.grad_fn is not None]
        self._hooks = []
        for node, behind in _nodes(roots, places):
            arrives = any(after is not None and "AccumulateGrad" in after.name() for after, _ in node.next_functions)
            self._hooks.append(node.register_hook(partial(self._saw, node.name(), behind, arrives)))

    def _saw(self, name: str, behind: Place | None, arrives: bool, made: object, given: object) -> None:
        with torch.no_grad():
            ins = [value for _, pair in _extrema_of(given) for value in pair]
            self._steps.append(_Step(name, behind, arrives, ins, list(_extrema_of(made))))

    def lost(self) -> LostGradient | None:
        """Describe where it was lost by underflow first; None if it was not, or some of it came to a weight."""
        for hook in self._hooks:
            hook.remove()
        for step in self._steps:
            if step.arrives and _greatest([value for _, pair in step.made for value in pair]) > 0:
                return None
        for step in self._steps:
            size = _greatest(step.given)
            operation = step.operation.rstrip("0123456789").removesuffix("Backward").lstrip("_")
            half = any(dtype is torch.float16 for dtype, _ in step.made)
            if not half or not size > 0 or _greatest([value for _, pair in step.made for value in pair]) > 0:
                continue
            if operation in _ROUND or (size < _SMALL and not operation.startswith(_CHOOSE)):
                return LostGradient(operation, step.behind, size)
        return None


def _nodes(roots: list[Any], places: Mapping[Any, Place]) -> Iterator[tuple[Any, Place | None]]:
    """List the operations that a backward runs, and the module nearest to the loss behind whose output each lies."""
    known = set(roots)
    now: list[tuple[Any, Place | None]] = [(node, None) for node in roots]
    while now and len(known) < _MOST_NODES:
        after: list[tuple[Any, Place | None]] = []
        for node, behind in now:
            place = places.get(node, behind)
            if "AccumulateGrad" in node.name():
                continue
            yield node, place
            for other, _ in node.next_functions:
                if other is not None and other not in known:
                    known.add(other)
                    after.append((other, place))
        now = after


def _extrema_of(values: object) -> Iterator[tuple[torch.dtype, tuple[Tensor, Tensor]]]:
    for _, tensor in nested.tensors(values, ""):
        found = extrema.start(tensor)
        if not isinstance(found, str):
            yield tensor.dtype, found[1]


def _greatest(values: list[Tensor]) -> float:
    return max(map(abs, extrema.fetch(values)), default=0.0)


_SHARE = 0.5
"""From this share of zeros and subnormals on, if as much of what is not zero is subnormal.

Zeros alone mean nothing: rows of an embedding that were not looked up, and all that lies before a layer of zeros.
"""
_MEND = "Use autocast and a GradScaler with float32 weights, or bfloat16: model.to(torch.bfloat16)"
_SCALED = (
    "Scale the loss: scaler = torch.amp.GradScaler({device!r}); scaler.scale(loss).backward(); "
    "scaler.step(optimizer); scaler.update()"
)


class Underflow:
    """Looks at the gradients of a few steps, and tells of each once.

    Where all of them are exactly 0 the next backward is followed: only what is lost there by rounding is told.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._before_zeros: set[str] = set()
        """Gradients that were exactly 0 while others were not, as before a layer of zeros; it begins to learn then."""
        self._zeros_at = -1
        self._trace: BackwardTrace | None = None

    @property
    def wants_trace(self) -> bool:
        """Whether the next backward is to be followed."""
        return self._zeros_at >= 0

    def follow(self, losses: object, places: Mapping[Any, Place]) -> None:
        """Follow a backward that is about to run."""
        if self._trace is None:  # of several before a step the first, whose forward was looked at
            self._trace = BackwardTrace(losses, places)

    def look(self, gradients: Sequence[Gradient], step: int, *, scaled: bool) -> str:
        """Describe what underflowed in a step; empty if that is not to be looked at, or there is nothing new."""
        if self._trace is not None:
            trace, self._trace, before = self._trace, None, self._zeros_at
            self._zeros_at = -1
            return self._all_lost(trace, gradients, step, before)
        if not is_due(step) or not gradients:
            return ""
        if not scaled and "" not in self._told and _are_zero(gradients):
            self._zeros_at = step
            return ""
        return self._partly_lost(gradients, step)

    def _all_lost(self, trace: BackwardTrace, gradients: Sequence[Gradient], step: int, before: int) -> str:
        lost = trace.lost()
        if lost is None or not _are_zero(gradients):
            return ""
        self._told.add("")
        weight = gradients[0].tensor
        where = f"after the output of {lost.behind}" if lost.behind else "before it reaches the model"
        mend = _MEND if weight.dtype is torch.float16 else _SCALED.format(device=weight.device.type)
        return (
            f"step {step}: all {len(gradients)} gradients are exactly 0, as in step {before}: they underflow in "
            f"float16. The backward of {lost.operation}, {where}, gets at most {lost.size:.1e} and returns 0; "
            f"float16 has no number below 6e-08. {mend}"
        )

    def _partly_lost(self, gradients: Sequence[Gradient], step: int) -> str:
        shares = {gradient.name: self._share_of(gradient) for gradient in gradients}
        lost = {name: share for name, share in shares.items() if share >= _SHARE and name not in self._told}
        if not lost:
            return ""
        self._told |= lost.keys()
        name, share = max(lost.items(), key=lambda item: item[1])
        return (
            f"underflow in step {step}: {len(lost)} of {len(shares)} float16 gradients are mostly zero or subnormal; "
            f"`{name}.grad`: {100 * share:.0f}%. {_MEND}"
        )

    def _share_of(self, gradient: Gradient) -> float:
        """Return the share of a float16 gradient that is lost; 0 for dtypes of more range and where zeros are meant."""
        tally = extrema.tally(gradient.tensor) if gradient.tensor.dtype is torch.float16 else None
        if tally is None or not tally.of:
            return 0.0
        share = (tally.zeros + tally.subnormals) / tally.of
        if tally.zeros == tally.of:
            self._before_zeros.add(gradient.name)
        elif share < _SHARE:
            self._before_zeros.discard(gradient.name)
        is_meant = gradient.name in self._before_zeros or tally.subnormals < _SHARE * (tally.of - tally.zeros)
        return 0.0 if is_meant else share


def _are_zero(gradients: Sequence[Gradient]) -> bool:
    return bool(gradients) and not any(extrema.fetch([value for gradient in gradients for value in gradient.extrema]))
