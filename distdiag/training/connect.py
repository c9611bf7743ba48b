"""Connects to the debugger of a rank; Ctrl-D quits the debugger.

    python -m distdiag.training.connect SOCKET
    python -m distdiag.training.connect HOST PORT [--token-file FILE]

The token is read from FILE (- is stdin), from $DISTDIAG_TOKEN, or asked for: never given on the command line, which
all users of a node can read.
"""

from __future__ import annotations

import getpass
import os
import select
import socket
import sys
import time

from distdiag.node import handshake

_CONNECT_S = 10.0
_USAGE = "usage: python -m distdiag.training.connect SOCKET | HOST PORT [--token-file FILE]\n"


def main(arguments: list[str]) -> int:
    """Connect, and carry lines there and text back until either side ends; returns the exit status."""
    words = list(arguments)
    token_file = ""
    if "--token-file" in words[:-1]:
        token_file = words.pop(words.index("--token-file") + 1)
        words.remove("--token-file")
    if not words or len(words) > 2 or (len(words) == 2 and not words[1].isdigit()):
        sys.stderr.write(_USAGE)
        return 2
    try:
        connection, heard = _by_path(words[0]) if len(words) == 1 else _by_port(words[0], int(words[1]), token_file)
        with connection:
            sys.stdout.buffer.write(heard)
            sys.stdout.buffer.flush()
            _carry(connection)
    except OSError as error:
        sys.stderr.write(f"{' port '.join(words)}: {error.strerror or error}\n")
        return 1
    except handshake.Refused:
        sys.stderr.write(f"{' port '.join(words)}: wrong token: take the one of the line that the rank printed\n")
        return 1
    return 0


def _by_path(path: str) -> tuple[socket.socket, bytes]:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection, b""


def _by_port(host: str, port: int, token_file: str) -> tuple[socket.socket, bytes]:
    """Connect and prove the token; also returns what the debugger said by then."""
    token = handshake.given_token(token_file)
    if not token and not token_file and sys.stdin.isatty():
        token = getpass.getpass("token: ").strip()
    if not token:
        raise OSError(f"no token: set {handshake.TOKEN}, or give --token-file FILE")
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    exchange = handshake.introduce(connection, token, deadline=time.monotonic() + _CONNECT_S)
    connection.settimeout(None)
    return connection, exchange.rest


def _carry(connection: socket.socket) -> None:
    typed = sys.stdin.fileno()
    sources: list[socket.socket | int] = [connection, typed]
    while True:
        ready = select.select(sources, [], [])[0]
        if connection in ready:
            told = connection.recv(65536)
            if not told:
                return
            sys.stdout.buffer.write(told)
            sys.stdout.buffer.flush()
        if typed in ready:
            line = os.read(typed, 65536)
            if line:
                connection.sendall(line)
            else:
                connection.shutdown(socket.SHUT_WR)
                sources.remove(typed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
