"""`python -m distdiag`, and the command `distdiag`: what must work before anything else is loaded."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Run distdiag; whoever interrupts it while it loads gets the document and the status that he was promised."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    from distdiag.cli import main as run

    try:
        run()
    finally:
        gc.freeze()  # nobody needs what is left; to look through all of it at the end takes 20 ms


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    if "--json" in sys.argv:
        import json

        from distdiag import __version__

        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        error = {"id": "interrupted", "message": "interrupted before there was anything to report", "hint": ""}
        head = {"schema": "distdiag/1", "version": __version__, "command": command, "exit_code": 130}
        os.write(1, json.dumps({**head, "error": error}).encode() + b"\n")
    os._exit(130)


if __name__ == "__main__":
    main()
