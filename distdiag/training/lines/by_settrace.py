"""Tracing by sys.settrace, for Python up to 3.11.

One closure for each piece of code and thread: what a place begins with and where the thread's next record is are bound
into it, so that a line costs no look-up. Threads that C code made are not seen.
"""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import weakref

from distdiag.training.lines.watched import Lease

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
        self._events: dict[str, str] = {}
        self._forget: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()
        """Of each thread that lives what makes it ask again for each code whether it is traced."""

    def start(self, frame: FrameType | None) -> None:
        """Begin; `frame`: also in this function that the calling thread is in already, and in those outside of it."""
        self._events = _names_of_events()
        threading.settrace(self._first_event)
        self._start_new_thread = _thread.start_new_thread
        _thread.start_new_thread = self._traced_thread
        gc.callbacks.append(self._watch)
        self._trace_from(self._tracer(), frame)

    def stop(self) -> None:
        """End in the calling thread and for new ones; others end when they next call a function."""
        self._stopped = True
        for forget in list(self._forget):
            forget()
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
            self._trace_from(enter, sys._getframe().f_back)

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
        returns: dict[int, float] = {}
        begin: Callable[[], Iterator[Any]] | None = None
        following: Iterator[Any] = iter(())
        a_line, a_return = self._events["line"], self._events["return"]

        def keep(place: float) -> None:
            """Write a place, also if it is the first, or a signal handler's exception came through the ring."""
            nonlocal following, begin
            try:
                next(following)[0] = place
            except StopIteration:
                if begin is None:
                    # A child makes its file only if it has lines to tell: most execute another program at once.
                    begin, end = watched.lease()
                    self._local.lease = Lease(end)
                following = begin()
                next(following)[0] = place

        def renew() -> None:
            nonlocal following, begin
            following, begin = iter(()), None

        def keep_caller(frame: Any) -> None:
            back = frame.f_back
            base = bases.get(id(back.f_code)) if back is not None else None
            if base is None:
                place = watched.place_of_caller(frame)
                if place is not None:
                    keep(place)
                return
            # The code lies in the object itself and is kept, so this number is nobody else's.
            place = returns[id(back.f_code) + back.f_lasti] = -(base + (back.f_lineno or 0))
            keep(place)

        def local_for(base: float) -> Any:
            def local(frame: Any, event: str, arg: object) -> None:
                if event is a_line:
                    try:
                        next(following)[0] = base + frame.f_lineno
                    except StopIteration:
                        keep(base + frame.f_lineno)
                elif event is a_return:
                    try:
                        # To ask the caller for its line would take Python a walk through all lines of its code.
                        back = frame.f_back
                        next(following)[0] = returns[id(back.f_code) + back.f_lasti]
                    except (KeyError, AttributeError, StopIteration):
                        keep_caller(frame)
                # None: goes on with this function.

            return local

        def enter(frame: FrameType, event: str, arg: object) -> Any:
            try:
                return of_code[id(frame.f_code)]
            except KeyError:
                return meet(frame)

        def meet(frame: FrameType) -> Any:
            if self._stopped:
                sys.settrace(None)
                return None
            code = frame.f_code
            try:
                base = bases.get(id(code)) or watched.base_of(frame)
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


def _names_of_events() -> dict[str, str]:
    """Give the very objects that Python names events by: `is` saves a tenth of all that is done for a line.

    It has one of each, and not all of them are interned.
    """
    found: dict[str, str] = {}

    def see(frame: FrameType, event: str, arg: object) -> Any:
        found[event] = event
        return see

    before = sys.gettrace()
    sys.settrace(see)
    (lambda: None)()
    sys.settrace(before)
    return found
