"""A class of fields that are never assigned again."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import field
    from typing import Any, TypeVar, dataclass_transform, overload

    _Class = TypeVar("_Class")

    @overload
    def record(cls: type[_Class], /) -> type[_Class]: ...
    @overload
    def record(
        *, eq: bool = True, order: bool = False, kw_only: bool = False, slots: bool = False
    ) -> Callable[[type[_Class]], type[_Class]]: ...
    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    def record(cls: type[Any] | None = None, /, **options: bool) -> Any:
        """See below."""
else:

    def record(cls=None, /, *, eq=True, **options):  # noqa: ANN001, ANN003, ANN201 - see above
        """Make a dataclass, hashable where it can be compared. Only type checkers refuse the assignment to a field.

        `frozen=True` generates two more methods for each class, 15% of the CPU time of `distdiag hang --help`.
        """
        decorate = dataclass(eq=eq, unsafe_hash=eq, **options)
        return decorate if cls is None else decorate(cls)
