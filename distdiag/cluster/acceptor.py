"""Listener for agents started by others (srun, mpirun, torchrun), which connect back and authenticate."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from typing import TYPE_CHECKING

from distdiag.agent import connect_back, handshake, rendezvous
from distdiag.cluster.links import SocketLink
from distdiag.facts.network import interfaces as network

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Caller:
    """An authenticated agent, which may still choose another of our addresses."""

    def __init__(self, peer: handshake.Peer, who: Mapping[str, object]) -> None:
        self.connection, self.who, self.heard = peer.connection, who, b""


class Acceptor(threading.Thread):
    """Listens, and calls `joined(who, link)` for each peer that proves to belong to this run."""

    joined: Callable[[Mapping[str, object], SocketLink], None]
    """Set before the thread starts."""

    def __init__(self, key: str, *, port: int = 0) -> None:
        """Listen on `port`, any free one if 0. Raises OSError."""
        super().__init__(daemon=True)
        self._listener = rendezvous.listen(port)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = handshake.Acceptor([self._listener], key)
        self._bell, self._ring = os.pipe()
        self._acceptor.selector.register(self._bell, selectors.EVENT_READ, self._bell)
        self._callers: set[_Caller] = set()

    @staticmethod
    def addresses() -> list[str]:
        """List the addresses for nodes to try, likely ones first; loopback last, for a single machine."""
        usable = [nic for nic in network.interfaces() if nic.up and not nic.loopback]
        usable.sort(key=lambda nic: (nic.virtual, not nic.default_route))
        return [*(entry.partition("/")[0] for nic in usable for entry in nic.addresses), "127.0.0.1"]

    def run(self) -> None:
        """Serve until `close`."""
        while True:
            peers, ready = self._acceptor.wait()
            if self._bell in ready:
                return
            for caller in ready:
                self._receive(caller)
            for peer in peers:
                self._welcome(peer)

    def close(self) -> None:
        """Stop listening; links already handed out stay open."""
        os.write(self._ring, b".")
        if self.is_alive():
            self.join(2)
        for caller in self._callers:
            caller.connection.close()
        self._acceptor.close()
        self._listener.close()
        os.close(self._bell)
        os.close(self._ring)

    def _welcome(self, peer: handshake.Peer) -> None:
        try:
            who = json.loads(peer.words)
        except (ValueError, RecursionError):
            who = None
        if not isinstance(who, dict):
            peer.connection.close()
            return
        peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = _Caller(peer, who)
        self._callers.add(caller)
        self._acceptor.selector.register(caller.connection, selectors.EVENT_READ, caller)

    def _receive(self, caller: _Caller) -> None:
        try:
            # Read no more than the word that selects this connection: the rest belongs to the link.
            data = caller.connection.recv(len(connect_back.IN) - len(caller.heard))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.heard += data
        if data and len(caller.heard) < len(connect_back.IN):
            return
        self._callers.discard(caller)
        self._acceptor.selector.unregister(caller.connection)
        if caller.heard == connect_back.IN:
            self.joined(caller.who, SocketLink(caller.connection))
        else:
            caller.connection.close()
