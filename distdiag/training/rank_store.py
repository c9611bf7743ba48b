"""The job's store over a connection of our own, for ranks that wait for one in a debugger.

A connection does one thing after the other: where the job waits in the store, a word of ours would wait, too.
"""

from __future__ import annotations

import contextlib
import queue
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def own(store: Any) -> Any:  # noqa: ANN401 - torch's Store
    """Give a store of the same contents with a connection of its own; the same one where torch cannot (before 2.6)."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return store.clone()
    return store


class Asked:
    """Asks a store in a thread: torch waits without end for one whose keeper is stopped, whatever the timeout."""

    def __init__(self, store: Any, begin: Callable[[Any], object], look: Callable[[Any], Any]) -> None:  # noqa: ANN401
        """`begin` is called once and `look` for each answer, with the store."""
        self._begin, self._look = begin, look
        self._questions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waits = False
        threading.Thread(target=self._answer, args=(store,), name="distdiag breakpoint", daemon=True).start()

    def answer(self, patience_s: float) -> Any:  # noqa: ANN401 - what `look` gives
        """Look once.

        Raises:
            TimeoutError: no answer in time; the next call waits for the same one.
            RuntimeError: the store is gone.
        """
        if not self._waits:
            self._questions.put(True)
            self._waits = True
        try:
            found = self._answers.get(timeout=patience_s)
        except queue.Empty:
            raise TimeoutError from None
        self._waits = False
        if isinstance(found, RuntimeError):
            raise found
        return found

    def end(self) -> None:
        """Ask no more: the thread ends, and with it the connection."""
        self._questions.put(False)

    def _answer(self, store: Any) -> None:  # noqa: ANN401 - torch's Store
        begun = False
        while self._questions.get():
            try:
                if not begun:
                    store.check(["distdiag"])  # one that is gone says so at once; a new connection tries for long
                    store = own(store)
                    self._begin(store)
                    begun = True
                self._answers.put(self._look(store))
            except RuntimeError as error:
                self._answers.put(error)
