"""How a process of `distdiag overflow` ends when it was stopped: in one line, without a traceback of the detector.

The answer is printed once, and again at the end; a traceback of each rank and torchrun's "Root Cause", the rank that
happened to end first, would stand between the two.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import sys
import time
from typing import TYPE_CHECKING

from distdiag.facts.rank_identity import own_rank
from distdiag.training.overflow.detection import Aborted, OverflowDetected
from distdiag.training.overflow.script import place_of

if TYPE_CHECKING:
    from types import TracebackType


_TORCHRUN_LOGGER = "torch.distributed.elastic.multiprocessing.api"
_OTHER_FAILURE = re.compile(r"failed \(exitcode: (?!1\))")


def end_quietly(folder: str) -> None:
    """Report how this process was stopped in one line; `folder`: where the ranks leave word of what they found."""
    previous = sys.excepthook
    stopped = StoppedRanks(folder)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, (OverflowDetected, Aborted)):
            sys.stderr.write(f"distdiag overflow: {_line(error, trace)}\n")
        elif not stopped.explain(error):
            previous(kind, error, trace)

    sys.excepthook = hook
    logging.getLogger(_TORCHRUN_LOGGER).addFilter(stopped.is_other)


def _line(error: OverflowDetected | Aborted, trace: TracebackType | None) -> str:
    where = place_of(trace)
    at = f"stopped at {where}" if where else "stopped"
    if isinstance(error, Aborted):
        return f"{at}: --abort-after"
    rank = error.detection.rank
    return f"{at}: " + ("nan or inf detected" if rank in (None, own_rank()) else f"nan or inf detected on rank {rank}")


class StoppedRanks:
    """What torchrun, where it is this process, says of ranks that the detector has stopped."""

    def __init__(self, folder: str) -> None:
        self._folder, self._began = folder, time.time() - 1  # a clock of files may be coarse

    def explain(self, error: BaseException) -> bool:
        """Return whether an error of torchrun is but that ranks were stopped."""
        failures = getattr(error, "failures", None)
        if type(error).__name__ != "ChildFailedError" or not isinstance(failures, dict):
            return False
        return self._are_stopped() and all(failure.exitcode in (1, -15) for failure in failures.values())

    def is_other(self, record: logging.LogRecord) -> bool:
        """Return whether a line of torchrun's log is of something else."""
        return bool(_OTHER_FAILURE.search(record.getMessage())) or not self._are_stopped()

    def _are_stopped(self) -> bool:
        return any(self._says_stopped(path) for path in glob.glob(os.path.join(glob.escape(self._folder), "watched-*")))

    def _says_stopped(self, path: str) -> bool:
        try:
            if os.path.getmtime(path) < self._began:
                return False
            with open(path, encoding="utf-8") as file:
                models = json.load(file)["models"]
        except (OSError, ValueError, KeyError):
            return False
        return any(model["found"] or model["aborted"] for model in models)
