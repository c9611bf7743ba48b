"""Answers those of other nodes who try to reach this one."""

from __future__ import annotations

import dataclasses
import hmac
import os
import selectors
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.node.probing import MOST_BULK_BYTES, proof, returned

if TYPE_CHECKING:
    import socket

_GREETING_BYTES = 256


@dataclass
class _Guest:
    connection: socket.socket
    heard: bytes = b""
    to_receive: int = -1
    to_return: int = 0
    unsent: memoryview = dataclasses.field(default_factory=lambda: memoryview(b""))


class Server(threading.Thread):
    """Answers probes until it is stopped."""

    def __init__(self, listeners: list[socket.socket], nonce: str) -> None:
        super().__init__(daemon=True)
        self._nonce = nonce
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        self._bell, self._ring = os.pipe()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._bell:
                    self._close()
                    return
                if key.data is None:
                    self._welcome(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._attend(key.data)

    def stop(self) -> None:
        """End the service, and give the listeners back as they were."""
        os.write(self._ring, b".")
        self.join(2)

    def _welcome(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Guest(connection))

    def _attend(self, guest: _Guest) -> None:
        try:
            if guest.unsent:
                guest.unsent = guest.unsent[guest.connection.send(guest.unsent[: 2**18]) :]
            else:
                self._hear(guest, guest.connection.recv(65536))
        except BlockingIOError:
            return
        except OSError:
            self._dismiss(guest)
            return
        if guest.connection.fileno() >= 0:
            events = selectors.EVENT_WRITE if guest.unsent else selectors.EVENT_READ
            self._selector.modify(guest.connection, events, guest)

    def _hear(self, guest: _Guest, data: bytes) -> None:
        if not data:
            self._dismiss(guest)
        elif guest.to_receive < 0:
            self._greet(guest, data)
        else:
            guest.to_receive -= len(data)
        if guest.to_receive == 0:
            guest.to_receive = 2**62  # whatever comes now is not counted
            guest.unsent = memoryview(b"".join((guest.unsent, b"got\n", bytes(guest.to_return))))

    def _greet(self, guest: _Guest, data: bytes) -> None:
        guest.heard += data
        line, end, rest = guest.heard.partition(b"\n")
        if not end and len(guest.heard) < _GREETING_BYTES:
            return
        said, _, size = line.rpartition(b" ")
        known = hmac.compare_digest(said, b"probe %s" % proof(self._nonce, "probe"))
        if not known or not size.isdigit() or int(size) > MOST_BULK_BYTES:
            self._dismiss(guest)
            return
        guest.unsent = memoryview(b"here %s\n" % proof(self._nonce, "here"))
        guest.to_return = returned(int(size))
        guest.to_receive = int(size) - len(rest)

    def _dismiss(self, guest: _Guest) -> None:
        self._selector.unregister(guest.connection)
        guest.connection.close()

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._dismiss(key.data)
        self._selector.close()
        for listener in self._listeners:
            listener.setblocking(True)
        os.close(self._bell)
        os.close(self._ring)
