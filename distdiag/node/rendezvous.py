"""Does the rendezvous address lead to our rank 0? Asked before torch uses it, because torch cannot tell.

Torch's store client waits for ever on a port where another program listens. So rank 0 and the others exchange a proof
of a shared nonce over the very socket that torch will listen on: who answers otherwise is a stranger, and is quoted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import selectors
import socket
import time
from dataclasses import dataclass

from distdiag.node.wire import printable

TYPE_CHECKING = False

_MAX_HELLO = 256
_RETRY_S = 0.05


class Stranger(Exception):
    """Something else than our rank 0 answers at the address; `said` is the start of its answer, cleaned."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said


@dataclass
class _Guest:
    connection: socket.socket
    heard: bytes = b""
    rank: int | None = None


def listen(port: int) -> socket.socket:
    """Listen on every address as torch's store does, IPv6 and IPv4 in one socket where there is IPv6.

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


def receive(listener: socket.socket, nonce: str, world_size: int) -> None:
    """As rank 0, wait until every other rank has shown that it knows the nonce, then release them all.

    Waits without an end of its own: the deadline is outside. Strangers that connect are dropped.
    """
    listener.setblocking(False)
    came: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, None)
        while len(came) < world_size - 1:
            for key, _ in selector.select():
                if key.data is None:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ, _Guest(connection))
                elif _finished_greeting(key.data, nonce):
                    selector.unregister(key.data.connection)
                    if key.data.rank is None:
                        key.data.connection.close()
                    else:
                        came[key.data.rank] = key.data.connection
        for key in list(selector.get_map().values()):
            if key.data is not None:
                key.data.connection.close()  # somebody who has not said anything yet
    listener.setblocking(True)  # the flag belongs to the socket, which torch gets next
    for connection in came.values():
        connection.sendall(b"go\n")
        connection.close()


def greet(address: str, port: int, nonce: str, rank: int) -> None:
    """As another rank, find rank 0 behind the address and wait to be released.

    Raises:
        Stranger: what answers there is not our rank 0.
        OSError: the name does not resolve, or our rank 0 hung up before all ranks had come. A refused
            connection is tried again, without an end of its own.
    """
    connection = _connect(address, port)
    with connection:
        answered = _ask(connection, nonce, rank)
    here = _proof(nonce, "here", rank) + b"\n"
    if not answered.startswith(here):
        raise Stranger(_clean(answered))
    if answered != here + b"go\n":
        raise ConnectionResetError("rank 0 hung up before all ranks had come")


def who_answers(address: str, port: int, *, timeout_s: float) -> str | None:
    """Say hello as a stranger would and quote the answer; None if there is no answer in time."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            connection.sendall(b"distdiag hello\r\n\r\n")
            return _clean(connection.recv(_MAX_HELLO)) or None
    except OSError:
        return None


def _connect(address: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), timeout=None)
        except (ConnectionRefusedError, TimeoutError):
            time.sleep(_RETRY_S)


def _ask(connection: socket.socket, nonce: str, rank: int) -> bytes:
    """Send our proof; give all that is answered up to the release, or up to the first word that is not ours."""
    here = _proof(nonce, "here", rank) + b"\ngo\n"
    heard = b""
    try:
        connection.sendall(b"%d %s\n\n" % (rank, _proof(nonce, "hello", rank)))
        while len(heard) < len(here) and here.startswith(heard):
            data = connection.recv(_MAX_HELLO)
            if not data:
                break
            heard += data
    except ConnectionError:
        pass  # hung up on us: what was heard so far is the answer
    return heard


def _finished_greeting(guest: _Guest, nonce: str) -> bool:
    """Read on; True once it is decided who the guest is (a rank, or None: a stranger)."""
    try:
        data = guest.connection.recv(_MAX_HELLO)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    guest.heard += data
    if not data or len(guest.heard) > _MAX_HELLO:
        return True
    if b"\n" not in guest.heard:
        return False
    rank, _, proof = guest.heard.partition(b"\n")[0].partition(b" ")
    if rank.isdigit() and hmac.compare_digest(proof, _proof(nonce, "hello", int(rank))):
        guest.rank = int(rank)
        guest.connection.setblocking(True)
        guest.connection.sendall(_proof(nonce, "here", guest.rank) + b"\n")
    return True


def _proof(nonce: str, word: str, rank: int) -> bytes:
    return hashlib.sha256(f"{nonce} {word} {rank}".encode()).hexdigest().encode()


def _clean(answer: bytes) -> str:
    line = answer.strip().split(b"\n")[0][:80].decode("ascii", "replace").strip()
    return printable(line)


def new_nonce() -> str:
    """Make a nonce for one run."""
    return os.urandom(16).hex()
