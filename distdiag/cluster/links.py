"""Byte streams to a program on a host. Nothing here blocks: what cannot be sent now is kept and sent later."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.facts import programs

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_UNSENT_BYTES = 64 * 2**20
UNKNOWN_SIGNAL = -1
"""Exit status of a program that an unknown signal ended."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What came since the last read; `ended`: no more will come."""

    out: bytes
    err: bytes
    ended: bool


class Link(ABC):
    """A two-way stream to a program that was started on a host."""

    loaded = False
    """Whether the program already has its payload (it was sent along with the command)."""
    pid: int | None = None
    """Process id of the far side, where it is on this machine."""

    def __init__(self) -> None:
        self.settled = threading.Event()
        """Set when there was something to hear, or it was dropped."""
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._closing = False

    @property
    def has_unsent(self) -> bool:
        """Whether something was kept for `flush`, which may still go."""
        return bool(self._unsent) and not self._closing

    @abstractmethod
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors that become readable when there is something to read."""

    @abstractmethod
    def read(self) -> Heard:
        """Take what is there now."""

    @abstractmethod
    def how_it_ended(self) -> tuple[int | None, str]:
        """After the end: exit status (negative: signal; None: unknown), and what ended it in words."""

    @abstractmethod
    def finish(self) -> None:
        """End the far side's input: distdiag's node side takes that as its end."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether the far side is gone."""

    @abstractmethod
    def kill(self) -> None:
        """Drop the connection, and end what on this machine belongs to it."""

    def hang_up(self) -> None:  # noqa: B027 - only ssh can
        """Signal a login that never came to our program to end, as a terminal that closes does."""

    @abstractmethod
    def _send(self, data: bytes) -> int:
        """Send what goes without waiting; the number of bytes."""

    def write(self, data: bytes) -> None:
        """Send, or keep for `flush`. A far side that is gone is noticed when reading."""
        with self._lock:
            if not self._closing and len(self._unsent) < MAX_UNSENT_BYTES:
                self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send more of what was kept."""
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
        """Let the far side know that we live; an empty line is no order."""
        if not self._unsent:
            self.write(b"\n")


class ProcessLink(Link):
    """A program started on this machine that is the far side, or leads to it (ssh, srun, kubectl exec)."""

    def __init__(self, process: programs.Process[bytes] | programs.Adopted) -> None:
        """Take over what `run.start` gave."""
        super().__init__()
        self.process = process
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._open = {1: self.process.stdout, 2: self.process.stderr}

    def fds(self) -> tuple[int, ...]:
        return tuple(stream.fileno() for stream in self._open.values() if stream is not None)

    def read(self) -> Heard:
        out, err = self._take(1), self._take(2)
        self.settled.set()
        # Programs below may keep stderr open for ever: stdout alone decides.
        return Heard(out, err, 1 not in self._open)

    def how_it_ended(self) -> tuple[int | None, str]:
        _wait(self.process, 0.5)
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
    """An agent that was started by somebody else and has connected to us."""

    loaded = True

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        connection.setblocking(False)
        self._connection = connection
        self._ended = False

    def fds(self) -> tuple[int, ...]:
        return () if self._ended else (self._connection.fileno(),)

    def read(self) -> Heard:
        try:
            data = self._connection.recv(2**18)
        except BlockingIOError:
            return Heard(b"", b"", False)
        except OSError:
            data = b""
        self._ended = self._ended or not data
        return Heard(data, b"", self._ended)

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
    """End all far sides at once, give them a moment to end in peace, then drop what is left."""
    for link in links:
        link.finish()
    deadline = time.monotonic() + goodbye_s
    left = [link for link in links if not link.has_ended()]
    pause_s = 0.001  # most are gone at once
    while left and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
        left = [link for link in left if not link.has_ended()]
    for link in links:
        link.kill()


def _wait(process: programs.Process[bytes] | programs.Adopted, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
