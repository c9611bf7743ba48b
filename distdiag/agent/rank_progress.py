"""How a rank reports where it is: a JSON line for each step, on a pipe of its own.

A shared stdout would tear lines longer than 4096 bytes, and a rank that hangs could not report where. `at` counts the
steps of a stage, the same on every rank, so that positions compare: the others wait for the rank with the lowest
(stage, at). `waiting` means that the step needs the other ranks.
"""

from __future__ import annotations

import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Progress:
    """Writes one rank's steps to the pipe that its agent reads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.stage = ""
        self._at = 0
        self._stepped = 0.0

    def enter(self, stage: str, note: str) -> None:
        """Reach a stage. Not waiting yet: a rank that is held up right here must not look like a waiting rank."""
        self.stage, self._at = stage, 0
        self._write(note, False, {})

    def step(self, note: str, *, waiting: bool = False, **payload: Any) -> None:  # noqa: ANN401 - any JSON
        """Report the next step within the stage; `payload` holds facts worth keeping."""
        self._at += 1
        self._stepped = time.monotonic()
        self._write(note, waiting, payload)

    def still(self, note: str, *, waiting: bool = False) -> None:
        """Report once a second that long work goes on, so that it does not look like a hang; not a step, as other
        ranks may have nothing to report."""
        if time.monotonic() - self._stepped > 1:
            self._stepped = time.monotonic()
            self._write(note, waiting, {})

    def _write(self, note: str, waiting: bool, payload: dict[str, Any]) -> None:
        event = {
            "stage": self.stage,
            "at": self._at,
            "note": note,
            "waiting": waiting,
            "t": time.monotonic(),
            "payload": payload,
        }
        line = json.dumps(event).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]
