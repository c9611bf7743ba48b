"""A socket for paramiko, which asks for each packet in two pieces: first for its length."""

from __future__ import annotations

import socket

_BYTES = 65536


class ReadsAhead(socket.socket):
    """Takes from the kernel what is there: half the calls, for each of which paramiko's threads pass on Python's lock.

    Not to be waited for by select() any more once it was read without flags: it may hold what was sent.
    """

    _held = b""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As of any socket."""
        if flags:
            return super().recv(size, flags)
        held = self._held or super().recv(_BYTES)
        self._held = held[size:]
        return held[:size]
