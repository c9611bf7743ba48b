"""Work that may never come back: a piece that takes too long is left behind, and the rest goes on.

/proc/PID/cmdline, environ, maps and mem wait for the lock of that process's memory map: beside a thread that is
stuck in the kernel, `ps` hangs on them. A source file may lie on the very disk that the job waits for.
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
    """Do work(key) for each key in turn: (results, keys whose work did not end within `patience_s` seconds).

    What is left behind stays in its own thread, and ends with this process at the latest. An error of `work` is raised.
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
    """Do all pieces of work at the same time: (results, keys of what did not end within `patience_s` seconds).

    What is left behind stays in its own thread, and ends with this process at the latest. An error is raised.
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
    done = dict(results)  # one that is left behind may still end
    return done, [key for key in threads if key not in done]


class _Worker(threading.Thread):
    """Takes keys until there are none, or it is abandoned."""

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
        """Work."""
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
        """Leave it to itself; gives the key it is at, or None if it has just gone on."""
        with self._lock:
            # One that has no key yet was not even run so far: no piece of work is late for that.
            if not self._current or time.monotonic() - self.began <= patience_s or self.over.is_set():
                return None
            self._abandoned = True
            return self._current
