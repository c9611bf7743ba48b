"""Writes the completion files of bash, zsh and fish into the folder given as argument. `make completions` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NAMES = {"bash": "distdiag.bash", "zsh": "_distdiag", "fish": "distdiag.fish"}


def stub(shell: str) -> str:
    """Ask the program itself for a shell's stub: it calls the program back, so a new subcommand changes nothing."""
    program = Path(sys.executable).with_name("distdiag")
    environment = {**os.environ, "_DISTDIAG_COMPLETE": f"source_{shell}"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip() + "\n"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for shell, name in NAMES.items():
        (folder / name).write_text(stub(shell))


if __name__ == "__main__":
    main()
