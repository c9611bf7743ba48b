"""What floatcmp is asked."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

COMMAND = "floatcmp"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was typed; `reference` and `key` are empty if there is none."""

    program: str = "distdiag"
    a: str
    b: str
    reference: str = ""
    key: str = ""
    worst: int = 5
    timeout_s: float = 600.0
    exact: bool = False
    """Whether rounding is a fault, too."""

    def again(self, *words: str) -> str:
        """Write the command on the same files with other options."""
        reference = ["--reference", self.reference] if self.reference else []
        exact = ["--exact"] if self.exact else []
        return f"{self.program} {COMMAND} {shlex.join([self.a, self.b, *reference, *exact, *words])}"
