"""What is to be traced and where it is kept; passed to the processes of a job in one variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

VARIABLE = "DISTDIAG_LINES"
LINES = 1000
THREADS = 32


@dataclass(frozen=True)
class Settings:
    """`folder` for the files, `lines` to keep of each of at most `threads` threads at a time.

    `include`: packages beside the user's own code ("torch", "torch.nn", "json"; "all" packages; "stdlib": all of that),
    `exclude`: packages or directories of it that are not wanted.
    """

    folder: str
    lines: int = LINES
    threads: int = THREADS
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Write for the variable."""
        return json.dumps(asdict(self))


def from_text(text: str) -> Settings:
    """Read the variable. Raises ValueError."""
    given = json.loads(text)
    return Settings(
        folder=str(given["folder"]),
        lines=int(given["lines"]),
        threads=int(given["threads"]),
        include=tuple(given["include"]),
        exclude=tuple(given["exclude"]),
    )
