"""`python -m distdiag`, and the command `distdiag`: what must work before anything else is loaded."""

from __future__ import annotations

import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

_COLLECTS = {
    ("core-bt",): ("distdiag.node.core.asking_pystack", "distdiag.commands.core_bt.collect"),
    ("pyspy-all",): ("distdiag.commands.pyspy_all.collect",),
    ("trace", "blocked"): ("distdiag.commands.trace.blocked.collect",),
    ("trace", "fds"): ("distdiag.commands.trace.fds.collect",),
}
"""Commands that answer at once, and what their node side loads: last what it collects by. See node/headstart.py."""
_ELSEWHERE = ("-h", "--h", "--from", "--setup", "--slurm", "--via", "--launcher", "--explain")
_ALLOCATED = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where one of these is typed or set, other nodes may be meant, or none. A wrong guess costs nobody anything."""


def main() -> None:
    """Run distdiag; whoever interrupts it while it loads gets the document and the status that he was promised."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    from distdiag.node import headstart

    gc.set_threshold(50_000)  # loading makes many objects and no garbage
    if collect := _here(sys.argv[1:]):
        headstart.begin(*collect)
    from distdiag.cli import main as run

    try:
        run()
    finally:
        # All is said: a signal that comes now would only change the status.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        headstart.drop()
        gc.freeze()  # nobody needs what is left; to look through all of it at the end takes 20 ms


def _here(words: list[str]) -> tuple[str, ...] | None:
    """Guess, before anything is loaded, what this machine will be asked by."""
    if any(word.startswith(_ELSEWHERE) for word in words) or any(name in os.environ for name in _ALLOCATED):
        return None
    return _COLLECTS.get(tuple(words[:1])) or _COLLECTS.get(tuple(words[:2]))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    if "--json" in sys.argv:
        import json

        from distdiag import __version__

        words = [word for word in sys.argv[1:] if not word.startswith("-")]
        command = " ".join(words[: 2 if words[:1] == ["trace"] or words[:2] == ["overflow", "show"] else 1])
        error = {"id": "interrupted", "message": "interrupted before there was anything to report", "hint": ""}
        head = {"schema": "distdiag/1", "version": __version__, "command": command, "exit_code": 130}
        os.write(1, json.dumps({**head, "error": error}).encode() + b"\n")
    os._exit(130)


if __name__ == "__main__":
    main()
