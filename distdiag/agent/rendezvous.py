"""Verifies that the rendezvous address belongs to rank 0 of this run; torch does not.

Torch's store client waits forever on a port where another program listens. So rank 0 and the others authenticate with
the run's key over the very socket that torch will listen on; any other program is a stranger, and its answer is quoted.
"""

from __future__ import annotations

import socket
import time

from distdiag.agent import handshake
from distdiag.facts.text import first_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_QUOTED_BYTES = 256
_RETRY_S = 0.05
_GO = b"go\n"


class ForeignServer(Exception):
    """Another program than rank 0 of this run answers at the address; `said`: the start of its answer, printable."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said


def listen(port: int) -> socket.socket:
    """Listen on every address as torch's store does, on a dual-stack socket if IPv6 is available.

    Raises:
        OSError: EADDRINUSE, or EACCES for a port below 1024.
    """
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
        except OSError as error:
            if error.errno in (98, 48, 13):  # taken (Linux, macOS) or not allowed: IPv4 would not be better
                raise
    return socket.create_server(("", port), backlog=2048)


def receive(listener: socket.socket, key: str, world_size: int) -> None:
    """As rank 0, wait until every other rank is authenticated, then release them all.

    No timeout: the caller has the deadline. Strangers are dropped.
    """
    connected: dict[int, socket.socket] = {}
    # The connections of all ranks may still be pending when strangers connect.
    acceptor = handshake.Acceptor([listener], key, most=max(handshake.MOST_UNPROVEN, 2 * world_size))
    try:
        while len(connected) < world_size - 1:
            for peer in acceptor.wait()[0]:
                if peer.number is not None and peer.number < world_size:
                    connected[peer.number] = peer.connection
    finally:
        acceptor.close()  # torch uses the listener next, and needs it blocking
    for connection in connected.values():
        connection.setblocking(True)
        connection.sendall(_GO)
        connection.close()


def greet(address: str, port: int, key: str, rank: int, answered: Callable[[], None] = lambda: None) -> None:
    """As another rank, connect to rank 0, call `answered`, and wait for release.

    Raises:
        ForeignServer: another program answers at the address.
        OSError: the name does not resolve, or rank 0 hung up before all ranks had connected. A refused connection is
            retried without limit.
    """
    with _connect(address, port) as connection:
        try:
            exchange = handshake.introduce(connection, key, str(rank).encode())
        except handshake.Refused as stranger:
            raise ForeignServer(stranger.said) from None
        answered()
        received = exchange.rest
        while len(received) < len(_GO):
            data = connection.recv(len(_GO) - len(received))
            if not data:
                raise ConnectionResetError("rank 0 hung up before all ranks had connected")
            received += data


def identify_server(address: str, port: int, *, timeout_s: float) -> str | None:
    """Return a program's answer to a foreign greeting; None if it does not answer in time."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            connection.sendall(b"distdiag hello\r\n\r\n")
            return first_line(connection.recv(_MOST_QUOTED_BYTES)) or None
    except OSError:
        return None


def _connect(address: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), timeout=None)
        except (ConnectionRefusedError, TimeoutError):
            time.sleep(_RETRY_S)
