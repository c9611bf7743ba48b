"""An agent that was started by srun or mpirun, or is a process of theirs: connects to the parent and serves it.

Both sides prove that they know the run's key (node/handshake.py): neither takes orders from, nor gives them to, a
stranger on the network. The key came in the environment, never on a command line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

from distdiag.node import agent, handshake, machine
from distdiag.node.wire import Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

NONCE = "DISTDIAG_NONCE"
IN = b"in\n"
"""What an agent says when it has chosen this connection."""
_KNOCK_AGAIN_S = 0.2
_TRY_S = 5.0


def main(config: dict[str, Any]) -> None:
    """Find the parent at one of config["addresses"] and config["port"] within config["find_s"], and serve it."""
    nonce = os.environ.pop(NONCE, "")
    if not nonce:
        sys.stderr.write(f"distdiag: {machine.host_name()}: the launcher did not pass {NONCE} on\n")
        return
    places = [(address, config["port"]) for address in config["addresses"]]
    home = find(places, nonce, {"name": _name()}, timeout_s=config["find_s"])
    if home is None:
        sys.stderr.write(
            f"distdiag: {machine.host_name()} cannot reach {', '.join(config['addresses'])} port "
            f"{config['port']}, where distdiag runs\n"
        )
        return  # status 0: srun and mpirun would end the others for any other
    fd = home.detach()
    agent.leave(agent.serve(config, fd, Writer(fd)))


def find(
    places: Sequence[tuple[str, int]], nonce: str, me: dict[str, Any], *, timeout_s: float
) -> socket.socket | None:
    """Try all (address, port) at the same time, again and again; the first that proves itself is home."""
    found: list[socket.socket] = []
    won, claim = threading.Event(), threading.Lock()
    deadline = time.monotonic() + timeout_s
    words = json.dumps(me).encode()
    for place in places:
        threading.Thread(target=_knock, args=(place, nonce, words, deadline, (won, claim), found), daemon=True).start()
    won.wait(timeout_s)
    return found[0] if found else None


def _knock(
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
            # As bytes: else Python loads what turns names of other alphabets into ASCII.
            where = (place[0].encode() if place[0].isascii() else place[0], place[1])
            connection = socket.create_connection(where, timeout=min(left, _TRY_S))  # type: ignore[arg-type]
            handshake.introduce(connection, nonce, words, deadline=min(deadline, time.monotonic() + _TRY_S))
            if claim.acquire(blocking=False):
                # Only now are we in: of several ways that lead home, one is taken.
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
        time.sleep(_KNOCK_AGAIN_S)


def _name() -> str:
    """Give the name by which the launcher knows this node."""
    return os.environ.get("SLURMD_NODENAME") or machine.host_name()
