"""Tracing by sys.monitoring, for Python 3.12 and later: all threads; untraced code costs nothing.

Python reports the first start of each code object; line events are enabled only for traced code. Relies on the GIL.
"""

from __future__ import annotations

import contextlib
import sys
import threading

from distdiag.training.line_trace.recorder import RingLease

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

    from distdiag.training.line_trace.recorder import Recorder

_TOOLS = (4, 3)
"""Tool ids not reserved by convention for debuggers, coverage or profilers."""


class NoTool(Exception):
    """Other tools use both ids."""


class MonitoringTracer:
    """Traces all threads of this process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._local = threading.local()
        """Per thread: `following`, an iterator of the places in its ring, `begin`, which restarts it, and `lease`,
        which ends it."""
        self._tool = -1

    def start(self, _: FrameType | None) -> None:
        """Start tracing, also of functions already running in any thread: the frame is not needed.

        Raises:
            NoTool: no tool id is free.
        """
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        self._tool = self._take_tool(monitoring)
        events = monitoring.events
        monitoring.register_callback(self._tool, events.PY_START, self._on_start)
        monitoring.register_callback(self._tool, events.PY_RESUME, self._on_start)
        monitoring.register_callback(self._tool, events.LINE, self._line_callback())
        monitoring.register_callback(self._tool, events.PY_RETURN, self._on_return)
        monitoring.register_callback(self._tool, events.PY_YIELD, self._on_return)
        monitoring.restart_events()
        monitoring.set_events(self._tool, events.PY_START | events.PY_RESUME)
        for innermost in sys._current_frames().values():
            frame: FrameType | None = innermost
            while frame is not None:
                self._begin_code(frame)
                frame = frame.f_back

    def stop(self) -> None:
        """Stop in all threads."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        monitoring.set_events(self._tool, 0)
        for code in list(self._recorder.codes):
            monitoring.set_local_events(self._tool, code, 0)
        monitoring.free_tool_id(self._tool)

    def after_fork(self) -> None:
        """In a forked child: the remaining thread gets a ring in a new file at its next line."""
        vars(self._local).clear()

    def _take_tool(self, monitoring: Any) -> int:
        for tool in _TOOLS:
            if monitoring.get_tool(tool) is None:
                monitoring.use_tool_id(tool, "distdiag trace")
                return tool
        raise NoTool

    def _on_start(self, code: CodeType, offset: int) -> Any:
        self._begin_code(sys._getframe(1))
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]

    def _begin_code(self, frame: FrameType) -> None:
        try:
            is_traced = id(frame.f_code) in self._recorder.bases or self._recorder.base_of(frame) is not None
        except RecursionError:
            return
        if is_traced:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
            events = monitoring.events
            with contextlib.suppress(ValueError):  # the tool id was freed meanwhile
                monitoring.set_local_events(self._tool, frame.f_code, events.LINE | events.PY_RETURN | events.PY_YIELD)

    def _line_callback(self) -> Callable[[CodeType, int], None]:
        bases, local = self._recorder.bases, self._local
        disable = sys.monitoring.DISABLE  # type: ignore[attr-defined]
        last_code: CodeType | None = None
        base = 0.0

        def on_line(code: CodeType, line: int) -> Any:
            nonlocal last_code, base
            if code is last_code:
                mine = base
            else:
                if id(code) not in bases:  # another thread began it while a tracer before this one ended
                    return disable
                mine = base = bases[id(code)]
                last_code = code
            try:
                next(local.following)[0] = mine + line
            except (AttributeError, StopIteration):
                with contextlib.suppress(ValueError, RecursionError):  # as below
                    self._first()[0] = mine + line
            except (ValueError, RecursionError):
                pass  # a signal handler or a finalizer, while this thread begins a block; or no room: not traced
            return None

        return on_line

    def _on_return(self, code: CodeType, offset: int, value: object) -> None:
        place = self._recorder.place_of_caller(sys._getframe(1))
        if place is not None:
            with contextlib.suppress(ValueError, RecursionError):  # as above
                try:
                    next(self._local.following)[0] = place
                except (AttributeError, StopIteration):
                    self._first()[0] = place

    def _first(self) -> Any:
        """Return the first place of the thread's ring, at its first line or after an exception ended the iterator."""
        local = self._local
        begin = getattr(local, "begin", None)
        if begin is None:
            local.begin, end = self._recorder.lease()
            local.lease = RingLease(end)
        local.following = local.begin()
        return next(local.following)
