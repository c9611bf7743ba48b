"""All finding ids: of distdiag/ids.py, and of the rows of knowledge/*.toml; their selection for --only and --ignore."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from distdiag.diagnosis.verdicts import TABLES, read_table
from distdiag.errors import UsageError
from distdiag.ids import FindingId, Id, RowId, Shared
from distdiag.knowledge.known_lines import known_builds, known_lines
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from distdiag.knowledge.known_lines import KnownLine

_OF_ROLE = {"job": "fail", "warning": "warn"}
_OF_BUILD = {"cause": "fail"}
_RANKS = ("gpu-test", "allreduce-bench")


@record
class Declared:
    """The declaration of an id. `means`: with {placeholders}."""

    id: FindingId
    levels: tuple[str, ...]
    means: str


@cache
def declared() -> dict[str, Declared]:
    """Return the declarations of all ids, sorted."""
    found: dict[str, Declared] = {}
    for id_, levels, means in (*_of_rows(), *_of_code()):  # of a shared id, the meaning in ids.py counts
        before = found[id_].levels if id_ in found else ()
        found[id_] = Declared(id_, tuple(sorted({*before, *levels})), means)
    return dict(sorted(found.items()))


def checks(command: str) -> dict[str, str]:
    """Return the ids of a command's findings without its name, with their meanings."""
    prefix = f"{command}."
    return {id_.removeprefix(prefix): each.means for id_, each in declared().items() if id_.startswith(prefix)}


def _of_code() -> Iterator[tuple[FindingId, Iterable[str], str]]:
    for own in Id:
        yield own, own.levels.split(), own.means
    for shared in Shared:
        for command in shared.commands.split():
            yield shared.of(command), shared.levels.split(), shared.means


def _of_rows() -> Iterator[tuple[FindingId, Iterable[str], str]]:
    for table, kind, command in (("cuda_problems", "problem", "cuda-env"), ("doctor_symptoms", "symptom", "doctor")):
        means = read_table(table)["checks"]
        for row in read_table(table)[kind]:
            id_ = row.get("id", row["name"])
            yield RowId(f"{command}.{id_}"), _levels(row), means[id_]
    for row in (row for table in TABLES for row in read_table(table)["verdict"]):
        for id_ in _ids(row):
            yield id_, _levels(row), row.get("means") or _plain(row["title"])
    for line in known_lines().values():
        if levels := _levels_of(line):
            yield RowId(f"logs.{line.id}"), levels, _plain(line.means)
    for line in known_builds().values():
        yield RowId(f"cuda-env.log.{line.id}"), (_OF_BUILD.get(line.role, "info"),), _plain(line.means)


def _levels(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the default level of a row and its alternatives."""
    return (str(row.get("level", "fail")), *row.get("levels", ()))


def _levels_of(line: KnownLine) -> tuple[str, ...]:
    """Return the levels of a job's line under its own id; () for mere evidence of another finding."""
    if line.role in _OF_ROLE:
        return (_OF_ROLE[line.role],)
    return ("fail", "info") if line.id == "xid" else ("fail",) if line.accuses == "none" else ()


def _ids(row: Mapping[str, Any]) -> Iterator[FindingId]:
    id_ = str(row.get("id", row["name"]))
    for name in row.get("names", (row["name"],)):
        for command in row.get("of", _RANKS) if "{command}" in id_ else ("",):
            own = id_.replace("{name}", name).replace("{command}", command)
            yield RowId(own if "." in own else f"logs.{own}")


def _plain(text: str) -> str:
    return text.replace("[{s}]", "").translate({ord("["): "", ord("]"): ""})


def chosen(given: str, command: str, checks: Iterable[str]) -> str:
    """Resolve an id or its prefix ("toolkit"), with or without the command's name. Raises UsageError.

    `checks`: all ids of the command, without its name.
    """
    known = list(checks)
    plain = given.strip().removeprefix(f"{command}.").rstrip(".*")
    if not any(matches(id_, plain) for id_ in known):
        raise UsageError(f"{given!r} is not a finding id of {command}", hint="one of: " + ", ".join(known))
    return plain


def matches(id_: str, prefix: str) -> bool:
    """Return whether an id equals the prefix or is below it."""
    return id_ == prefix or id_.startswith(prefix + ".")
