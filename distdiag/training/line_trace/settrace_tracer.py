"""Tracing by sys.settrace, for Python up to 3.11.

One closure for each code object and thread binds the base of its places and the thread's next record, so that a line
needs no lookup. Threads created by C code are not traced.
"""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import types
import weakref

from distdiag.training.line_trace.recorder import RingLease

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType
    from typing import Any

    from distdiag.training.line_trace.recorder import Recorder

_MOST_CODE = 100_000


class SettraceTracer:
    """Traces the calling thread and all threads later started by Python code."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._local = threading.local()
        self._start_new_thread: Callable[..., int] | None = None
        self._stopped = False
        self._forget: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()
        """Per live thread a function that drops its cached decisions on traced code."""

    def start(self, frame: FrameType | None) -> None:
        """Start tracing, also in the running function `frame` and its callers."""
        threading.settrace(self._first_event)
        self._start_new_thread = _thread.start_new_thread
        _thread.start_new_thread = self._traced_thread
        self._trace_from(self._tracer(), frame)

    def stop(self) -> None:
        """Stop in the calling thread and for new threads; others stop at their next function call."""
        self._stopped = True
        for forget in list(self._forget):
            forget()
        threading.settrace(None)
        if self._start_new_thread is not None:
            _thread.start_new_thread = self._start_new_thread
        self._local.lost = None
        sys.settrace(None)
        gc.callbacks[:] = [callback for callback in gc.callbacks if not isinstance(callback, _LostTrace)]
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back

    def after_fork(self) -> None:
        """In a forked child: let the closures of the remaining thread write to a new file."""
        renew = getattr(self._local, "renew", None)
        if renew is not None:
            renew()

    def _trace_from(self, enter: Callable[[FrameType, str, object], Any], frame: FrameType | None) -> None:
        self._trace(enter)
        while frame is not None:
            if frame.f_trace is None:
                frame.f_trace = enter(frame, "call", None)
            frame = frame.f_back

    def _trace(self, enter: Callable[[FrameType, str, object], Any]) -> None:
        """Trace the calling thread, and resume if Python removes the trace function."""
        only = types.FunctionType(enter.__code__, enter.__globals__, enter.__name__, None, enter.__closure__)
        self._local.lost = _LostTrace(only, self._take_up)
        sys.settrace(only)

    def _take_up(self) -> bool:
        """Resume tracing of the calling thread if it stopped; return whether no more is to be done."""
        enter = getattr(self._local, "enter", None)
        if enter is None or sys.gettrace() is not None:
            return False
        if not self._stopped:
            self._trace_from(enter, sys._getframe(1).f_back)
        return True

    def _first_event(self, frame: FrameType, event: str, arg: object) -> Any:
        enter = self._tracer()
        self._trace(enter)
        return enter(frame, event, arg)

    def _traced_thread(self, function: Callable[..., object], args: tuple[Any, ...], *more: Any) -> int:
        def run(*args: Any, **kwargs: Any) -> None:
            sys.settrace(self._first_event)
            function(*args, **kwargs)

        assert self._start_new_thread is not None
        # threading holds its own reference to the original: only threads started without it pass here.
        return self._start_new_thread(run, args, *more)

    def _tracer(self) -> Callable[[FrameType, str, object], Any]:  # noqa: C901 - closures are what makes a line cheap
        recorder, bases = self._recorder, self._recorder.bases
        of_code: dict[int, Any] = {}
        kept: list[CodeType] = []
        returns: dict[int, float] = {}
        begin: Callable[[], Iterator[Any]] | None = None
        following: Iterator[Any] = iter(())

        def keep(place: float) -> None:
            """Write a place, also if it is the first or an exception of a signal handler ended the iterator."""
            nonlocal following, begin
            try:
                next(following)[0] = place
            except StopIteration:
                if begin is None:
                    # A child creates its file at its first line: most call exec at once.
                    begin, end = recorder.lease()
                    self._local.lease = RingLease(end)
                following = begin()
                next(following)[0] = place

        def renew() -> None:
            nonlocal following, begin
            following, begin = iter(()), None

        def keep_caller(frame: Any) -> None:
            back = frame.f_back
            base = bases.get(id(back.f_code)) if back is not None else None
            if base is None:
                place = recorder.place_of_caller(frame)
                if place is not None:
                    keep(place)
                return
            # co_code is part of the code object, which is kept alive: the sum is unique.
            place = returns[id(back.f_code) + back.f_lasti] = -(base + (back.f_lineno or 0))
            keep(place)

        def local_for(base: float) -> Any:
            def local(frame: Any, event: str, arg: object) -> None:
                if event == "line":
                    try:
                        next(following)[0] = base + frame.f_lineno
                    except StopIteration:
                        keep(base + frame.f_lineno)
                elif event == "return":
                    try:
                        # The caller's f_lineno would cost a scan of its line table.
                        back = frame.f_back
                        next(following)[0] = returns[id(back.f_code) + back.f_lasti]
                    except (KeyError, AttributeError, StopIteration):
                        keep_caller(frame)
                # Returning None keeps this trace function.

            return local

        def enter(frame: FrameType, event: str, arg: object) -> Any:
            try:
                return of_code[id(frame.f_code)]
            except KeyError:
                return meet(frame)

        def meet(frame: FrameType) -> Any:
            if self._stopped:
                self._local.lost = None
                sys.settrace(None)
                return None
            code = frame.f_code
            try:
                base = bases.get(id(code)) or recorder.base_of(frame)
            except RecursionError:
                return None
            if len(of_code) > _MOST_CODE:
                forget()
            kept.append(code)
            made = of_code[id(code)] = None if base is None else local_for(base)
            return made

        def forget() -> None:
            of_code.clear()
            kept.clear()

        self._forget.add(forget)
        self._local.renew, self._local.enter, self._local.forget = renew, enter, forget
        return enter


class _LostTrace(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a thread's trace function, which only Python owns; resumes tracing once Python drops it.

    Python drops it when an exception leaves a trace function: a signal handler's, or RecursionError. From then on the
    garbage collector calls this object, every few hundred allocations, until tracing has resumed. Not before: an
    exception raised by a signal handler in a gc callback is lost. So the weakref callback is a C function
    (gc.callbacks.append).
    """

    __slots__ = ("_take_up", "_thread")

    def __new__(cls, function: Callable[..., Any], take_up: Callable[[], bool]) -> _LostTrace:
        return super().__new__(cls, function, gc.callbacks.append)

    def __init__(self, function: Callable[..., Any], take_up: Callable[[], bool]) -> None:
        super().__init__(function, gc.callbacks.append)  # type: ignore[call-arg]
        self._take_up, self._thread = take_up, _thread.get_ident()

    def __call__(self, phase: str, info: object) -> None:  # type: ignore[override]
        # Only if last: removal from the middle would make the collector skip the next callback.
        is_ours = phase == "stop" and self._thread == _thread.get_ident()
        if is_ours and self._take_up() and gc.callbacks[-1] is self:
            gc.callbacks.pop()
