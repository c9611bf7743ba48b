"""The command that a user gives after `--`, as it is to be executed."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence


def argv_of(command: Sequence[str], *, example: str) -> list[str]:
    """Give the command to execute: with this Python before it, if it is a script or an option of Python's.

    Raises:
        typer.BadParameter: there is no such program; `example` is how it is typed.
    """
    first = command[0]
    if first.startswith("-"):
        return [sys.executable, *command]
    program = shutil.which(first)
    if first.endswith(".py") or (program is None and os.path.isfile(first)):
        return [sys.executable, *command]
    if program is None:
        raise typer.BadParameter(f"there is no script or program {first!r}", param_hint=example)
    return [program, *command[1:]]
