"""Non-blocking byte streams to a program on a host; unsent data is queued."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from distdiag.facts import programs
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_UNSENT_BYTES = 64 * 2**20
UNKNOWN_SIGNAL = -1
"""Exit status of a program killed by an unknown signal."""


@record(slots=True)
class Received:
    """The data since the last read; `ended`: end of file."""

    out: bytes
    err: bytes
    ended: bool


class Link(ABC):
    """A two-way stream to a program started on a host."""

    loaded = False
    """Whether the program already has its payload (sent with the command)."""
    pid: int | None = None
    """Process id of the far side, if on this machine."""

    def __init__(self) -> None:
        self.settled = threading.Event()
        """Set on the first read or drop."""
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._closing = False

    @property
    def has_unsent(self) -> bool:
        """Whether queued data can still be sent."""
        return bool(self._unsent) and not self._closing

    @abstractmethod
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors to poll for reading."""

    @abstractmethod
    def read(self) -> Received:
        """Return the available data."""

    @abstractmethod
    def how_it_ended(self) -> tuple[int | None, str]:
        """Return, after the end, the exit status (negative: signal; None: unknown) and the reason as text."""

    @abstractmethod
    def finish(self) -> None:
        """Close the far side's input, which ends the agent."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether the far side has ended."""

    @abstractmethod
    def kill(self) -> None:
        """Drop the connection, and kill its processes on this machine."""

    def hang_up(self) -> None:  # noqa: B027 - only ssh can
        """Hang up a login that never started our program, like a closing terminal."""

    @abstractmethod
    def _send(self, data: bytes) -> int:
        """Send without blocking; return the number of bytes sent."""

    def write(self, data: bytes) -> None:
        """Send or queue data. A broken connection shows up on the next read."""
        with self._lock:
            if not self._closing and len(self._unsent) < MAX_UNSENT_BYTES:
                self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send queued data."""
        with self._lock:
            while self._unsent and not self._closing:
                try:
                    count = self._send(bytes(self._unsent[:65536]))
                except (BlockingIOError, TimeoutError):
                    return
                except (OSError, EOFError):
                    self._unsent.clear()
                    return
                del self._unsent[:count]

    def beat(self) -> None:
        """Send a sign of life: an empty line is no order."""
        if not self._unsent:
            self.write(b"\n")


class ProcessLink(Link):
    """A program on this machine: the far side, or a tool that leads to it (ssh, srun, kubectl exec)."""

    def __init__(self, process: programs.Process[bytes] | programs.Adopted) -> None:
        """Take over a process returned by `run.start`."""
        super().__init__()
        self.process = process
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._open = {1: self.process.stdout, 2: self.process.stderr}

    def fds(self) -> tuple[int, ...]:
        return tuple(stream.fileno() for stream in self._open.values() if stream is not None)

    def read(self) -> Received:
        out, err = self._take(1), self._take(2)
        self.settled.set()
        # Child programs may keep stderr open forever: only stdout decides.
        return Received(out, err, 1 not in self._open)

    def how_it_ended(self) -> tuple[int | None, str]:
        programs.wait(self.process, 0.5)
        status = programs.end_group(self.process)
        if status is None:
            return None, "and cannot be killed"
        if status < 0:
            return status, f"by {programs.signal_name(-status)}"
        return status, f"with status {status}"

    def finish(self) -> None:
        with self._lock:
            self._closing = True
            if self.process.stdin is not None and not self.process.stdin.closed:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        self.finish()
        self.settled.set()
        programs.end_group(self.process)

    def _take(self, number: int) -> bytes:
        stream = self._open.get(number)
        if stream is None:
            return b""
        try:
            data = os.read(stream.fileno(), 2**18)
        except BlockingIOError:
            return b""
        except (OSError, ValueError):
            data = b""
        if not data:
            del self._open[number]
        return data

    def _send(self, data: bytes) -> int:
        assert self.process.stdin is not None
        return os.write(self.process.stdin.fileno(), data)


class SocketLink(Link):
    """An agent started by others, connected back to us."""

    loaded = True

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        connection.setblocking(False)
        self._connection = connection
        self._ended = False

    def fds(self) -> tuple[int, ...]:
        return () if self._ended else (self._connection.fileno(),)

    def read(self) -> Received:
        try:
            data = self._connection.recv(2**18)
        except BlockingIOError:
            return Received(b"", b"", False)
        except OSError:
            data = b""
        self._ended = self._ended or not data
        return Received(data, b"", self._ended)

    def how_it_ended(self) -> tuple[int | None, str]:
        return None, "because its connection was closed"

    def finish(self) -> None:
        with self._lock:
            self._closing = True
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)

    def has_ended(self) -> bool:
        if not self._ended:
            self.read()
        return self._ended

    def kill(self) -> None:
        self._closing = True
        self._ended = True
        self._connection.close()

    def _send(self, data: bytes) -> int:
        return self._connection.send(data)


def close_all(links: Sequence[Link], goodbye_s: float) -> None:
    """End all far sides at once, wait briefly, then drop the remaining ones."""
    for link in links:
        link.finish()
    deadline = time.monotonic() + goodbye_s
    left = [link for link in links if not link.has_ended()]
    pause_s = 0.001  # most end at once
    while left and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
        left = [link for link in left if not link.has_ended()]
    for link in links:
        link.kill()
