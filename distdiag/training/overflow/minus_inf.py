"""Whether -inf in an output was filled in, as masks are, or came out of a calculation with finite numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from distdiag.training.overflow import numbers, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_FILL = ("fill", "where", "scatter", "index", "copy", "lift", "put", "tri", "clone", "detach", "pad")
"""Operations that write -inf which somebody chose, or numbers as they are; a conversion is no calculation either."""


class Makers(TorchDispatchMode):
    """Sees each operation of a forward, and keeps of each tensor with -inf which operation made that."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[Tensor, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
        """Carry out an operation, and look at what goes in and comes out."""
        inputs = [one for _, one in walk.tensors((args, kwargs), "")]
        given = [one for one in inputs if _has(one)]  # before it writes into them
        made = func(*args, **(kwargs or {}))
        name = str(getattr(func, "_schema", func)).partition("(")[0].partition("::")[2].partition(".")[0].strip("_")
        for one in _with_it(made):
            known = [self._made[id(before)][1] for before in given if id(before) in self._made]
            calculates = inputs and not given and not any(part in name for part in _FILL)
            operation = known[0] if known else name if calculates else ""
            self._made[id(one)] = (one, operation)
        return made

    def maker_of(self, tensor: Tensor) -> str:
        """Name the operation that made the -inf of a tensor out of finite numbers; empty if none did."""
        return self._made.get(id(tensor), (tensor, ""))[1]


def _with_it(value: Any) -> Iterator[Tensor]:  # noqa: ANN401
    return (one for _, one in walk.tensors(value, "") if _has(one))


def _has(tensor: Tensor) -> bool:
    if not tensor.dtype.is_floating_point:
        return False
    found = numbers.start(tensor)
    return not isinstance(found, str) and numbers.fetch(found[1][:1]) == [-math.inf]
