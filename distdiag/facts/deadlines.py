"""Work that may block forever: a late piece is abandoned in its thread, the rest continues.

/proc/PID/cmdline, environ, maps and mem wait for the lock of that process's memory map: with a thread stuck in the
kernel, `ps` hangs on them. A source file may be on the very disk that the job waits for.
"""

from __future__ import annotations

import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, TypeVar

    K = TypeVar("K")
    V = TypeVar("V")

_LOOK_S = 0.02


def each(keys: Iterable[K], work: Callable[[K], V], *, patience_s: float) -> tuple[dict[K, V], list[K]]:
    """Call work(key) for each key in turn; return (results, keys that took longer than `patience_s` seconds).

    Abandoned work keeps its thread, until the end of this process at the latest. Errors of `work` are raised.
    """
    todo = list(keys)[::-1]
    results: dict[K, V] = {}
    late: list[K] = []
    while todo:
        worker = _Worker(todo, work, results)
        worker.start()
        while not worker.over.wait(_LOOK_S):
            if time.monotonic() - worker.began > patience_s and (stuck := worker.abandon(patience_s)) is not None:
                late.append(stuck[0])
                break
        if worker.error is not None:
            raise worker.error
    return results, late


def together(work: Mapping[K, Callable[[], V]], *, patience_s: float) -> tuple[dict[K, V], list[K]]:
    """Run all pieces of work in parallel; return (results, keys not finished within `patience_s` seconds).

    Abandoned work keeps its thread, until the end of this process at the latest. Errors are raised.
    """
    results: dict[K, V] = {}
    errors: list[Exception] = []

    def do(key: K) -> None:
        try:
            results[key] = work[key]()
        except Exception as error:  # noqa: BLE001 - it is raised where the work was asked for
            errors.append(error)

    threads = {key: threading.Thread(target=do, args=(key,), daemon=True) for key in work}
    until = time.monotonic() + patience_s
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, until - time.monotonic()))
    if errors:
        raise errors[0]
    done = dict(results)  # a copy, as abandoned work may still finish
    return done, [key for key in threads if key not in done]


class _Worker(threading.Thread):
    """Processes keys until none remain, or it is abandoned."""

    def __init__(self, todo: list[Any], work: Callable[[Any], Any], results: dict[Any, Any]) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.began = time.monotonic()
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._abandoned = False
        self._current: list[Any] = []
        self._todo, self._work, self._results = todo, work, results

    def run(self) -> None:
        while True:
            with self._lock:
                if self._abandoned or not self._todo:
                    break
                key = self._todo.pop()
                self._current, self.began = [key], time.monotonic()
            try:
                value = self._work(key)
            except Exception as error:  # noqa: BLE001 - it is raised where the work was asked for
                self.error = error
                break
            with self._lock:
                if self._abandoned:
                    return
                self._results[key] = value
        self.over.set()

    def abandon(self, patience_s: float) -> list[Any] | None:
        """Abandon the current key and return it; None if the worker has just moved on."""
        with self._lock:
            # A worker without a key has not been scheduled yet, so no piece of work is late.
            if not self._current or time.monotonic() - self.began <= patience_s or self.over.is_set():
                return None
            self._abandoned = True
            return self._current
