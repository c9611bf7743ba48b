"""Ends a process of `distdiag overflow` that was stopped with one line instead of a traceback of the detector.

The answer is printed at the detection and again at the end; tracebacks of the ranks and torchrun's "Root Cause", which
is the rank that happened to end first, would stand between the two.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import sys
import time
import traceback
from typing import TYPE_CHECKING

from distdiag.facts.rank_identity import own_rank
from distdiag.training.overflow.report import Aborted, OverflowDetected

if TYPE_CHECKING:
    from types import TracebackType


_TORCHRUN_LOGGER = "torch.distributed.elastic.multiprocessing.api"
_NOT_THE_SCRIPT = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    os.path.dirname(os.__file__),
    "<frozen ",
)
_OTHER_FAILURE = re.compile(r"failed \(exitcode: (?!1\))")


def end_quietly(folder: str) -> None:
    """Report how this process was stopped in one line; `folder` has the records of the ranks."""
    previous = sys.excepthook
    began = time.time() - 1  # a clock of files may be coarse

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, (OverflowDetected, Aborted)):
            sys.stderr.write(f"distdiag overflow: {_line(error, trace)}\n")
        elif not (_is_of_torchrun(error) and _are_stopped(folder, began)):
            previous(kind, error, trace)

    def is_other(record: logging.LogRecord) -> bool:
        return bool(_OTHER_FAILURE.search(record.getMessage())) or not _are_stopped(folder, began)

    sys.excepthook = hook
    logging.getLogger(_TORCHRUN_LOGGER).addFilter(is_other)


def _line(error: OverflowDetected | Aborted, trace: TracebackType | None) -> str:
    where = place_of(trace)
    at = f"stopped at {where}" if where else "stopped"
    if isinstance(error, Aborted):
        return f"{at}: --abort-after"
    rank = error.detection.rank
    return f"{at}: nan or inf detected" + ("" if rank in (None, own_rank()) else f" on rank {rank}")


def _is_of_torchrun(error: BaseException) -> bool:
    """Return whether torchrun reports nothing but ranks that were stopped."""
    failures = getattr(error, "failures", None)
    if type(error).__name__ != "ChildFailedError" or not isinstance(failures, dict):
        return False
    return all(failure.exitcode in (1, -15) for failure in failures.values())


def _are_stopped(folder: str, began: float) -> bool:
    """Return whether the detector has stopped a rank."""
    for path in glob.glob(os.path.join(glob.escape(folder), "watched-*")):
        try:
            if os.path.getmtime(path) < began:
                continue
            with open(path, encoding="utf-8") as file:
                if any(model["found"] or model["aborted"] for model in json.load(file)["models"]):
                    return True
        except (OSError, ValueError, KeyError):
            continue
    return False


def is_of_script(file: str) -> bool:
    """Return whether a source file is the user's: not installed, and not distdiag's."""
    return not file.startswith(_NOT_THE_SCRIPT) and f"{os.sep}site-packages{os.sep}" not in file


def place_of(trace: TracebackType | None) -> str:
    """Name the innermost line of the script that an error came through: "train.py:13, in step"; empty if none is."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_of_script(frame.filename):
            return f"{frame.filename}:{frame.lineno}" + (f", in {frame.name}" if frame.name != "<module>" else "")
    return ""
