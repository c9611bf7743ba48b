"""This machine, this Python: the node side runs in a child process, so that a wedged driver cannot hang us."""

from __future__ import annotations

import sys


def command(boot: str, payload_bytes: int) -> list[str]:
    """Give the command that reads the node side from its stdin and runs it here."""
    return [sys.executable, "-c", boot, str(payload_bytes), "distdiag-agent"]
