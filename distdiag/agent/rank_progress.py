"""Progress reports of a rank: a JSON line for each step, on a pipe of its own.

A shared stdout would split lines longer than 4096 bytes, and a hung rank could not report its position. `at` counts the
steps of a stage, identically on all ranks, so positions compare: the others wait for the rank with the lowest (stage,
at). `waiting`: the step needs the other ranks.
"""

from __future__ import annotations

import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class Progress:
    """Writes one rank's steps to the pipe that its agent reads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.stage = ""
        self._at = 0
        self._stepped = 0.0

    def enter(self, stage: str, note: str) -> None:
        """Enter a stage. Not waiting yet: a rank held up here must not look like one that waits for others."""
        self.stage, self._at = stage, 0
        self._write(note, False, {})

    def step(self, note: str, *, waiting: bool = False, **payload: Any) -> None:  # noqa: ANN401 - any JSON
        """Report the next step within the stage; `payload` holds facts worth keeping."""
        self._at += 1
        self._stepped = time.monotonic()
        self._write(note, waiting, payload)

    def still(self, note: str, *, waiting: bool = False) -> None:
        """Report a long step once a second, so it is not taken for a hang. Not a step: other ranks may report none."""
        if time.monotonic() - self._stepped > 1:
            self._stepped = time.monotonic()
            self._write(note, waiting, {})

    def _write(self, note: str, waiting: bool, payload: Mapping[str, object]) -> None:
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
