"""Where agents that somebody else started (srun, mpirun, torchrun) connect to us and prove that they belong to us."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distdiag.cluster.links import SocketLink
from distdiag.node import call_home, network, rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

_LINE_BYTES = 4096
_MAX_GUESTS = 4096


@dataclass
class _Guest:
    heard: bytes = b""
    who: dict[str, Any] | None = None
    """Who it is, once it has proved itself; it may still have chosen another way to us."""


class Hub(threading.Thread):
    """Listens, and calls `joined(who, link)` for everyone who proves to belong to this run."""

    joined: Callable[[dict[str, Any], SocketLink], None]
    """To be set before it is started."""

    def __init__(self, nonce: str, *, port: int = 0) -> None:
        """Listen on `port`, any free one if 0. Raises OSError."""
        super().__init__(daemon=True)
        self._nonce = nonce
        self._listener = rendezvous.listen(port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._bell, self._ring = os.pipe()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: dict[socket.socket, _Guest] = {}

    @staticmethod
    def addresses() -> list[str]:
        """List the addresses at which nodes may find us, the likely ones first; loopback last, for one machine."""
        usable = [one for one in network.interfaces() if one.up and not one.loopback]
        usable.sort(key=lambda one: (one.virtual, not one.default_route))
        return [*(entry.partition("/")[0] for one in usable for entry in one.addresses), "127.0.0.1"]

    def run(self) -> None:
        """Serve until `close`."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._bell:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._listen_to(key.fileobj)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop listening; links that were handed out live on."""
        os.write(self._ring, b".")
        if self.is_alive():
            self.join(2)
        for guest in self._guests:
            guest.close()
        self._selector.close()
        self._listener.close()
        os.close(self._bell)
        os.close(self._ring)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            guest, _ = self._listener.accept()
            if len(self._guests) >= _MAX_GUESTS:
                guest.close()
                return
            guest.setblocking(False)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._guests[guest] = _Guest()
            self._selector.register(guest, selectors.EVENT_READ)

    def _listen_to(self, guest: socket.socket) -> None:
        try:
            # Not a byte more than the greeting: what follows is for the link.
            proved = self._guests[guest].who is not None
            data = guest.recv(len(call_home.IN) if proved else _LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller = self._guests[guest]
        caller.heard += data
        line, end, rest = caller.heard.partition(b"\n")
        if not data or (not end and len(caller.heard) >= _LINE_BYTES):
            self._forget(guest).close()
        elif end and caller.who is None:
            caller.heard = rest
            self._judge(guest, line)
        elif end and caller.who is not None:
            self._forget(guest)
            self.joined(caller.who, SocketLink(guest))

    def _judge(self, guest: socket.socket, line: bytes) -> None:
        answer = call_home.welcome(line, self._nonce)
        if answer is None:
            self._forget(guest).close()
            return
        self._guests[guest].who, proof = answer
        try:
            guest.sendall(proof)
        except OSError:
            self._forget(guest).close()

    def _forget(self, guest: socket.socket) -> socket.socket:
        del self._guests[guest]
        self._selector.unregister(guest)
        return guest
