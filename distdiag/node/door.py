"""Answers those of other nodes who try to reach this one."""

from __future__ import annotations

import os
import selectors
import threading
from typing import TYPE_CHECKING

from distdiag.node import handshake
from distdiag.node.probing import MOST_BULK_BYTES, returned

if TYPE_CHECKING:
    import socket

_PIECE_BYTES = 2**18


class _Client:
    """A node that knows the key: sends us as much as it said, then gets its answer."""

    def __init__(self, peer: handshake.Peer, size: int) -> None:
        self.connection = peer.connection
        self.to_return = returned(size)
        self.to_receive = size
        self.unsent = memoryview(b"")


class Server(threading.Thread):
    """Answers probes until it is stopped."""

    def __init__(self, listeners: list[socket.socket], key: str) -> None:
        super().__init__(daemon=True)
        self._acceptor = handshake.Acceptor(listeners, key)
        self._bell, self._ring = os.pipe()
        self._acceptor.selector.register(self._bell, selectors.EVENT_READ, self._bell)
        self._clients: set[_Client] = set()

    def run(self) -> None:
        """Serve."""
        while True:
            peers, ready = self._acceptor.wait()
            if self._bell in ready:
                break
            for client in ready:
                self._attend(client)
            for peer in peers:
                self._welcome(peer)
        for client in list(self._clients):
            self._dismiss(client)
        self._acceptor.close()
        os.close(self._bell)
        os.close(self._ring)

    def stop(self) -> None:
        """End the service, and give the listeners back as they were."""
        os.write(self._ring, b".")
        self.join(2)

    def _welcome(self, peer: handshake.Peer) -> None:
        if peer.number is None or peer.number > MOST_BULK_BYTES:
            peer.connection.close()
            return
        client = _Client(peer, peer.number)
        self._clients.add(client)
        self._acceptor.selector.register(client.connection, selectors.EVENT_READ, client)
        self._answer_if_received(client)

    def _attend(self, client: _Client) -> None:
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
            self._dismiss(client)
        elif client.to_receive > 0:  # whatever comes after it is not counted
            client.to_receive -= len(data)
            self._answer_if_received(client)

    def _answer_if_received(self, client: _Client) -> None:
        if client.to_receive <= 0:
            client.unsent = memoryview(b"got\n" + bytes(client.to_return))
            self._watch(client, selectors.EVENT_WRITE)

    def _watch(self, client: _Client, events: int) -> None:
        self._acceptor.selector.modify(client.connection, events, client)

    def _dismiss(self, client: _Client) -> None:
        self._clients.discard(client)
        self._acceptor.selector.unregister(client.connection)
        client.connection.close()
