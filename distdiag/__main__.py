"""`python -m distdiag`, and the command `distdiag`: what must work before anything else is loaded."""

from __future__ import annotations

import gc
import os
import signal
import sys

from distdiag import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def main() -> None:
    """Run distdiag; whoever interrupts it while it loads gets the document and the status that he was promised."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        signal.signal(signal.SIGHUP, _leave)
    gc.set_threshold(50_000)  # loading makes many objects and no garbage
    from distdiag import interrupts
    from distdiag.cli import main as run

    try:
        try:
            run()
        finally:
            interrupts.finish()  # all is said: a signal that comes now would only change the status
            gc.freeze()  # nobody needs what is left; to look through all of it at the end takes 20 ms
    except KeyboardInterrupt:  # right after the report, before it was ignored
        interrupts.finish()
        sys.exit(130)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(again, lambda *_: None)
    if "--json" in sys.argv and not _is_other_rank():
        words = [word for word in sys.argv[1:] if not word.startswith("-")]
        command = " ".join(words[: 2 if words[:1] == ["trace"] or words[:2] == ["overflow", "show"] else 1])
        command = "".join(letter for letter in command if letter.isalnum() or letter in " -")
        # By hand: json itself may be what was just being loaded.
        document = (
            f'{{"schema": "distdiag/1", "version": "{__version__}", "command": "{command}", "exit_code": 130, "error": '
            '{"id": "interrupted", "message": "interrupted before there was anything to report", "hint": ""}}\n'
        )
        try:  # noqa: SIM105 - nothing is loaded here
            os.write(1, document.encode(errors="replace"))
        except OSError:  # closed, or nobody reads it
            pass
    os._exit(130)


def _is_other_rank() -> bool:
    """Whether a launcher started this as another rank than 0, whose report rank 0 gives: stdout is one for all."""
    ranks = (
        *(("TORCHELASTIC_RUN_ID", "RANK"), ("SLURM_STEP_ID", "SLURM_PROCID")),
        *(("PMI_SIZE", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")),
    )
    joins = sys.argv[1:2] in (["gpu-test"], ["allreduce-bench"])
    return joins and any(os.environ.get(rank, "0") != "0" for launched, rank in ranks if launched in os.environ)


if __name__ == "__main__":
    main()
