"""A class of fields that are never assigned again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

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

    def record(cls=None, /, *, eq=True, order=False, **options):  # noqa: ANN001, ANN003, ANN201 - see above
        """Make a dataclass, hashable where it can be compared. Only type checkers refuse the assignment to a field.

        Of the methods that a dataclass generates for each class, only `__init__` and those of `order` are. All of them,
        with `frozen=True`, take 30% of the CPU time of `distdiag hang --help`.
        """

        def decorate(cls):  # noqa: ANN001, ANN202
            if order:
                return dataclass(eq=eq, order=True, unsafe_hash=eq, **options)(cls)
            made = dataclass(eq=False, repr=False, **options)(cls)
            made.__repr__ = _repr
            if eq:
                compared = [each.name for each in fields(made) if each.compare]
                made._compared = attrgetter(*compared)
                made.__eq__, made.__hash__ = _eq, _hash
            return made

        return decorate if cls is None else decorate(cls)


def _repr(self: Any) -> str:  # noqa: ANN401 - of each record
    values = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({values})"


def _eq(self: Any, other: Any) -> Any:  # noqa: ANN401
    """Compare the fields of two records of one class."""
    return self._compared(self) == self._compared(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:  # noqa: ANN401
    return hash(self._compared(self))
