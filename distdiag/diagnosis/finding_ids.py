"""Selection of findings by id or id prefix, for --only and --ignore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


def chosen(given: str, command: str, checks: Iterable[str]) -> str:
    """Resolve an id or id prefix ("toolkit"), with or without the command's name.

    Args:
        given: as typed.
        command: name of the command.
        checks: all its ids, without the command's name.

    Raises:
        UsageError: no id matches.
    """
    known = list(checks)
    plain = given.strip().removeprefix(f"{command}.").rstrip(".*")
    if not any(matches(id_, plain) for id_ in known):
        raise UsageError(f"{given!r} is not a finding id of {command}", hint="one of: " + ", ".join(known))
    return plain


def matches(id_: str, prefix: str) -> bool:
    """Return whether an id equals the prefix or is below it."""
    return id_ == prefix or id_.startswith(prefix + ".")
