"""Records: dataclasses whose fields only type checkers protect."""

from __future__ import annotations

from dataclasses import asdict, field, replace

import pytest

from distdiag.record import record


@record
class Place:
    host: str
    ranks: tuple[int, ...] = field(default=(), compare=False)


@record(kw_only=True, order=True)
class Numbered(Place):
    number: int = 0


@record(eq=False)
class Single:
    host: str


def test_a_record_is_a_dataclass_and_hashable_where_it_can_be_compared() -> None:
    place = Place("a", (1,))
    assert {place, Place("a")} == {place}
    assert place != Place("b")
    assert place != Numbered(host="a")
    assert repr(place) == "Place(host='a', ranks=(1,))"
    assert asdict(replace(place, host="b")) == {"host": "b", "ranks": (1,)}
    assert Numbered(host="a", number=1) < Numbered(host="a", number=2)
    assert len({Single("a"), Single("a")}) == 2


def test_mypy_refuses_what_a_record_does_not_allow() -> None:
    """Mypy complains of an `ignore` without an error."""
    place = Place("a")
    place.host = "b"  # type: ignore[misc]
    Numbered(host="a").number = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="port"):
        replace(place, port=1)  # type: ignore[call-arg]
