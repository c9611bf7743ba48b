"""Lets the ranks of a group wait while one of them is in the debugger.

The rank in the debugger is the holder, the others are waiters. They share three keys of the job's store:

    KEY           the holder's Status as JSON: written at each change of its state, and every second with a new `beat`
    KEY/arrived   how many waiters have begun to read KEY
    KEY/left      how many waiters have read a final state, or stopped reading

State of the holder: stopped, then released any number of times, at last done or quit. A waiter polls KEY. It goes on
when the state is released or done, and raises DebuggerQuit when it is quit; when the holder is dead, as /proc shows
on the same machine and the missing beat shows elsewhere; when the store does not answer; and when its time is up. The
holder may be the process that serves the store. So after its final state it waits, at most 5 s, until all waiters that
have arrived have left, and at its end for those too that still have to arrive.

No collective is issued: one could not be matched with what is under way, and would not notice the end of a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import threading
import time
from dataclasses import asdict, dataclass, replace

from distdiag.facts import machine, procs
from distdiag.training.breakpoint.store_client import StoreClient, own_connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Any

    from distdiag.training.breakpoint.store_client import RaisedTimeouts

BEAT_S = 1.0
SILENCE_S = 10.0
"""After how many seconds without a beat a holder on another node is taken for dead, or the store without an answer."""
ACKNOWLEDGED_S = 5.0
"""How long a final state keeps the holder at most."""
_POLL_S, _LONGEST_POLL_S = 0.02, 1.0

STOPPED, RELEASED, DONE, QUIT = "stopped", "released", "done", "quit"
"""In the debugger; in it, but the others may go on; out of it, and all go on; out of it, and all are to stop."""


class DebuggerQuit(RuntimeError):
    """What the waiters raise: the rank in the debugger quit, died, or was waited for too long."""


@dataclass(frozen=True)
class Status:
    """What the holder publishes. `beat` counts seconds, `started` the clock ticks from boot to the start of `pid`.

    `pid_space`: see `_pid_space`. `why`: what it quit for, if nobody quit it.
    """

    state: str
    rank: int
    place: str
    host: str
    pid_space: str
    pid: int
    started: int
    why: str = ""
    beat: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def own_status(rank: int, place: str) -> Status:
    """Return the status of this process when it comes to its breakpoint at `place`."""
    proc = procs.read(os.getpid())
    started = 0 if proc is None else proc.started
    return Status(STOPPED, rank, place, machine.host_name(), _pid_space(), os.getpid(), started)


class Holder:
    """Publishes the status of the rank in the debugger, from a thread."""

    _leave_by = float("inf")
    """When this process, which is ending, waits for no waiter any longer."""

    def __init__(self, store: Any, key: str, status: Status, waiters: int) -> None:  # noqa: ANN401 - torch's Store
        self._key, self._status, self._waiters = key, status, waiters
        self._changes: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._is_acknowledged = threading.Event()
        self._thread = threading.Thread(target=self._publish, args=(store,), name="distdiag breakpoint", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def set_state(self, state: str, why: str = "") -> None:
        """Publish a new state; after the first final one nothing is published any more."""
        if os.getpid() != self._status.pid:  # a child that was forked in the debugger
            return
        self._changes.put((state, why))
        if state in (DONE, QUIT):
            self._is_acknowledged.wait(ACKNOWLEDGED_S)

    def _publish(self, job_store: Any) -> None:  # noqa: ANN401 - torch's Store
        # The job may give up its store, which this process may serve: this reference keeps it.
        status = self._status
        with contextlib.suppress(RuntimeError):  # with the store, what the waiters read is gone, and they notice that
            store = own_connection(job_store)
            while True:
                store.set(self._key, json.dumps(asdict(status)))
                if status.state in (DONE, QUIT):
                    break
                try:
                    state, why = self._changes.get(timeout=BEAT_S)
                    status = replace(status, state=state, why=why)
                except queue.Empty:
                    status = replace(status, beat=status.beat + 1)
            self._until_all_left(store)
        self._is_acknowledged.set()
        atexit.unregister(self._end)

    def _until_all_left(self, store: Any) -> None:  # noqa: ANN401 - torch's Store
        arrived, pause_s = store.add(_arrived(self._key), 0), _POLL_S
        while (left := store.add(_left(self._key), 0)) < self._waiters and time.monotonic() < Holder._leave_by:
            if left >= arrived:
                self._is_acknowledged.set()
                pause_s = min(2 * pause_s, _LONGEST_POLL_S)
            time.sleep(pause_s)

    def _end(self) -> None:
        """Leave the debugger with the end of the program; and no thread may be in torch by then."""
        if os.getpid() == self._status.pid:
            self.set_state(DONE)
            # One time for all holders of this process.
            Holder._leave_by = min(Holder._leave_by, time.monotonic() + ACKNOWLEDGED_S)
            self._thread.join(max(0, Holder._leave_by - time.monotonic()) + _LONGEST_POLL_S)


class Waiter:
    """Reads the status of the holder."""

    def __init__(self, store: Any, key: str, rank: int) -> None:  # noqa: ANN401 - torch's Store
        """`rank`: that of the holder."""
        self._key, self._rank = key, rank
        self._status: Status | None = None
        self._changed_at = time.monotonic()
        self._has_left = False
        self._reply: Future[Status | None] | None = None
        self._client = StoreClient(store)
        self._client.submit(lambda own_store: own_store.add(_arrived(key), 1))

    def wait(self, timeout_s: float, pause_s: float) -> Status:
        """Poll every `pause_s` seconds, for at most `timeout_s`, until this rank may go on; returns the status by then.

        Raises:
            DebuggerQuit: the holder quit, is dead, was not out of the debugger in time, or the store is gone.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.read()
            if status is not None and status.state in (RELEASED, DONE):
                return status
            if time.monotonic() > deadline:
                late = f"rank {self._rank} has not reached its breakpoint"
                if status is not None:
                    late = f"{status} is still in the debugger at {status.place}"
                raise DebuggerQuit(f"{late} after {timeout_s:g} s; this rank stops waiting")
            time.sleep(pause_s)

    def read(self) -> Status | None:
        """Read the newest status, None as long as there is none. Raises DebuggerQuit as `wait` does."""
        waited = f"waiting for {self._status or f'rank {self._rank}'} to leave the debugger: the job's store"
        try:
            status = self._newest()
        except RuntimeError as error:
            raise DebuggerQuit(f"{waited} is gone, and so is the rank or launcher that hosts it: {error}") from None
        except TimeoutError:
            # A holder that is seen may serve the store and be stopped, by the person who debugs it.
            if self._status is None or not _is_seen(self._status):
                raise DebuggerQuit(
                    f"{waited} has not responded for {SILENCE_S:g} s: the rank or launcher that hosts it, or its "
                    "node, is dead or stopped"
                ) from None
            status = self._status
        if status is None:
            return None
        if status != self._status:
            self._status, self._changed_at = status, time.monotonic()
        if status.state == QUIT:
            why = status.why or "quit the debugger"
            raise DebuggerQuit(f"{status} {why} at {status.place}; this rank stops, too")
        self._check_alive(status)
        return status

    def close(self) -> None:
        """Read no more."""
        self._client.submit(self._leave)
        self._client.close()

    def restore_later(self, timeouts: RaisedTimeouts, timeout_s: float) -> None:
        """Restore the timeouts of this rank, which was released, when the holder is out of the debugger, and close."""
        is_ending, deadline = threading.Event(), time.monotonic() + timeout_s

        def watch() -> None:
            try:
                while time.monotonic() < deadline and not is_ending.wait(BEAT_S):
                    status = self.read()
                    if status is None or status.state == DONE:
                        break
            except DebuggerQuit:
                pass  # this rank is on its way again: with its own timeouts it ends as it would without a debugger
            finally:
                timeouts.restore()
                self.close()
                atexit.unregister(end)

        def end() -> None:
            is_ending.set()
            thread.join(2)

        thread = threading.Thread(target=watch, name="distdiag breakpoint", daemon=True)
        atexit.register(end)
        thread.start()

    def _newest(self) -> Status | None:
        """Ask the store; after a TimeoutError the next call waits for the same reply. Raises RuntimeError, too."""
        if self._reply is None:
            self._reply = self._client.submit(self._fetch)
        status = self._reply.result(SILENCE_S)
        self._reply = None
        return status

    def _fetch(self, store: Any) -> Status | None:  # noqa: ANN401 - torch's Store
        if not store.check([self._key]):
            return None
        status = Status(**json.loads(store.get(self._key)))
        if status.state in (DONE, QUIT):
            self._leave(store)
        return status

    def _leave(self, store: Any) -> None:  # noqa: ANN401 - torch's Store
        if not self._has_left:
            self._has_left = True
            store.add(_left(self._key), 1)

    def _check_alive(self, status: Status) -> None:
        if status.state == DONE:
            return
        if _is_seen(status):
            proc = procs.read(status.pid)
            if proc is None or proc.started != status.started or proc.state in "ZX":
                raise DebuggerQuit(f"{status} died in the debugger at {status.place}")
        elif time.monotonic() - self._changed_at > SILENCE_S:
            raise DebuggerQuit(
                f"no sign of life from {status} for {SILENCE_S:g} s, in the debugger at {status.place}: the "
                "process or its node is dead or stopped, or its Python is in a call that holds the GIL"
            )


def _arrived(key: str) -> str:
    return f"{key}/arrived"


def _left(key: str) -> str:
    return f"{key}/left"


def _is_seen(status: Status) -> bool:
    return bool(status.pid_space) and status.pid_space == _pid_space()


def _pid_space() -> str:
    """Name the space of process ids of this process: two that name the same see each other in /proc. Empty without."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
