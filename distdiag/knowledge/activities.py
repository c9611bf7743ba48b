"""The activity of a busy rank, from its frames, as data (activities.toml)."""

from __future__ import annotations

import re  # noqa: TC003 - msgspec reads the annotations
from typing import TYPE_CHECKING

from distdiag.knowledge.frames import library_path
from distdiag.knowledge.tables import load
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts.stacks.stack_types import Frame


@record(kw_only=True)
class Activity:
    """One row; matches frames by each pattern given."""

    does: str
    file: re.Pattern[str] | None = None
    function: re.Pattern[str] | None = None

    def fits(self, frame: Frame) -> bool:
        """Return whether this row matches a frame."""
        path = library_path(frame.file)
        in_file = self.file is None or (path is not None and self.file.search(path) is not None)
        return in_file and (self.function is None or self.function.search(frame.function) is not None)


def activity_of(frames: Sequence[Frame]) -> str:
    """Return the activity shown by a stack, innermost frame first, e.g. "tokenizes"; empty if unknown."""
    rows = load("activities", "activity", tuple[Activity, ...])
    return next((row.does for frame in frames for row in rows if row.fits(frame)), "")
