"""Roles of processes of inference servers and Ray by their titles, as data (process_titles.toml)."""

from __future__ import annotations

import re  # noqa: TC003 - msgspec reads the annotations

from distdiag.knowledge.tables import load
from distdiag.record import record


@record
class _Row:
    pattern: re.Pattern[str]
    server: str
    role: str


@record(kw_only=True)
class Title:
    """The title of one process, e.g. `name` "sglang::scheduler_TP1"; `role`: one of the table's four."""

    name: str
    server: str
    role: str


def read_title(command: str) -> Title | None:
    """Return a command line's process title; None for a real command."""
    name = command.partition(" ")[0]
    if "::" not in name:
        return None
    rows = load("process_titles", "title", tuple[_Row, ...])
    row = next((row for row in rows if row.pattern.match(name)), None)
    return Title(name=name, server=row.server, role=row.role) if row is not None else None
