"""Options that several commands share, each declared once."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Annotated

import typer

from distdiag.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """Read a number of bytes: 4096, 64MiB, 1.5GiB, 500MB. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?|)b?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="write bytes, or a unit: 4096, 64MiB, 1GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def called_as() -> str:
    """Say how this program was called, so that the commands we print paste: by name, by path, or as a module."""
    import shutil

    called = sys.argv[0]
    if called.endswith("__main__.py"):
        return f"{shlex.quote(sys.executable)} -m distdiag"
    on_path = shutil.which("distdiag")
    return (
        "distdiag"
        if on_path and os.path.exists(called) and os.path.samefile(on_path, called)
        else shlex.quote(os.path.abspath(called))
    )


JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
StrictOpt = Annotated[bool, typer.Option("--strict", help="Let warnings count as faults (exit 1).")]
TimeoutOpt = Annotated[
    float,
    typer.Option(min=1.0, max=86400.0, metavar="SECONDS", help="Longest time without a step of any rank."),
]
