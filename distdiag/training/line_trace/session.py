"""Starts and stops the tracer in this process. Whatever fails here, the job runs."""

from __future__ import annotations

import atexit
import json
import os
import sys

from distdiag.facts.recorder.line_trace_file import default_folder
from distdiag.training.line_trace.recorder import LINES, THREADS, VARIABLE, Recorder, Settings, complain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType


def _from_text(text: str) -> Settings:
    """Parse the variable. Raises ValueError, KeyError, TypeError."""
    given = json.loads(text)
    return Settings(**{**given, "include": tuple(given["include"]), "exclude": tuple(given["exclude"])})


_running: Session | None = None


class Session:
    """A running tracer, at most one per process."""

    def __init__(self, settings: Settings, frame: FrameType | None) -> None:
        """Start tracing, also in the running function `frame` and its callers."""
        self.recorder, self._pid = Recorder(settings), os.getpid()
        if sys.version_info >= (3, 12):
            from distdiag.training.line_trace.monitoring_tracer import MonitoringTracer as Tracer
        else:
            from distdiag.training.line_trace.settrace_tracer import SettraceTracer as Tracer
        self._tracer = Tracer(self.recorder)
        self._tracer.start(frame)
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Stop tracing; the file is kept."""
        global _running
        self._tracer.stop()
        self._at_exit()
        atexit.unregister(self._at_exit)
        _running = None

    def _after_fork(self) -> None:
        if _running is self:
            self._pid = os.getpid()
            self.recorder.forget_file()
            self._tracer.after_fork()

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.recorder.close()


def _obstacle() -> str:
    """Return why tracing is impossible here, or ""."""
    if _running is not None:
        return "already traced"
    if sys.implementation.name != "cpython":
        return f"{sys.implementation.name} is not supported; CPython is"
    if sys.version_info >= (3, 13) and not sys._is_gil_enabled():
        return "a Python without the GIL is not supported"
    if sys.version_info < (3, 12) and sys.gettrace() is not None:
        return f"another tracer is active ({type(sys.gettrace()).__module__}): a debugger or coverage"
    return ""


def begin(settings: Settings, frame: FrameType | None) -> Session | None:
    """Start a tracer, or print to stderr why not."""
    global _running
    why = _obstacle()
    if not why:
        try:
            _running = Session(settings, frame)
        except Exception as error:  # noqa: BLE001 - never fail the job
            why = f"{type(error).__name__} {error}".strip()
    if why:
        complain(f"this process is not traced: {why}")
    return None if why else _running


def begin_from_environment() -> None:
    """Start with the settings of `distdiag trace py`."""
    text = os.environ.get(VARIABLE)
    if text:
        try:
            settings = _from_text(text)
        except (ValueError, KeyError, TypeError):
            complain(f"this process is not traced: {VARIABLE} cannot be read")
        else:
            begin(settings, None)


class trace_lines:
    """Record the last lines that each thread executes inside `with trace_lines():`, in a file that survives a crash.

    `folder`: directory of the file (default: a directory of the user in the temporary directory, where
    `distdiag trace show` looks). `lines`: lines to keep for each of `threads` threads. `include`: packages to trace
    besides the user's own code; "all" for all packages, "stdlib" for the standard library. `exclude`: packages,
    directories or files to skip. If tracing cannot start, a message on stderr says why and the block runs untraced.
    `path` is the file, None as long as there is no file; its size is 136 bytes x `lines` x `threads`.

    Raises:
        ValueError: fewer than 2 lines, or no thread.
    """

    def __init__(
        self,
        folder: str | None = None,
        *,
        lines: int = LINES,
        threads: int = THREADS,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        if lines < 2 or threads < 1:
            raise ValueError("trace_lines needs at least 2 lines and 1 thread")
        self._settings = Settings(
            folder=os.path.abspath(folder or default_folder()),
            lines=lines,
            threads=threads,
            include=(include,) if isinstance(include, str) else tuple(include),
            exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
        )
        self._session: Session | None = None
        self.path: str | None = None

    def __enter__(self) -> trace_lines:
        self._session = begin(self._settings, sys._getframe(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self.path = self._session.recorder.path
            self._session.stop()
