"""Which findings --only and --ignore choose: by id, or by the beginning of several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


def chosen(given: str, command: str, checks: Iterable[str]) -> str:
    """Read an id, or the beginning of several ("toolkit"), with or without the command's name.

    Args:
        given: what was typed.
        command: whose findings they are.
        checks: all ids of it, without its name.

    Raises:
        UsageError: there is no such id.
    """
    known = list(checks)
    plain = given.strip().removeprefix(f"{command}.").rstrip(".*")
    if not any(matches(id_, plain) for id_ in known):
        raise UsageError(f"{given!r} is not a finding id of {command}", hint="one of: " + ", ".join(known))
    return plain


def matches(id_: str, prefix: str) -> bool:
    """Return whether an id is meant."""
    return id_ == prefix or id_.startswith(prefix + ".")
