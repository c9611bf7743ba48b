"""Tracing by sys.settrace, for Python up to 3.11.

One closure for each piece of code and thread: what a place begins with and where the thread's next record is are bound
into it, so that a line costs no look-up. Threads that C code made are not seen.
"""

from __future__ import annotations

import _thread
import gc
import sys
import threading

from distdiag.training.lines.watched import Lease

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

    from distdiag.training.lines.watched import Watched

_MOST_CODE = 100_000


class BySettrace:
    """Traces all threads that Python code starts from now on, and the calling one."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._local = threading.local()
        self._start_new_thread: Callable[..., int] | None = None
        self._stopped = False

    def start(self, frame: FrameType | None) -> None:
        """Begin; `frame`: also in this function that the calling thread is in already, and in those outside of it."""
        threading.settrace(self._first_event)
        self._start_new_thread = _thread.start_new_thread
        _thread.start_new_thread = self._traced_thread
        gc.callbacks.append(self._watch)
        self._trace_from(self._tracer(), frame)

    def stop(self) -> None:
        """End in the calling thread and for new ones; others end when they next call a function."""
        self._stopped = True
        threading.settrace(None)
        if self._start_new_thread is not None:
            _thread.start_new_thread = self._start_new_thread
        gc.callbacks.remove(self._watch)
        sys.settrace(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back

    def after_fork(self) -> None:
        """In a child: let the closures of the one thread that is left write into a file of its own."""
        renew = getattr(self._local, "renew", None)
        if renew is not None:
            renew()

    def _trace_from(self, enter: Callable[[FrameType, str, object], Any], frame: FrameType | None) -> None:
        sys.settrace(enter)
        while frame is not None:
            if frame.f_trace is None:
                frame.f_trace = enter(frame, "call", None)
            frame = frame.f_back

    def _watch(self, phase: str, info: object) -> None:
        """Take up tracing again where Python has ended it: an exception came out of a trace function.

        That may be a signal handler's, or RecursionError. The garbage collector calls this, every few hundred objects.
        """
        enter = getattr(self._local, "enter", None)
        if phase == "stop" and enter is not None and not self._stopped and sys.gettrace() is None:
            self._trace_from(enter, sys._getframe(1))

    def _first_event(self, frame: FrameType, event: str, arg: object) -> Any:
        enter = self._tracer()
        sys.settrace(enter)
        return enter(frame, event, arg)

    def _traced_thread(self, function: Callable[..., object], args: tuple[Any, ...], *more: Any) -> int:
        def run(*args: Any, **kwargs: Any) -> None:
            sys.settrace(self._first_event)
            function(*args, **kwargs)

        assert self._start_new_thread is not None
        # threading starts its own threads by a name that it took before: these here are not known to it.
        return self._start_new_thread(run, args, *more)

    def _tracer(self) -> Callable[[FrameType, str, object], Any]:  # noqa: C901 - closures are what makes a line cheap
        """Make the trace function of the calling thread."""
        watched, bases = self._watched, self._watched.bases
        of_code: dict[int, Any] = {}
        kept: list[CodeType] = []
        following: Callable[[], Any]
        begin: Callable[[], Callable[[], Any]]

        def first() -> Any:
            # A child makes its file only if it has lines to tell: most execute another program at once.
            nonlocal following, begin
            begin, end = watched.lease()
            following = begin()
            self._local.lease = Lease(end)
            return following()

        def again() -> Any:
            # A signal handler's exception came through the ring.
            nonlocal following
            following = begin()
            return following()

        def renew() -> None:
            nonlocal following
            following = first

        def local_for(base: float) -> Any:
            def local(frame: Any, event: str, arg: object) -> None:
                if event == "line":
                    try:
                        following()[0] = base + frame.f_lineno
                    except StopIteration:
                        again()[0] = base + frame.f_lineno
                elif event == "return":
                    back = frame.f_back
                    place = bases.get(id(back.f_code)) if back is not None else None
                    # Mostly a function is called by one that is traced as well.
                    place = watched.place_of_caller(frame) if place is None else -(place + (back.f_lineno or 0))
                    if place is not None:
                        try:
                            following()[0] = place
                        except StopIteration:
                            again()[0] = place
                # None: goes on with this function.

            return local

        def enter(frame: FrameType, event: str, arg: object) -> Any:
            code = frame.f_code
            if self._stopped:
                sys.settrace(None)
                return None
            try:
                return of_code[id(code)]
            except KeyError:
                try:
                    base = watched.bases.get(id(code)) or watched.base_of(frame)
                except RecursionError:
                    return None
                if len(of_code) > _MOST_CODE:
                    of_code.clear()
                    kept.clear()
                kept.append(code)
                made = of_code[id(code)] = None if base is None else local_for(base)
                return made

        following = first
        self._local.renew, self._local.enter = renew, enter
        return enter
