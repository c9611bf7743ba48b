"""Failures of distdiag itself, each with a message and a hint. Faults of the user's job are findings, not errors.

Each class has an id for programs and an exit status: DistdiagError and NodeFailed 3, UsageError 2, 126 or 127 as in
shells; Interrupted 130.
"""

from __future__ import annotations


class DistdiagError(Exception):
    """An error without a report; `hint` is the remedy, a command if possible."""

    id = "distdiag.failed"
    exit_code = 3

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(DistdiagError):
    """The options contradict each other, or name a missing object."""

    id = "usage"
    exit_code = 2


class CannotExecute(UsageError):
    """The command of a job is not executable; shell exit status."""

    exit_code = 126


class CommandNotFound(UsageError):
    """The command or file does not exist; shell exit status."""

    exit_code = 127


class NodeFailed(DistdiagError):
    """The agent exited, timed out or broke the protocol."""

    id = "distdiag.facts-failed"


class Interrupted(DistdiagError):
    """Ctrl-C before any result."""

    id = "interrupted"
    exit_code = 130

    def __init__(self) -> None:
        super().__init__("interrupted; nothing to report yet")
