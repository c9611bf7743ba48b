"""How the models of a script are to be watched; passed to its processes in one variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

VARIABLE = "DISTDIAG_OVERFLOW"


@dataclass(frozen=True)
class Settings:
    """`folder`: where each process tells what it watched and found; the others are the detector's arguments."""

    folder: str
    frames: int = 21
    trace: tuple[int, ...] = ()
    abort_after: int | None = None
    mode: str = "step"
    unit: str = "forward"
    gradients: str = "each"
    ignore: tuple[str, ...] = ()
    on_detect: str = "raise"

    def to_text(self) -> str:
        """Write for the variable."""
        return json.dumps(asdict(self))


def from_text(text: str) -> Settings:
    """Read the variable. Raises ValueError, TypeError."""
    given = json.loads(text)
    return Settings(**{**given, "trace": tuple(given["trace"]), "ignore": tuple(given["ignore"])})
