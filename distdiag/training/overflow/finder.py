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
from torch.optim.optimizer import register_optimizer_step_post_hook

from distdiag.training import whoami
from distdiag.training.overflow.detector import DebugUnderflowOverflow

if TYPE_CHECKING:
    from typing import Any

    from distdiag.training.overflow.settings import Settings

_MOST = 64
"""So many models are watched; who has more makes them anew for each batch."""


class Finder:
    """Watches each model from its first call on; looks for models until the first step of an optimizer is over."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._detectors: list[DebugUnderflowOverflow] = []
        self._names: list[str] = []
        self._looks = True
        self._pid = os.getpid()

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
                if finder._looks:
                    nn.Module.__call__ = call_and_look  # type: ignore[method-assign]

        nn.Module.__call__ = call_and_look  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._tell)

    def meet(self, module: nn.Module) -> None:
        """Watch a model that is called, unless it is watched already or has nothing to learn."""
        if module in self._known or os.getpid() != self._pid:
            return
        self._known.add(module)
        if isinstance(module, torch.jit.ScriptModule) or next(module.parameters(), None) is None:
            return
        settings = self._settings
        number = "" if not self._detectors else f"-{len(self._detectors)}"
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
        except ValueError as why:  # it has a detector of its own, or is in DataParallel
            sys.stderr.write(f"distdiag: {type(module).__name__} is not watched: {why}\n")
            return
        self._detectors.append(detector)
        self._names.append(type(module).__name__)
        self._looks = len(self._detectors) < _MOST
        self._tell()

    def _after_step(self, optimizer: object, args: object, kwargs: object) -> None:
        self._looks = self._looks and not self._detectors
        # It goes when the model is called the next time.

    def _me(self) -> str:
        rank = whoami.rank()
        return f"{whoami.host()}-{self._pid}" if rank is None else f"{rank}-{whoami.host()}-{self._pid}"

    def _tell(self) -> None:
        """Leave word of what is watched, and at the end of how far it came."""
        if os.getpid() != self._pid or not self._detectors:
            return
        told: dict[str, Any] = {"rank": whoami.rank(), "host": whoami.host(), "pid": self._pid}
        told["models"] = [
            {"model": name, "batches": one.forwards, "steps": one.steps, "found": one.found, "aborted": one.aborted}
            for name, one in zip(self._names, self._detectors)
        ]
        path = os.path.join(self._settings.folder, f"watched-{self._pid}-{whoami.host()}.json")
        try:
            os.makedirs(self._settings.folder, exist_ok=True)
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                json.dump(told, file)
            os.replace(f"{path}.part", path)
        except OSError as error:  # the job is what matters
            sys.stderr.write(f"distdiag: cannot write {path}: {error.strerror}\n")
