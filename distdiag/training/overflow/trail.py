"""Where the gradient of a loss is lost on its way back: it is small, and what comes of it in float16 is 0."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from distdiag.training.overflow import numbers, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from distdiag.training.overflow.detection import Place

_MOST = 100_000
_SMALL = 2.0**-14
"""Below it float16 loses digits. What is larger does not become 0 by a product with an ordinary number."""
_ROUND = ("ToCopy", "Mean", "Div")
"""These give 0 by rounding only."""
_CHOOSE = (
    *("Relu", "Threshold", "Hardtanh", "Clamp", "Where", "MaskedFill", "Max", "Min", "Amax", "Amin", "Index"),
    *("Select", "Slice", "Gather", "Sort", "Topk", "NativeDropout", "Abs", "Sign", "Round", "Floor", "Ceil"),
)
"""These give 0 for what they left out."""


class Loss(NamedTuple):
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


class Trail:
    """Reads what goes in and out of each operation of one backward; what it reads stays on the device."""

    def __init__(self, losses: object, places: Mapping[Any, Place]) -> None:
        """Follow the gradients of what backward is called on; `places`: of which modules some operations end."""
        self._steps: list[_Step] = []
        roots = [one.grad_fn for _, one in walk.tensors(losses, "") if one.grad_fn is not None]
        self._hooks = []
        for node, behind in _nodes(roots, places):
            arrives = any(after is not None and "AccumulateGrad" in after.name() for after, _ in node.next_functions)
            self._hooks.append(node.register_hook(partial(self._saw, node.name(), behind, arrives)))

    def _saw(self, name: str, behind: Place | None, arrives: bool, made: object, given: object) -> None:
        with torch.no_grad():
            ins = [end for _, ends in _ends(given) for end in ends]
            self._steps.append(_Step(name, behind, arrives, ins, list(_ends(made))))

    def lost(self) -> Loss | None:
        """Say where it was lost by underflow first; None if it was not, or some of it came to a weight."""
        for hook in self._hooks:
            hook.remove()
        for step in self._steps:
            if step.arrives and _most([end for _, ends in step.made for end in ends]) > 0:
                return None
        for step in self._steps:
            size = _most(step.given)
            operation = step.operation.rstrip("0123456789").removesuffix("Backward").lstrip("_")
            half = any(dtype is torch.float16 for dtype, _ in step.made)
            if not half or not size > 0 or _most([end for _, ends in step.made for end in ends]) > 0:
                continue
            if operation in _ROUND or (size < _SMALL and not operation.startswith(_CHOOSE)):
                return Loss(operation, step.behind, size)
        return None


def _nodes(roots: list[Any], places: Mapping[Any, Place]) -> Iterator[tuple[Any, Place | None]]:
    """List the operations that a backward runs, and the module nearest to the loss behind whose output each lies."""
    known = set(roots)
    now: list[tuple[Any, Place | None]] = [(one, None) for one in roots]
    while now and len(known) < _MOST:
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


def _ends(values: object) -> Iterator[tuple[torch.dtype, tuple[Tensor, Tensor]]]:
    for _, tensor in walk.tensors(values, ""):
        found = numbers.start(tensor)
        if not isinstance(found, str):
            yield tensor.dtype, found[1]


def _most(ends: list[Tensor]) -> float:
    return max(map(abs, numbers.fetch(ends)), default=0.0)
