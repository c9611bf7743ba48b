"""Known lines of jobs, builds and kernels with meaning, role and fix, as data (lines/*.toml)."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from distdiag.facts.logs.line_patterns import Patterns
from distdiag.knowledge.tables import load
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    Rows = list[tuple[str, str, tuple[str, ...]]]
    """Input of a matcher of lines: id, pattern and words of each row."""

Role = Literal["cause", "consequence", "confirmation", "advice", "job", "warning", "note", "exit"]
JOBS = (
    *("launchers", "hub", "cuda", "distributed", "nccl", "network"),
    *("loading", "storage", "memory", "hardware", "kernel"),
)
"""The files for a job's output, in order of trust."""
BUILDS = "builds"
_PLACE = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^][]*\{\w+\}[^][]*)\]")


@record(kw_only=True)
class KnownLine:
    """One known line; launchers.toml and builds.toml describe the fields.

    `accuses`: the group that names the ranks at fault, "none" if the line does not. `breaks`: the features affected;
    `checks`: ids of `distdiag cuda-env` that find its cause on a machine.
    """

    id: str
    role: Role
    means: str
    source: str
    pattern: str
    words: tuple[str, ...] = ("",)
    breaks: str = ""
    fix: str = ""
    commands: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    isolated: bool = False
    cuda_torch: bool = False
    accuses: str = ""
    alone: bool = False
    general: bool = False
    kernel: str = ""

    def filled(self, groups: Mapping[str, str], quote: Mapping[str, str] | None = None) -> KnownLine:
        """Return the row with groups of the line filled in, without commands for which a group is missing.

        Args:
            quote: the same groups, shell-quoted, for the commands.
        """
        given = groups if quote is None else quote
        commands = (fill(each, given) for each in self.commands if set(_PLACE.findall(each)) <= {*given})
        words = (fill(text, groups) for text in (self.means, self.breaks, self.fix))
        means, breaks, fix = words
        return replace(self, means=means, breaks=breaks, fix=fix, commands=tuple(commands))


def fill(words: str, groups: Mapping[str, str]) -> str:
    """Fill in {groups}; drop each [part in brackets] with a missing group."""
    words = _OPTIONAL.sub(lambda part: part[1] if set(_PLACE.findall(part[1])) <= {*groups} else "", words)
    return _PLACE.sub(lambda place: groups.get(place[1], "?"), words)


@cache
def known_lines() -> dict[str, KnownLine]:
    """Return the rows of jobs and kernels by id, in order of trust."""
    rows = [row for name in JOBS for row in _rows(name)]
    return {row.id: row for row in sorted(rows, key=lambda row: row.general)}


@cache
def known_builds() -> dict[str, KnownLine]:
    """Return the rows of builds and loads of CUDA extensions by id, in order of trust."""
    return {row.id: row for row in _rows(BUILDS)}


@cache
def trust(id_: str) -> int:
    """Return the place of a row in the order of trust, the first best; an unknown one is last."""
    return {name: place for place, name in enumerate(known_lines())}.get(id_, len(known_lines()))


def for_nodes() -> Rows:
    """Return the rows for a node to find in a job's output."""
    return [(row.id, row.pattern, row.words) for row in known_lines().values()]


def for_kernels() -> Rows:
    """Return the rows for a node to find in its kernel's log, by kind."""
    return [(row.kernel, row.pattern, row.words) for row in known_lines().values() if row.kernel]


@cache
def in_builds() -> Patterns:
    """Return the matcher of builds. In its patterns a space matches any white space, and ^ each line's start."""
    rows = known_builds().values()
    return Patterns((row.id, "(?m)" + row.pattern.replace(" ", r"\s+"), row.words) for row in rows)


def job_line(text: str) -> KnownLine | None:
    """Return the first row that explains a rank's failure by a text of a job, with the text's groups filled in."""
    rows = known_lines()
    found = _in_jobs().first(text, lambda id_: rows[id_].role in ("cause", "consequence"))
    return rows[found[0]].filled(found[1]) if found is not None else None


@cache
def _in_jobs() -> Patterns:
    return Patterns(for_nodes())


@record(kw_only=True)
class KnownException:
    """The meaning of an exception's text, and checks. Valid for an exception that ended a rank, not for any line."""

    pattern: str
    fix: str
    source: str
    means: str = ""
    commands: tuple[str, ...] = ()


def known_exceptions() -> tuple[KnownException, ...]:
    """Return the rows of exceptions, in order."""
    return load("lines/exceptions", "exception", tuple[KnownException, ...])


def _rows(name: str) -> tuple[KnownLine, ...]:
    return load(f"lines/{name}", "line", tuple[KnownLine, ...])
