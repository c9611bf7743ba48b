"""What a line of a job's log is worth: cause, consequence, confirmation or advice; as data (logs.toml, torch.toml)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Role = Literal["cause", "consequence", "confirmation", "advice", "job"]
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class KnownLine:
    """One known line. `accuses`: the group that names the ranks at fault; "none": the line does not tell them."""

    id: str
    pattern: str
    role: Role
    means: str
    source: str
    words: tuple[str, ...] = ("",)
    fix: str = ""
    commands: tuple[str, ...] = ()
    accuses: str = ""
    alone: bool = False
    """It explains the end of a job of which nothing better is known."""

    def meaning(self, groups: Mapping[str, str]) -> str:
        """Return what it means, with what the line says filled in."""
        return _PLACE.sub(lambda place: groups.get(place[1], "?"), self.means)

    def remedy(self, groups: Mapping[str, str]) -> str:
        """Return the fix, with what the line says filled in."""
        return _PLACE.sub(lambda place: groups.get(place[1], "?"), self.fix)


@cache
def known_lines() -> dict[str, KnownLine]:
    """Return all rows by id, in their order of trust."""
    import msgspec

    own = msgspec.convert(_read("logs.toml")["line"], list[KnownLine])
    rows = _read("torch.toml")["failure"]
    torch = [msgspec.convert({**row, "id": f"torch-{number}"}, KnownLine) for number, row in enumerate(rows, 1)]
    return {row.id: row for row in (*own, *torch)}


@dataclass(frozen=True, kw_only=True)
class KnownException:
    """What the text of an exception that ended a rank means, and what to check. Of a mere line it proves nothing."""

    pattern: str
    means: str
    fix: str
    source: str


def known_exception(text: str) -> KnownException | None:
    """Return the row that fits the text of an exception, its type first."""
    return next((row for row in _exceptions() if re.search(row.pattern, text)), None)


@cache
def _exceptions() -> tuple[KnownException, ...]:
    import msgspec

    return tuple(msgspec.convert(_read("logs.toml")["exception"], list[KnownException]))


def for_nodes() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return what a node needs to find these lines: id, pattern and words of each."""
    return [(row.id, row.pattern, row.words) for row in known_lines().values()]


def _read(name: str) -> dict[str, list[dict[str, object]]]:
    return tomllib.loads(resources.files(__package__).joinpath(name).read_text("utf-8"))
