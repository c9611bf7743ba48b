"""Lets the ranks of a group wait while one of them is in the debugger.

The rank in the debugger is the holder, the others are waiters. Two keys of the job's store are shared:

    KEY         the holder's Status as JSON: written at each change of its state, and every second with a new `beat`
    KEY/left    number of waiters that have read a final state, or stopped reading

State of the holder: stopped, then released any number of times, at last done or quit. A waiter polls KEY. It continues
when the state is released or done, and raises DebuggerQuit when it is quit; without a beat or an answer of the store
for a minute; and at its timeout. The holder may be the process that serves the store, so at its exit it waits, at most
5 s, until all waiters have left.

No collective is issued: it could not be matched with the job's own, and would not notice the end of a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import threading
import time
from dataclasses import asdict, replace
from datetime import timedelta

from distdiag.facts.process.rank_identity import torch_distributed
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

BEAT_S = 1.0
SILENCE_S = 60.0  # without a beat or an answer of the store until the holder counts as dead
_LEAVE_S, _END_S = 5.0, 2.0
"""Limits on delaying process exit: by waiters still reading, by a thread inside torch."""
_POLL_S = 0.02

STOPPED, RELEASED, DONE, QUIT = "stopped", "released", "done", "quit"
"""In the debugger; in it, with the others released; left it, all continue; left it, all stop."""


class DebuggerQuit(RuntimeError):
    """Raised in the waiters: the rank in the debugger quit, died, or exceeded the timeout."""


@record
class Status:
    """Status published by the holder. `beat` counts seconds; `why`: reason of QUIT, unless the user quit."""

    state: str
    rank: int
    place: str
    host: str
    pid: int
    why: str = ""
    beat: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Holder:
    """Publishes the status of the rank in the debugger, from a thread."""

    def __init__(self, store: Any, key: str, status: Status, waiters: int) -> None:  # noqa: ANN401 - torch's Store
        self._key, self._status, self._waiters, self._leave_by = key, status, waiters, float("inf")
        self._changes: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._is_known = threading.Event()
        self._thread = threading.Thread(target=self._publish, args=(store,), name="distdiag breakpoint", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        self._is_known.wait(_END_S)  # before the prompt: waiters notice the death only of a holder that they know

    def set_state(self, state: str, why: str = "") -> None:
        """Publish a new state; a final state is kept for _END_S so that waiters read it."""
        if os.getpid() == self._status.pid:  # else a child forked in the debugger
            self._changes.put((state, why))
            self._thread.join(_END_S if state in (DONE, QUIT) else 0)

    def _publish(self, job_store: Any) -> None:  # noqa: ANN401 - torch's Store
        # Keeps the store alive if the job drops it: this process may serve it.
        status = self._status
        with contextlib.suppress(RuntimeError):  # store lost: the waiters notice too
            store = _own_connection(job_store)
            while True:
                store.set(self._key, json.dumps(asdict(status)))
                self._is_known.set()
                if status.state in (DONE, QUIT):
                    break
                try:
                    state, why = self._changes.get(timeout=BEAT_S)
                    status = replace(status, state=state, why=why)
                except queue.Empty:
                    status = replace(status, beat=status.beat + 1)
            while store.add(self._key + "/left", 0) < self._waiters and time.monotonic() < self._leave_by:
                time.sleep(5 * _POLL_S)
        self._is_known.set()  # also if the store is lost

    def _end(self) -> None:
        """Leave the debugger at exit; no thread may be inside torch afterwards."""
        self._leave_by = time.monotonic() + _LEAVE_S
        self.set_state(DONE)
        self._thread.join(_LEAVE_S + BEAT_S)


class Waiter:
    """Reads the holder's status in a thread: torch waits forever for a stopped store server."""

    def __init__(self, store: Any, key: str, rank: int, *, pause_s: float, restore: Callable[[], None]) -> None:  # noqa: ANN401 - torch's Store
        """`rank`: the holder's; `pause_s`: between reads; `restore`: called once after the last read."""
        self._key, self._rank, self._pause_s, self._restore = key, rank, pause_s, restore
        self._status: Status | None = None
        self._error: RuntimeError | None = None
        self._alive_at = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(store,), name="distdiag breakpoint", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for RELEASED or DONE; after RELEASED the thread keeps reading.

        Raises:
            DebuggerQuit: the holder quit, died, or did not release in time, or the store is lost.
        """
        deadline, state = time.monotonic() + timeout_s, STOPPED
        try:
            while (state := self._state()) not in (RELEASED, DONE):
                if time.monotonic() > deadline:
                    raise DebuggerQuit(f"{self._waited()} has taken {timeout_s:g} s; this rank stops waiting")
                time.sleep(_POLL_S)
        finally:
            if state != RELEASED:
                self.close()

    def close(self) -> None:
        """Stop reading and restore the timeouts; no thread is in torch afterwards, unless the store does not answer."""
        self._is_over.set()
        self._thread.join(_END_S if self._error is None else 0)
        self._restore()
        atexit.unregister(self.close)

    def _state(self) -> str:
        """Return the holder's latest state, initially STOPPED. Raises DebuggerQuit as `wait` does."""
        status, silent_s = self._status, time.monotonic() - self._alive_at
        if self._error is not None:
            where = "the job's store is gone, and so is the rank or launcher that hosts it"
            raise DebuggerQuit(f"{self._waited()}: {where}: {self._error}")
        if silent_s > SILENCE_S and (status is None or status.state != DONE):
            raise DebuggerQuit(
                f"{self._waited()}: no sign of life for {SILENCE_S:g} s: it, its node or the process that hosts the "
                "job's store is dead or stopped, or its Python is in a call that holds the GIL"
            )
        if status is not None and status.state == QUIT:
            raise DebuggerQuit(f"{status} {status.why or 'quit the debugger'} at {status.place}; this rank stops, too")
        return STOPPED if status is None else status.state

    def _waited(self) -> str:
        at = f"{self._status} to leave the debugger at {self._status.place}" if self._status is not None else ""
        return f"waiting for {at or f'rank {self._rank} to reach its breakpoint'}"

    def _read(self, job_store: Any) -> None:  # noqa: ANN401 - torch's Store
        try:
            store = _own_connection(job_store)
            state = STOPPED
            while state not in (DONE, QUIT) and not self._is_over.is_set():
                status = Status(**json.loads(store.get(self._key))) if store.check([self._key]) else None
                if status is None or status != self._status:
                    self._alive_at, self._status = time.monotonic(), status
                    state = STOPPED if status is None else status.state
                if state == RELEASED:
                    self._state()  # the only check of the holder in this state
                if state not in (DONE, QUIT):
                    self._is_over.wait(self._pause_s)
            store.add(self._key + "/left", 1)
        except DebuggerQuit:
            pass  # this rank has continued: its own timeouts apply again
        except RuntimeError as error:
            self._error = error
        self._restore()


def _own_connection(store: Any) -> Any:  # noqa: ANN401 - torch's Store
    """Return a new connection to a TCPStore: a connection serves one call at a time, and the job may block in its own.

    Before torch 2.6, and for stores that serve several threads at a time, it is the store itself.
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


def raise_timeouts(timeout_s: float) -> Callable[[], None]:
    """Raise the timeouts of all process groups and of the store; return a function that restores them once."""
    wanted = timedelta(seconds=timeout_s)
    before = [(set_timeout, timeout) for timeout, set_timeout in _timeouts() if timeout < wanted]
    for set_timeout, _ in before:
        set_timeout(wanted)

    def restore() -> None:
        while before:
            set_timeout, timeout = before.pop()
            set_timeout(timeout)

    return restore


def _timeouts() -> Iterator[tuple[timedelta, Callable[[timedelta], None]]]:
    """Yield readable and settable timeouts: NCCL's and gloo's backends, and the store of the job."""
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
                yield timeout, backend._set_default_timeout
    store = world.pg_map[dist.group.WORLD][1]
    if hasattr(store, "timeout"):
        yield store.timeout, store.set_timeout
