"""What a breakpoint needs of torch.distributed: the job's store over a connection of its own, and raised timeouts."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from datetime import timedelta

from distdiag.facts.rank_identity import torch_distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_END_S = 2.0


def own_connection(store: Any) -> Any:  # noqa: ANN401 - torch's Store
    """Return the same TCPStore by a new connection: one does a thing after the other, and the job may wait in its own.

    Where torch cannot (before 2.6), and for stores that serve several threads at a time, it is the store itself.
    """
    innermost = store
    while hasattr(innermost, "underlying_store"):
        innermost = innermost.underlying_store
    if type(innermost).__name__ != "TCPStore" or not hasattr(store, "clone"):
        return store
    try:
        return store.clone()
    except RuntimeError:
        return store


class StoreClient:
    """Calls functions with the store in a daemon thread: torch waits without end for a server that is stopped."""

    def __init__(self, store: Any) -> None:  # noqa: ANN401 - torch's Store
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(store,), name="distdiag breakpoint", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[Any], Any]) -> Future[Any]:
        """Call `function(store)` after the calls before it; RuntimeError, if the store is gone, is the result."""
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future

    def close(self) -> None:
        """Call no more; no thread is in torch afterwards, unless the store does not answer."""
        self._calls.put(None)
        self._thread.join(_END_S)

    def _serve(self, store: Any) -> None:  # noqa: ANN401 - torch's Store
        store = own_connection(store)
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                future.set_result(function(store))
            except RuntimeError as error:
                future.set_exception(error)


class RaisedTimeouts:
    """Timeouts of all process groups and of the store, raised; the last of several to restore puts the first back."""

    _lock = threading.Lock()
    _raised = 0
    _before: dict[int, tuple[Callable[[timedelta], None], timedelta]] = {}  # noqa: RUF012 - of the process
    """How to set a timeout, and what it was, by the id of its backend or store, which the method keeps alive."""

    def __init__(self, timeout_s: float) -> None:
        """Raise to `timeout_s` seconds what is less."""
        self._is_restored = False
        wanted = timedelta(seconds=timeout_s)
        with self._lock:
            RaisedTimeouts._raised += 1
            for owner, timeout, set_timeout in _timeouts():
                if timeout < wanted:
                    self._before.setdefault(id(owner), (set_timeout, timeout))
                    set_timeout(wanted)

    def restore(self) -> None:
        """Put back what was there, if nobody else has raised it; once."""
        with self._lock:
            if self._is_restored:
                return
            self._is_restored = True
            RaisedTimeouts._raised -= 1
            if RaisedTimeouts._raised == 0:
                for set_timeout, timeout in self._before.values():
                    set_timeout(timeout)
                self._before.clear()


def _timeouts() -> Iterator[tuple[Any, timedelta, Callable[[timedelta], None]]]:
    """List what has a timeout that can be read and set: NCCL's and gloo's backends, and the store of the job."""
    dist = torch_distributed()
    if dist is None:
        return
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        for device in group._device_types:
            backend = group._get_backend(device)
            # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a backend that checks arguments around the real one.
            backend = getattr(backend, "wrapped_pg", backend)
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)
            if timeout is not None and hasattr(backend, "_set_default_timeout"):
                yield backend, timeout, backend._set_default_timeout
    store = world.pg_map[dist.group.WORLD][1]
    if hasattr(store, "timeout"):
        yield store, store.timeout, store.set_timeout
