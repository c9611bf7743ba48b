"""Threads for work that may hang: a program that ends does not wait for them, as it does for concurrent.futures."""

from __future__ import annotations

import functools
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Threads:
    """At most `width` threads; they are made when there is work."""

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
        """Drop what has not begun."""
        self._closed = True

    def _run(self) -> None:
        while not self._closed:
            self._work.get()()
