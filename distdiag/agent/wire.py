"""Framed messages from a node to the parent, over pipes that may also carry other output.

A message (distdiag/agent/protocol.py) is a line: a mark, then its JSON. Any other output (a greeting from a login
script, a library's warning) is noise: kept for the report of a failure, never parsed.
"""

from __future__ import annotations

import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.agent.protocol import Message

MARK = b"\x1eDD1 "
MAX_LINE_BYTES = 32 * 2**20
MAX_NOISE_BYTES = 64 * 2**10


class Writer:
    """Writes messages to a file descriptor, whole lines only."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    @classmethod
    def take_stdout(cls) -> Writer:
        """Reserve stdout for records: any other output is redirected to stderr."""
        own = os.dup(1)
        os.dup2(2, 1)
        return cls(own)

    def send(self, message: Message) -> None:
        """Write one message. Raises BrokenPipeError if the parent exited."""
        with self._lock:
            self._write(message)

    def send_if_free(self, message: Message) -> None:
        """Write a message, unless another is just being written, which proves as much."""
        if self._lock.acquire(blocking=False):
            try:
                self._write(message)
            finally:
                self._lock.release()

    def _write(self, message: Message) -> None:
        line = MARK + message.to_json() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]


class TooLong(Exception):
    """A record exceeds MAX_LINE_BYTES."""


class Reader:
    """Splits a byte stream into records, not yet decoded; keeps the end of all other output as noise."""

    def __init__(self) -> None:
        self.noise = b""
        self._rest = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes; yield the JSON of each record that they complete. Raises TooLong."""
        first, *others = data.split(b"\n")
        self._rest += first  # in place: a line without an end may grow long
        for line in self._completed(others):
            if self._skipping:
                self._skipping = False
                continue
            _, mark, text = line.partition(MARK)
            if mark:
                yield text
            else:
                self._keep(line + b"\n")
        if len(self._rest) > MAX_NOISE_BYTES and (self._skipping or self._rest.find(MARK, 0, MAX_NOISE_BYTES) < 0):
            if not self._skipping:
                self._keep(bytes(self._rest[:200]) + b"... (a line of over 64 KiB, dropped)\n")
            self._rest.clear()
            self._skipping = True
        elif len(self._rest) > MAX_LINE_BYTES:
            raise TooLong

    def _completed(self, others: list[bytes]) -> Iterator[bytes]:
        for start in others:
            yield bytes(self._rest)
            self._rest[:] = start

    def _keep(self, noise: bytes) -> None:
        self.noise = (self.noise + noise)[-MAX_NOISE_BYTES:]
