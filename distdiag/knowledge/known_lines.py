"""Known lines of jobs, builds and kernels: what each means, its role, and the fix; as data (lines/*.toml)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Literal

from distdiag.facts.line_patterns import Patterns

if TYPE_CHECKING:
    from collections.abc import Mapping

Role = Literal["cause", "consequence", "confirmation", "advice", "job", "warning", "note"]
JOBS = ("launchers", "hub", "cuda", "network", "nccl", "host", "kernel", "jobs", "torch", "wrappers")
"""The files of rows of a job's output, in their order of trust."""
BUILDS = "builds"
_PLACE = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^][]*\{\w+\}[^][]*)\]")


@dataclass(frozen=True, kw_only=True)
class KnownLine:
    """One known line. `accuses`: the group that names the ranks at fault; "none": the line does not tell them.

    `breaks`: what does not work then; `checks`: ids of `distdiag cuda-env` that look for its cause on a machine;
    `alone`: it explains the end of a job of which nothing better is known.
    """

    id: str
    role: Role
    means: str
    source: str
    pattern: str = ""
    words: tuple[str, ...] = ("",)
    breaks: str = ""
    fix: str = ""
    commands: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    accuses: str = ""
    alone: bool = False

    def meaning(self, groups: Mapping[str, str]) -> str:
        """Return what it means, with what the line says filled in."""
        return fill(self.means, groups)

    def remedy(self, groups: Mapping[str, str]) -> str:
        """Return the fix, with what the line says filled in."""
        return fill(self.fix, groups)

    def commands_for(self, groups: Mapping[str, str]) -> tuple[str, ...]:
        """Return the commands, with what the line says filled in; none that lacks a part."""
        return tuple(fill(each, groups) for each in self.commands if set(_PLACE.findall(each)) <= {*groups})


@cache
def trust(id_: str) -> int:
    """Return the place of a row in the order of trust, the first best; an unknown one is last."""
    return {name: place for place, name in enumerate(known_lines())}.get(id_, len(known_lines()))


def fill(words: str, groups: Mapping[str, str]) -> str:
    """Fill {groups} in, and drop each [part in brackets] that has a group which the log does not have."""
    words = _OPTIONAL.sub(lambda part: part[1] if set(_PLACE.findall(part[1])) <= {*groups} else "", words)
    return _PLACE.sub(lambda place: groups.get(place[1], "?"), words)


@cache
def known_lines() -> dict[str, KnownLine]:
    """Return all rows by id, in their order of trust."""
    return {row.id: row for name in JOBS for row in _rows(name)}


@cache
def known_builds() -> tuple[KnownLine, ...]:
    """Return the rows of builds and loads of CUDA extensions, in their order of trust."""
    return tuple(_rows(BUILDS))


def recognise(text: str) -> KnownLine | None:
    """Return the first row that fits a text and tells why a rank failed, with what the text says filled in."""
    matcher, rows = _of_jobs(), known_lines()
    found = matcher.first(text, lambda id_: rows[id_].role in ("cause", "consequence"))
    if found is None:
        return None
    row, groups = rows[found[0]], found[1]
    commands = row.commands_for(groups)
    return replace(row, means=row.meaning(groups), fix=row.remedy(groups), commands=commands)


@cache
def _of_jobs() -> Patterns:
    return Patterns(for_nodes())


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

    return tuple(msgspec.convert(_read("jobs")["exception"], list[KnownException]))


def for_nodes() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return what a node needs to find these lines: id, pattern and words of each."""
    return [(row.id, row.pattern, row.words) for row in known_lines().values() if row.pattern]


def _rows(name: str) -> list[KnownLine]:
    import msgspec

    return msgspec.convert(_read(name)["line"], list[KnownLine])


def _read(name: str) -> dict[str, list[dict[str, object]]]:
    return tomllib.loads(resources.files(__package__).joinpath(f"lines/{name}.toml").read_text("utf-8"))
