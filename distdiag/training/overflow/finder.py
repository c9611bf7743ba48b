"""Finds the models of a script: modules called from outside any other module."""

from __future__ import annotations

import atexit
import glob
import json
import logging
import os
import re
import sys
import time
import traceback
import weakref

import torch
from torch import nn
from torch.nn import DataParallel

from distdiag.facts.machine import host_name
from distdiag.facts.process.rank_identity import own_rank
from distdiag.training.overflow.detector import DebugUnderflowOverflow, detector_of
from distdiag.training.overflow.modules import within_ddp
from distdiag.training.overflow.report import Aborted, OverflowDetected, WatchedProcess, is_of_script

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Any


_MOST = 64
"""Limit on watched models; a script with more recreates them for each batch."""
_TORCHRUN_LOGGER = "torch.distributed.elastic.multiprocessing.api"
_OTHER_FAILURE = re.compile(r"failed \(exitcode: (?!1\))")


class Finder:
    """Watches each model from its first call on."""

    def __init__(self, folder: str, *, quiet: bool, stopped: Callable[[], None], arguments: Mapping[str, Any]) -> None:
        """`folder`: for the records; `quiet`: no tracebacks; `arguments`: of each DebugUnderflowOverflow.

        `stopped` is called after a detection has stopped this process, if `quiet`.
        """
        self._folder, self._is_quiet, self._stopped, self._arguments = folder, quiet, stopped, arguments
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._detectors: list[weakref.ref[DebugUnderflowOverflow]] = []
        self._process = WatchedProcess(own_rank(), host_name(), os.getpid())

    def begin(self) -> None:
        """Hook module calls to find models."""
        call = nn.Module.__call__
        finder = self

        def call_and_look(self: nn.Module, *args: object, **kwargs: object) -> object:
            # Nested calls are submodules; torch.compile must not see this function.
            nn.Module.__call__ = call  # type: ignore[method-assign]
            try:
                finder.meet(self)
                return call(self, *args, **kwargs)
            finally:
                nn.Module.__call__ = call_and_look  # type: ignore[method-assign]

        nn.Module.__call__ = call_and_look  # type: ignore[method-assign]
        atexit.register(self._end)
        if self._is_quiet:
            _end_quietly(self._folder, self._stopped)

    def meet(self, module: nn.Module) -> None:
        """Watch a called module, unless it is watched already or has no parameters."""
        if module in self._known or os.getpid() != self._process.pid:
            return
        self._known.update(module.modules())  # a submodule called on its own is not a model
        if isinstance(module, torch.jit.ScriptModule) or next(module.parameters(), None) is None:
            return
        if not isinstance(module, DataParallel) and detector_of(within_ddp(module)) is not None:
            return
        if len(self._process.models) >= _MOST:
            self._leave_out(f"more than {_MOST} models")
            return
        try:
            detector = self._watch(module)
        except Exception as why:  # noqa: BLE001 - never fail the job
            sys.stderr.write(f"distdiag: {type(module).__name__} is not checked: {why}\n")
            self._leave_out(f"{type(module).__name__}: {why}")
            return
        detector.serve_command()
        self._process.models.append(detector.counts)
        self._detectors.append(weakref.ref(detector))
        self._write()

    def _watch(self, module: nn.Module) -> DebugUnderflowOverflow:
        process, number = self._process, len(self._process.models)
        rank = own_rank()
        whose = [*([] if rank is None else [rank]), process.host, process.pid, *([number] if number else [])]
        path = os.path.join(self._folder, f"frames-{'-'.join(map(str, whose))}.jsonl")
        return DebugUnderflowOverflow(module, **self._arguments, save=path)

    def _leave_out(self, why: str) -> None:
        if why not in self._process.left_out:
            self._process.left_out.append(why)
            self._write()

    def _end(self) -> None:
        if os.getpid() != self._process.pid:
            return
        for reference in self._detectors:
            detector = reference()
            if detector is not None:
                detector.finish()
        self._process.ended = True
        self._write()

    def _write(self) -> None:
        if not (self._process.models or self._process.left_out):
            return
        self._process.rank = own_rank()
        try:
            self._process.write(self._folder)
        except OSError as error:  # never fail the job
            sys.stderr.write(f"distdiag: cannot write to {self._folder}: {error.strerror}\n")


def _end_quietly(folder: str, stopped: Callable[[], None]) -> None:
    """Replace the traceback of a stopped process by one line, and of a torchrun whose ranks are all stopped by none.

    `folder` has the records of the ranks.
    """
    previous = sys.excepthook
    began = time.time() - 1  # file timestamps may be coarse

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, (OverflowDetected, Aborted)):
            sys.stderr.write(f"distdiag overflow: {_line(error, trace)}\n")
            stopped()
        elif not (_names_stopped_ranks_only(error) and _are_stopped(folder, began)):
            previous(kind, error, trace)

    def is_shown(record: logging.LogRecord) -> bool:
        return bool(_OTHER_FAILURE.search(record.getMessage())) or not _are_stopped(folder, began)

    sys.excepthook = hook
    logging.getLogger(_TORCHRUN_LOGGER).addFilter(is_shown)


def _names_stopped_ranks_only(error: BaseException) -> bool:
    """Return whether this is torchrun's table of ranks ended by the detector, or by torchrun itself thereafter."""
    failures = getattr(error, "failures", None)
    return isinstance(failures, dict) and all(failure.exitcode in (1, -15) for failure in failures.values())


def _line(error: OverflowDetected | Aborted, trace: TracebackType | None) -> str:
    where = _place_of(trace)
    at = f"stopped at {where}" if where else "stopped"
    if isinstance(error, Aborted):
        return f"{at}: --abort-after"
    rank = error.detection.rank
    return f"{at}: nan or inf detected" + ("" if rank in (None, own_rank()) else f" on rank {rank}")


def _are_stopped(folder: str, began: float) -> bool:
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


def _place_of(trace: TracebackType | None) -> str:
    """Return the innermost script line of a traceback: "train.py:13, in step"; empty without one."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_of_script(frame.filename):
            return f"{frame.filename}:{frame.lineno}" + (f", in {frame.name}" if frame.name != "<module>" else "")
    return ""
