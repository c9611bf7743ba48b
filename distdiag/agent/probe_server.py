"""Answers the probes of other nodes (tcp_probe.py), as `iperf -s` does for iperf."""

from __future__ import annotations

import os
import selectors
import threading
from typing import TYPE_CHECKING

from distdiag.agent import handshake

if TYPE_CHECKING:
    import socket

BULK_BYTES = 64 * 2**10
"""Default size of a probe's data."""
MOST_BULK_BYTES = 16 * 2**20
_PIECE_BYTES = 2**18


def returned(size: int) -> int:
    """Return how many bytes to send back: full packets, as the reverse path is tested with them."""
    return min(size, BULK_BYTES)


class _Client:
    """An authenticated node: it sends the announced number of bytes, then gets its answer."""

    def __init__(self, peer: handshake.Peer, size: int) -> None:
        self.connection = peer.connection
        self.to_return = returned(size)
        self.to_receive = size
        self.unsent = memoryview(b"")


class ProbeServer(threading.Thread):
    """Answers probes until it is stopped."""

    def __init__(self, listeners: list[socket.socket], key: str) -> None:
        super().__init__(daemon=True)
        self._acceptor = handshake.Acceptor(listeners, key)
        self._wake, self._waker = os.pipe()
        self._acceptor.selector.register(self._wake, selectors.EVENT_READ, self._wake)
        self._clients: set[_Client] = set()

    def run(self) -> None:
        """Serve."""
        while True:
            peers, ready = self._acceptor.wait()
            if self._wake in ready:
                break
            for client in ready:
                self._serve(client)
            for peer in peers:
                self._add(peer)
        for client in list(self._clients):
            self._drop(client)
        self._acceptor.close()
        os.close(self._wake)
        os.close(self._waker)

    def stop(self) -> None:
        """End the service; the listeners stay open."""
        os.write(self._waker, b".")
        self.join(2)

    def _add(self, peer: handshake.Peer) -> None:
        if peer.number is None or peer.number > MOST_BULK_BYTES:
            peer.connection.close()
            return
        client = _Client(peer, peer.number)
        self._clients.add(client)
        self._acceptor.selector.register(client.connection, selectors.EVENT_READ, client)
        self._answer_if_received(client)

    def _serve(self, client: _Client) -> None:
        try:
            if client.unsent:
                client.unsent = client.unsent[client.connection.send(client.unsent[:_PIECE_BYTES]) :]
                if not client.unsent:
                    self._watch(client, selectors.EVENT_READ)
                return
            data = client.connection.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
        elif client.to_receive > 0:  # surplus data is ignored
            client.to_receive -= len(data)
            self._answer_if_received(client)

    def _answer_if_received(self, client: _Client) -> None:
        if client.to_receive <= 0:
            client.unsent = memoryview(b"got\n" + bytes(client.to_return))
            self._watch(client, selectors.EVENT_WRITE)

    def _watch(self, client: _Client, events: int) -> None:
        self._acceptor.selector.modify(client.connection, events, client)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._acceptor.selector.unregister(client.connection)
        client.connection.close()
