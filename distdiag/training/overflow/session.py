"""Starts the detector in a process of `distdiag overflow` once it has imported torch. Errors never stop the job."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import sys
from dataclasses import asdict, replace
from importlib.abc import MetaPathFinder

from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


VARIABLE = "DISTDIAG_OVERFLOW"


@record
class Settings:
    """Arguments of DebugUnderflowOverflow by name, and `folder` for the record of each process.

    `quiet`: the command reports detections, instead of an error with traceback.
    """

    folder: str
    max_frames_to_save: int = 21
    trace_batch_nums: tuple[int, ...] = ()
    abort_after_batch_num: int | None = None
    mode: str = "step"
    gradients: str = "each"
    ignore: tuple[str, ...] = ()
    on_detect: str = "raise"
    quiet: bool = False

    def to_text(self) -> str:
        """Write for the variable."""
        return json.dumps(asdict(self))


def from_text(text: str) -> Settings:
    """Read the variable. Raises ValueError, TypeError."""
    settings = Settings(**json.loads(text))
    return replace(settings, trace_batch_nums=tuple(settings.trace_batch_nums), ignore=tuple(settings.ignore))


def begin_from_environment() -> None:
    """Start the detector at the import of torch, if VARIABLE is set."""
    text = os.environ.get(VARIABLE)
    if text:
        try:
            settings = from_text(text)
        except (ValueError, TypeError, KeyError):
            _complain(f"{VARIABLE} cannot be read")
        else:
            sys.meta_path.insert(0, _AfterTorch(settings))
            atexit.register(end)  # the first registered runs last


class _End:
    """Ends a stopped process after its exit handlers, without Python's cleanup.

    A thread of Gloo that needs the GIL during that aborts the process: torchrun then names SIGABRT as the root cause.
    """

    def __init__(self) -> None:
        self._is_stopped = False

    def stopped(self) -> None:
        """Note that the process is stopped."""
        self._is_stopped = True

    def __call__(self) -> None:
        if self._is_stopped:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, ValueError, OSError):  # None, closed, or a broken pipe
                    stream.flush()
            os._exit(1)


end = _End()


class _AfterTorch(MetaPathFinder):
    """Finds torch as Python would, and starts the detector after torch was loaded."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asks = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find torch for the import system."""
        if name != "torch" or self._asks:
            return None
        self._asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:  # looking for torch does not load it
            load = functools.partial(self._load_and_begin, spec.loader.exec_module)
            spec.loader.exec_module = load  # type: ignore[method-assign] # of this loader alone, not of its class
        return spec

    def _load_and_begin(self, load: Callable[[ModuleType], None], module: ModuleType) -> None:
        load(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            # distdiag itself is loaded already; the rest of it is found beside it.
            from distdiag.training.overflow.finder import Finder

            given = vars(self._settings).copy()
            Finder(given.pop("folder"), quiet=given.pop("quiet"), stopped=end.stopped, arguments=given).begin()
        except Exception as error:  # noqa: BLE001 - never fail the job
            _give_up(self._settings.folder, f"{type(error).__name__} {error}")


def _complain(why: str) -> None:
    sys.stderr.write(f"distdiag overflow: this process is not checked: {why}\n")


def _give_up(folder: str, why: str) -> None:
    """Record the reason why this process is not checked, and print it."""
    from distdiag.facts import machine
    from distdiag.training.overflow.report import WatchedProcess

    _complain(why)
    rank = os.environ.get("RANK", "")
    process = WatchedProcess(int(rank) if rank.isdigit() else None, machine.host_name(), os.getpid(), left_out=[why])
    process.ended = True
    with contextlib.suppress(OSError):
        process.write(folder)
