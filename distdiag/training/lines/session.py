"""Starts and stops the tracer in this process. Whatever goes wrong here, the job runs."""

from __future__ import annotations

import atexit
import os
import sys

from distdiag.node.rings import default_folder
from distdiag.training.lines.settings import LINES, THREADS, VARIABLE, Settings, from_text
from distdiag.training.lines.watched import Watched, complain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType

    from distdiag.training.lines.by_monitoring import ByMonitoring
    from distdiag.training.lines.by_settrace import BySettrace

_running: Session | None = None


class Session:
    """One tracer at work; a process has one at most."""

    def __init__(self, settings: Settings) -> None:
        self.watched = Watched(settings)
        self._pid = os.getpid()
        self._way = _way(self.watched)

    def start(self, frame: FrameType | None) -> None:
        """Trace from now on; `frame`: a function that is running already, and those outside of it, too."""
        self._way.start(frame)
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Trace no more; the file stays."""
        global _running
        self._way.stop()
        self._at_exit()
        atexit.unregister(self._at_exit)
        _running = None

    def _after_fork(self) -> None:
        if _running is self:
            self._pid = os.getpid()
            self.watched.forget_file()
            self._way.after_fork()

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.watched.close()


def _way(watched: Watched) -> BySettrace | ByMonitoring:
    if sys.version_info >= (3, 12):
        from distdiag.training.lines.by_monitoring import ByMonitoring

        return ByMonitoring(watched)
    from distdiag.training.lines.by_settrace import BySettrace

    return BySettrace(watched)


def _why_not() -> str:
    """Say what stands in the way of tracing here; empty if nothing does."""
    if sys.implementation.name != "cpython":
        return f"{sys.implementation.name} is not supported, CPython is"
    if sys.version_info >= (3, 13) and not sys._is_gil_enabled():
        return "a Python without the GIL is not supported"
    if sys.version_info < (3, 12) and sys.gettrace() is not None:
        return f"another tracer is at work already ({type(sys.gettrace()).__module__}), a debugger or coverage"
    return ""


def begin(settings: Settings, frame: FrameType | None) -> Session | None:
    """Start a tracer, or say on stderr why there is none."""
    global _running
    why = "it is traced already" if _running is not None else _why_not()
    if not why:
        session = Session(settings)
        try:
            session.start(frame)
        except Exception as error:  # noqa: BLE001 - the job is what matters
            why = f"{type(error).__name__} {error}".strip()
        else:
            _running = session
            return session
    complain(f"this process is not traced: {why}")
    return None


def begin_from_environment() -> None:
    """Start as `distdiag trace py` asked for."""
    text = os.environ.get(VARIABLE)
    if text:
        try:
            settings = from_text(text)
        except (ValueError, KeyError, TypeError):
            complain(f"this process is not traced: {VARIABLE} cannot be read")
        else:
            begin(settings, None)


class trace_lines:
    """Keep the last lines that each thread executes inside of `with trace_lines():`, in a file that outlives a crash.

    `folder`: where the file is made (default: a directory of the user's below the temporary one, where
    `distdiag trace show` looks); `lines` for each of `threads` threads; `include`: packages beside the user's own code,
    "all" for all of them, "stdlib"; `exclude`: packages, directories or files that are not wanted. Where tracing cannot
    start, that is said on stderr and the block runs untraced. `path` is the file, None as long as there is none; it
    takes 136 bytes for each of `lines` lines of `threads` threads.

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
            raise ValueError("trace_lines keeps 2 lines at least, of 1 thread at least")
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
            self.path = self._session.watched.path
            self._session.stop()
