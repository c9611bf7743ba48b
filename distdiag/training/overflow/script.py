"""Which line of the user's script was running: neither Python's, nor torch's, nor distdiag's own."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


_NOT_THE_SCRIPT = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    os.path.dirname(os.__file__),
    "<frozen ",
)


def is_of_script(file: str) -> bool:
    """Return whether a source file is the user's: not installed, and not distdiag's."""
    return not file.startswith(_NOT_THE_SCRIPT) and f"{os.sep}site-packages{os.sep}" not in file


def place_of(trace: TracebackType | None) -> str:
    """Name the innermost line of the script that an error came through: "train.py:13, in step"; empty if none is."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_of_script(frame.filename):
            return f"{frame.filename}:{frame.lineno}" + (f", in {frame.name}" if frame.name != "<module>" else "")
    return ""
