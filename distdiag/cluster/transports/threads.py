"""Threads for work that may hang: program exit does not wait for these, unlike concurrent.futures."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LATE_S = 0.2
"""So much later a limit may be noticed."""


class Threads:
    """At most `width` threads, created on demand."""

    def __init__(self, width: int, name: str) -> None:
        self._width = width
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._made = 0
        self._closed = False

    def submit(self, work: Callable[..., None], *arguments: object) -> None:
        """Have it done as soon as a thread is free; it must not raise."""
        self._work.put(functools.partial(work, *arguments))
        with self._lock:
            if self._made >= self._width:
                return
            self._made += 1
        threading.Thread(target=self._run, name=f"{self._name}-{self._made}", daemon=True).start()

    def close(self) -> None:
        """Drop pending work."""
        self._closed = True

    def _run(self) -> None:
        while not self._closed:
            self._work.get()()


class Limits:
    """Timeouts in one shared thread, where threading.Timer would use one each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[object, tuple[float, Callable[[], object]]] = {}
        self._is_watched = False

    @contextlib.contextmanager
    def within(self, seconds: float, too_late: Callable[[], object]) -> Iterator[None]:
        """Call `too_late`, from another thread, if the block takes longer than `seconds`.

        It must neither raise nor block: other timeouts wait for it.
        """
        this = object()
        with self._lock:
            self._running[this] = time.monotonic() + seconds, too_late
            begin, self._is_watched = not self._is_watched, True
        if begin:
            threading.Thread(target=self._watch, name="limits", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(this, None)

    def _watch(self) -> None:
        while True:
            time.sleep(_LATE_S)
            with self._lock:
                if not self._running:
                    self._is_watched = False
                    return
                now = time.monotonic()
                late = [this for this, (end, _) in self._running.items() if end < now]
                calls = [self._running.pop(this)[1] for this in late]
            for too_late in calls:
                too_late()
