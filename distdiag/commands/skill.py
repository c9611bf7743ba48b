"""`distdiag skill`: the instructions for coding agents, printed or installed."""

from __future__ import annotations

import os
from importlib import resources
from typing import Annotated

import typer


def skill(
    to: Annotated[str, typer.Option(metavar="DIR", help="Write DIR/distdiag/SKILL.md instead of printing it.")] = "",
) -> None:
    """Print the instructions by which a coding agent debugs a job with distdiag (SKILL.md), or install them.

    Exit status: 0 printed or written, 2 wrong usage, 3 DIR cannot be written.

    \b
    Examples:
      distdiag skill
      distdiag skill --to ~/.claude/skills    # or where your agent reads skills
    """
    from distdiag.errors import DistdiagError
    from distdiag.files import make_folder, write_whole
    from distdiag.output import emit, fail

    text = resources.files("distdiag").joinpath("SKILL.md").read_bytes()
    if not to:
        emit(text.decode())
        return
    path = os.path.join(to, "distdiag", "SKILL.md")
    try:
        make_folder("--to", os.path.dirname(path))
        write_whole(path, text, 0o644)
    except DistdiagError as error:
        fail("skill", error, as_json=False)
    emit(f"{os.path.abspath(path)}\n")
