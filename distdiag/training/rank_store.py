"""The job's store over a connection of our own, for ranks that wait for one in a debugger.

A connection does one thing after the other: where the job waits in the store, a word of ours would wait, too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CONNECT_S = 10.0
_END_S = 2.0
_own: list[tuple[weakref.ref[Any], Any]] = []
"""The job's store, which is the job's to give up, and ours."""


def own(store: Any) -> Any:  # noqa: ANN401 - torch's Store
    """Give a TCPStore of the same contents with a connection of its own, the same each time.

    The store itself is given where torch cannot (before 2.6), where it is no TCPStore, which serves several threads at
    a time, and where its keeper does not answer for 10 s: torch tries for as long as the store's timeout.
    """
    if _own and _own[0][0]() is store:
        return _own[0][1]
    if not hasattr(store, "clone") or not _is_tcp(store):
        return store
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        try:
            made.put(store.clone())
        except RuntimeError:
            made.put(None)

    threading.Thread(target=connect, name="distdiag breakpoint", daemon=True).start()
    try:
        found = made.get(timeout=_CONNECT_S)
    except queue.Empty:
        found = None
    if found is None:
        return store
    _own[:] = [(weakref.ref(store), found)]
    return found


def _is_tcp(store: Any) -> bool:  # noqa: ANN401 - torch's Store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__ == "TCPStore"


class Asked:
    """Asks a store in a thread: torch waits without end for one whose keeper is stopped, whatever the timeout."""

    def __init__(
        self,
        store: Any,  # noqa: ANN401 - torch's Store
        begin: Callable[[Any], object],
        look: Callable[[Any], Any],
        leave: Callable[[Any], object],
    ) -> None:
        """`begin` is called once, `look` for each answer, and `leave` at the end, with the store."""
        self._begin, self._look, self._leave = begin, look, leave
        self._questions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waits = False
        self._thread = threading.Thread(target=self._answer, args=(store,), name="distdiag breakpoint", daemon=True)
        self._thread.start()

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
        """Ask no more; no thread is in torch afterwards, unless the store does not answer."""
        self._questions.put(False)
        self._thread.join(_END_S)

    def _answer(self, store: Any) -> None:  # noqa: ANN401 - torch's Store
        begun = False
        while self._questions.get():
            try:
                if not begun:
                    store = own(store)
                    self._begin(store)
                    begun = True
                self._answers.put(self._look(store))
            except RuntimeError as error:
                self._answers.put(error)
        if begun:
            with contextlib.suppress(RuntimeError):
                self._leave(store)
