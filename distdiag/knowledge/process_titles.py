"""Roles of processes of inference servers and Ray by their titles, as data (process_titles.toml)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True)
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
    row = next((row for row in _rows() if row[0].match(name)), None)
    return Title(name=name, server=row[1], role=row[2]) if row is not None else None


@cache
def _rows() -> tuple[tuple[re.Pattern[str], str, str], ...]:
    text = resources.files(__package__).joinpath("process_titles.toml").read_text("utf-8")
    return tuple((re.compile(row["pattern"]), row["server"], row["role"]) for row in tomllib.loads(text)["title"])
