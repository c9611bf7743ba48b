"""What is asked of overflow show. Loaded at each start of distdiag: the types of the answer stand in result.py."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

COMMAND = "overflow show"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was typed. `module` is a pattern of names, empty for all; `batches` is empty for all.

    `factor`: numbers of two sides that differ by more than this diverge. `everything`: every row, of every batch.
    """

    program: str = "distdiag"
    paths: tuple[str, ...]
    module: str = ""
    batches: tuple[int, ...] = ()
    factor: float = 2.0
    everything: bool = False
    plot: str = ""

    def again(self, *words: str) -> str:
        """Write the command on the same files with other options."""
        return f"{self.program} {COMMAND} {shlex.join([*self.paths, *words])}"
