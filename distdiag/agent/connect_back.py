"""Entry point under srun or mpirun: connects to the parent, receives the agent and runs it.

Both sides prove that they know the run's key (agent/handshake.py) before a byte of the payload is read, so neither
exchanges orders with a stranger on the network. The key is passed in the environment, never on a command line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

from distdiag.agent import boot, handshake
from distdiag.facts import machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypedDict

    class Config(TypedDict):
        """Where the parent listens, and how long to look for it."""

        addresses: list[str]
        port: int
        find_s: float


NONCE = "DISTDIAG_NONCE"
IN = b"in\n"
"""Sent by an agent once it has chosen this connection."""
_LENGTH_BYTES = 12
_RETRY_S = 0.2
_TRY_S = 5.0
_PAYLOAD_S = 60.0
"""For the whole payload: one parent sends it to all nodes."""


def main(config: Config) -> None:
    """Find the parent and obey it.

    The parent sends the payload at once, see boot.pack_message; the entry module's main also gets the connection's
    descriptor.
    """
    nonce = os.environ.pop(NONCE, "")
    if not nonce:
        sys.stderr.write(f"distdiag: {machine.host_name()}: the launcher did not pass on {NONCE}\n")
        return
    places = [(address, config["port"]) for address in config["addresses"]]
    home = find(places, nonce, {"name": _name()}, timeout_s=config["find_s"])
    if home is None:
        sys.stderr.write(
            f"distdiag: {machine.host_name()} cannot reach {', '.join(config['addresses'])} port "
            f"{config['port']}, where distdiag runs\n"
        )
        return  # any other status makes srun and mpirun end the other tasks
    try:
        payload = _receive(home, time.monotonic() + _PAYLOAD_S)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"distdiag: {machine.host_name()} did not receive the agent: {error}\n")
        return
    home.settimeout(None)
    boot.begin_message(payload, home.detach())


def find(
    places: Sequence[tuple[str, int]], nonce: str, me: Mapping[str, object], *, timeout_s: float
) -> socket.socket | None:
    """Try all (address, port) in parallel until the timeout; return the first that authenticates."""
    found: list[socket.socket] = []
    won, claim = threading.Event(), threading.Lock()
    deadline = time.monotonic() + timeout_s
    words = json.dumps(me).encode()
    for place in places:
        arguments = (place, nonce, words, deadline, (won, claim), found)
        threading.Thread(target=_try_to_connect, args=arguments, daemon=True).start()
    won.wait(timeout_s)
    return found[0] if found else None


def _try_to_connect(
    place: tuple[str, int],
    nonce: str,
    words: bytes,
    deadline: float,
    race: tuple[threading.Event, threading.Lock],
    found: list[socket.socket],
) -> None:
    won, claim = race
    while not won.is_set() and (left := deadline - time.monotonic()) > 0:
        connection = None
        try:
            # As bytes: a str makes Python import the idna codec, which is slow.
            where = (place[0].encode() if place[0].isascii() else place[0], place[1])
            connection = socket.create_connection(where, timeout=min(left, _TRY_S))  # type: ignore[arg-type]
            handshake.introduce(connection, nonce, words, deadline=min(deadline, time.monotonic() + _TRY_S))
            if claim.acquire(blocking=False):
                # This connection won the race.
                connection.sendall(IN)
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found.append(connection)
                won.set()
                return
            connection.close()
        except (OSError, handshake.Refused):
            if connection is not None:
                connection.close()
        time.sleep(_RETRY_S)


def _receive(home: socket.socket, deadline: float) -> bytes:
    """Read a line with a length, then that many bytes. Raises OSError and ValueError."""
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: data after the payload is the agent's
        line += _read_some(home, 1, deadline)
        if len(line) > _LENGTH_BYTES:
            raise ValueError("the length of the payload is missing")
    length = int(line)
    if not 0 < length <= boot.MAX_PAYLOAD_BYTES:
        raise ValueError(f"invalid payload length: {length} bytes")
    payload = bytearray()
    while len(payload) < length:
        payload += _read_some(home, min(65536, length - len(payload)), deadline)
    return bytes(payload)


def _read_some(home: socket.socket, most: int, deadline: float) -> bytes:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it did not arrive in time")
    home.settimeout(left)
    data = home.recv(most)
    if not data:
        raise ConnectionResetError("the connection was closed")
    return data


def _name() -> str:
    """Return the launcher's name for this node."""
    return os.environ.get("SLURMD_NODENAME") or machine.host_name()
