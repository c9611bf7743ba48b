"""Hooks that stay with the model they were put on: a copy of it, or a file, has none."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Hook:
    """Calls a method. Copied (an average of the weights is often a copy of the model) or pickled, it does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method
        self.__name__ = type(self).__name__

    def __call__(self, *args: object) -> None:
        """Do as the method does."""
        self._method(*args)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[object, ...]:
        # Of the standard library, so that a file can be read where there is no distdiag; it takes anything.
        return getattr, (contextlib.nullcontext(), "__exit__")
