"""JSON read as facts of a type, validated. No input is trusted.

Anything invalid (not JSON, nested too deeply, wrong type, an impossible number) is one error with one sentence; the
caller decides which row it affects.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec  # noqa: TID253 - this module is only imported when there are nodes or files to read

from distdiag.errors import DistdiagError
from distdiag.facts.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")
MAX_RANKS = 2**20
_QUOTED_BYTES = 60
_REASON_LETTERS = 200
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("rank", "local_rank", "ranks"), (0, MAX_RANKS - 1)),
    **dict.fromkeys(("world_size", "local_world_size"), (0, MAX_RANKS)),
    **dict.fromkeys(("pid", "tid", "parent", "above", "user", "os_thread_id"), (-(2**32), 2**32)),
    **dict.fromkeys(("port", "samples"), (0, 2**16 - 1)),
}
_ANY_INT = (-(2**64), 2**64)
_BY_UNIT = {"_s": (-1e11, 1e11), "_ns": (-(2**63), 2**63), "_bytes": (-1, 2**63)}
_ANY_FLOAT = (-1e300, 1e300)


class InvalidData(DistdiagError):
    """Invalid data; the message has the reason, not the sender."""


def read_json(data: bytes | msgspec.Raw, type_: type[T]) -> T:
    """Decode JSON as facts of a type. Raises InvalidData."""
    with one_error(data):
        facts = msgspec.json.decode(data, type=type_)
        check(facts)
        return facts


def check(value: Any, name: str = "") -> None:  # noqa: ANN401 - any facts
    """Raise ValueError for an impossible number, judged by its field's name."""
    if isinstance(value, str) or value is None or value is True or value is False:
        return
    if isinstance(value, (int, float)):
        low, high = _limits(name, value)
        if not low <= value <= high:
            raise ValueError(f"{name or 'a number'} is out of range: {str(value)[:30]}")
    elif isinstance(value, (tuple, list)):
        for item in value:
            check(item, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            check(item, key if isinstance(key, str) else name)
    else:
        for key, item in _fields(value):
            check(item, key)


def _limits(name: str, value: float) -> tuple[float, float]:
    if name in _LIMITS:
        return _LIMITS[name]
    start, _, unit = name.rpartition("_")
    is_rate = start.endswith("_per")  # bytes or bits: NVLink has 1e12
    return (None if is_rate else _BY_UNIT.get(f"_{unit}")) or (_ANY_INT if isinstance(value, int) else _ANY_FLOAT)


def _fields(value: object) -> Iterable[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        return [(name, getattr(value, name)) for name in value.__struct_fields__]
    return vars(value).items() if dataclasses.is_dataclass(value) else ()


@contextlib.contextmanager
def one_error(data: bytes | msgspec.Raw) -> Iterator[None]:
    """Raise InvalidData for any error in these bytes."""
    try:
        yield
    except RecursionError:
        reason = "nested too deeply"
    except (msgspec.DecodeError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        reason = printable(str(error)[:_REASON_LETTERS])
    else:
        return
    start = printable(bytes(data)[:_QUOTED_BYTES].decode("utf-8", "replace"))
    raise InvalidData(f'{reason}, in "{start}"')
