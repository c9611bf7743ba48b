"""What is common to both ways of tracing: the file, made when the first line is to be kept, and the names of code."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading

from distdiag.node import rings
from distdiag.training.lines.choice import Choice
from distdiag.training.lines.writer import Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType
    from typing import Any

    from distdiag.training.lines.settings import Settings

_MANY = 200_000
_ERROR = 300
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(rings.__file__ or "")) + os.sep
_DEEP = 64
"""Frames to look through for the one that a call returns to: between it and a callback lie those of a library."""


def nowhere() -> Iterator[list[float]]:
    """Take the place of a ring where there is none: what is written goes to nobody."""
    return itertools.repeat([0.0])


class Watched:
    """The code that is traced, by identity: hashing a code object takes longer than all else."""

    def __init__(self, settings: Settings) -> None:
        self.bases: dict[int, float] = {}
        """id of a code object -> what places in it begin with."""
        self._settings = settings
        self._choice = Choice(settings.include, settings.exclude)
        self._kept: list[CodeType] = []
        self._names: list[bytes] = []
        self._writer: Writer | None = None
        self._broken = False
        self._making = False
        self._lock = threading.RLock()

    def base_of(self, frame: FrameType) -> float | None:
        """Give what places in this frame's code begin with, None if it is not traced. Asked once per code."""
        try:
            return self._base_of(frame)
        except RecursionError:
            raise  # the job's own: whoever calls us makes do without this call
        except Exception as error:
            if not _is_ours(error):
                raise
            self._give_up(error)
            return None

    def _base_of(self, frame: FrameType) -> float | None:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)
        kind = self._choice.kind_of(code.co_filename, name, str(frame.f_globals.get("__name__", "")))
        if kind is None:
            return None
        writer = self._file()
        if writer is None or len(self._kept) >= _MANY:
            return None
        file = code.co_filename
        path = file if file.startswith("<") else os.path.abspath(file)
        with self._lock:
            number = len(self._names) + 1
            line = json.dumps([number, path, name, kind]).encode() + b"\n"
            if not writer.tell_name(line):
                return None
            self._names.append(line)
            self._kept.append(code)  # or its id would be given to another
            base = self.bases[id(code)] = float(number << rings.LINE_BITS)
        return base

    def codes(self) -> list[CodeType]:
        """List the code that is traced."""
        return list(self._kept)

    def place_of_caller(self, frame: FrameType) -> float | None:
        """Give the place to which this frame returns: the nearest traced frame outside of it, at its current line."""
        bases, back = self.bases, frame.f_back
        for _ in range(_DEEP):
            if back is None:
                return None
            base = bases.get(id(back.f_code))
            if base is not None:
                return -(base + (back.f_lineno or 0))
            back = back.f_back
        return None

    def lease(self) -> tuple[Callable[[], Iterator[Any]], Callable[[], None]]:
        """Give the calling thread its ring, see `Writer.lease`; nowhere if there is none."""
        try:
            writer = self._file()
            leased = writer.lease() if writer is not None else None
        except Exception as error:
            if not _is_ours(error):
                raise
            self._give_up(error)
            leased = None
        return leased if leased is not None else (nowhere, lambda: None)

    def _give_up(self, error: Exception) -> None:
        if not self._broken:
            complain(f"no more lines are kept of process {os.getpid()}: {type(error).__name__} {error}")
        self._broken = True
        self._writer = None

    def forget_file(self) -> None:
        """In a child: the file is the parent's. A file of its own, with all names, is made at its first line."""
        self._lock = threading.RLock()
        self._writer = None
        self._broken = False

    def close(self) -> None:
        """Note the process's own end, and the exception that ended it if there was one."""
        if self._writer is not None:
            error = getattr(sys, "last_value", None)  # Python sets it when nobody caught an exception
            self._writer.close({} if error is None else self._about_error(error))

    def _about_error(self, error: BaseException) -> dict[str, Any]:
        """Tell what was raised, and the innermost line of the user's own that it came through."""
        found: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:_ERROR]}
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            module = str(trace.tb_frame.f_globals.get("__name__", ""))
            if self._choice.kind_of(code.co_filename, code.co_name, module) == "user":
                found["at"] = [code.co_filename, trace.tb_lineno, getattr(code, "co_qualname", code.co_name)]
            trace = trace.tb_next
        return found

    @property
    def path(self) -> str | None:
        """The file, once there is one."""
        return None if self._writer is None else self._writer.path

    def _file(self) -> Writer | None:
        with self._lock:
            # What runs while the file is being made is our own, in this thread: the others wait for the lock.
            if self._writer is None and not self._broken and not self._making:
                self._making = True
                try:
                    self._writer = Writer(self._settings, self._names)
                except OSError as error:
                    self._broken = True
                    why = error.strerror or error
                    complain(
                        f"lines are not kept in {self._settings.folder}: {why}; another folder: trace py --dir DIR"
                    )
                finally:
                    self._making = False
            return self._writer


def _is_ours(error: Exception) -> bool:
    """Tell whether our own code failed: that would come out of a line of the job's, which must not see it.

    Else it is the job's: a signal handler that ran in the midst of ours raised it.
    """
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        is_library = file.startswith((_LIBRARY, "<frozen ")) and "-packages" not in file
        if not file.startswith(_OWN) and not is_library:
            return False
        trace = trace.tb_next
    return True


class Lease:
    """Ends a thread's ring when the thread has ended: kept in a threading.local, it goes with the thread."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __del__(self) -> None:
        self._end()


def complain(what: str) -> None:
    """Tell why the job runs without being traced, or with less of it."""
    try:
        sys.stderr.write(f"distdiag trace: {what}\n")
    except (OSError, ValueError, AttributeError):  # no stderr: the job goes on all the same
        return
