"""Finds the models of a script by themselves: a module that is called by no other module is one."""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import DataParallel

from distdiag.facts import private_files
from distdiag.facts.machine import host_name
from distdiag.facts.rank_identity import own_rank
from distdiag.training.overflow.detector import DebugUnderflowOverflow
from distdiag.training.overflow.modules import innermost, is_watched, kind_of, within_ddp
from distdiag.training.overflow.quiet_end import end_quietly

if TYPE_CHECKING:
    from typing import Any

    from distdiag.training.overflow.detector import Counts
    from distdiag.training.overflow.session import Settings


_MOST = 64
"""So many models are watched; who has more makes them anew for each batch."""


class Finder:
    """Watches each model from its first call on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._watched: list[tuple[str, Counts]] = []
        self._detectors: list[weakref.ref[DebugUnderflowOverflow]] = []
        self._left_out: list[str] = []
        """Why models are not watched."""
        self._pid, self._ended = os.getpid(), False

    def begin(self) -> None:
        """Look for models from now on."""
        call = nn.Module.__call__
        finder = self

        def call_and_look(self: nn.Module, *args: object, **kwargs: object) -> object:
            # What is called while this runs is called by it; and torch.compile is not to see this function.
            nn.Module.__call__ = call  # type: ignore[method-assign]
            try:
                finder.meet(self)
                return call(self, *args, **kwargs)
            finally:
                nn.Module.__call__ = call_and_look  # type: ignore[method-assign]

        nn.Module.__call__ = call_and_look  # type: ignore[method-assign]
        atexit.register(self._end)
        if self._settings.quiet:
            end_quietly(self._settings.folder)

    def meet(self, module: nn.Module) -> None:
        """Watch a model that is called, unless it is watched already or has nothing to learn."""
        if module in self._known or os.getpid() != self._pid:
            return
        self._known.update(module.modules())  # a part that is called by itself, too, is no model
        if isinstance(module, torch.jit.ScriptModule) or next(module.parameters(), None) is None:
            return
        if not isinstance(module, DataParallel) and is_watched(within_ddp(module)):
            return
        if len(self._watched) >= _MOST:
            self._leave_out(f"more than {_MOST} models")
            return
        settings = self._settings
        number = f"-{len(self._watched)}" if self._watched else ""
        try:
            detector = DebugUnderflowOverflow(
                module,
                settings.frames,
                settings.trace,
                settings.abort_after,
                mode=settings.mode,  # type: ignore[arg-type]
                unit=settings.unit,  # type: ignore[arg-type]
                gradients=settings.gradients,  # type: ignore[arg-type]
                ignore=settings.ignore,
                on_detect=settings.on_detect,  # type: ignore[arg-type]
                save=os.path.join(settings.folder, f"frames-{self._me()}{number}.jsonl"),
            )
        except Exception as why:  # noqa: BLE001 - the job is what matters
            sys.stderr.write(f"distdiag: {type(module).__name__} is not checked: {why}\n")
            self._leave_out(f"{type(module).__name__}: {why}")
            return
        detector.serve_command()
        self._watched.append((kind_of(innermost(module)), detector.counts))
        self._detectors.append(weakref.ref(detector))
        self._tell()

    def _leave_out(self, why: str) -> None:
        if why not in self._left_out:
            self._left_out.append(why)
            self._tell()

    def _end(self) -> None:
        if os.getpid() != self._pid:
            return
        for reference in self._detectors:
            detector = reference()
            if detector is not None:
                detector.finish()
        self._ended = True
        self._tell()

    def _me(self) -> str:
        rank = own_rank()
        return f"{host_name()}-{self._pid}" if rank is None else f"{rank}-{host_name()}-{self._pid}"

    def _tell(self) -> None:
        """Leave word of what is watched, and at the end of how far it came."""
        if os.getpid() != self._pid or not (self._watched or self._left_out):
            return
        word: dict[str, Any] = {"rank": own_rank(), "host": host_name(), "pid": self._pid}
        word["ended"] = self._ended
        word["left_out"] = self._left_out
        word["models"] = [
            {
                "model": name,
                "batches": counts.forwards,
                "steps": counts.steps,
                "found": counts.found,
                "began": counts.began,
                "aborted": counts.aborted,
                "off": counts.off,
                "unread": counts.unread,
                "kind": counts.kind,
                "warnings": counts.warnings,
            }
            for name, counts in self._watched
        ]
        path = os.path.join(self._settings.folder, f"watched-{self._pid}-{host_name()}.json")
        try:
            private_files.make_folder(self._settings.folder)
            private_files.write_whole(path, json.dumps(word).encode())
        except OSError as error:  # the job is what matters
            sys.stderr.write(f"distdiag: cannot write {path}: {error.strerror}\n")
