"""The activity of a busy rank, from its frames, as data (activities.toml)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from distdiag.knowledge.frames import library_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts.stack_types import Frame


@dataclass(frozen=True, kw_only=True)
class Activity:
    """One row; matches frames by each pattern given."""

    does: str
    file: re.Pattern[str] | None
    function: re.Pattern[str] | None

    def fits(self, frame: Frame) -> bool:
        """Return whether this row matches a frame."""
        path = library_path(frame.file)
        in_file = self.file is None or (path is not None and self.file.search(path) is not None)
        return in_file and (self.function is None or self.function.search(frame.function) is not None)


def activity_of(frames: Sequence[Frame]) -> str:
    """Return the activity shown by a stack, innermost frame first, e.g. "tokenizes"; empty if unknown."""
    found = (row.does for frame in frames for row in _rows() if row.fits(frame))
    return next(found, "")


@cache
def _rows() -> tuple[Activity, ...]:
    text = resources.files(__package__).joinpath("activities.toml").read_text("utf-8")
    return tuple(
        Activity(
            does=row["does"],
            file=re.compile(row["file"]) if "file" in row else None,
            function=re.compile(row["function"]) if "function" in row else None,
        )
        for row in tomllib.loads(text)["activity"]
    )
