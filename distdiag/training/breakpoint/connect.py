"""Connects to the debugger of a rank, as the rank printed it; Ctrl-D quits the debugger.

The token is read from --token-file (- is stdin), from $DISTDIAG_TOKEN, or asked for: never given on the command line,
which all users of a node can read.
"""

from __future__ import annotations

import argparse
import getpass
import os
import select
import socket
import sys
import time

from distdiag.agent import handshake

_CONNECT_S = 10.0


def main() -> int:
    """Connect, and carry lines there and text back until either side ends; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("where", nargs="+", metavar="SOCKET | HOST PORT")
    parser.add_argument("--token-file", default="", metavar="FILE")
    options = parser.parse_args()
    where = options.where
    if len(where) > 2 or (len(where) == 2 and not where[1].isdigit()):
        parser.error("usage: SOCKET, or HOST PORT")
    try:
        connection, text = (
            _to_socket(where[0]) if len(where) == 1 else _to_port(where[0], int(where[1]), options.token_file)
        )
        with connection:
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
            _carry(connection)
    except OSError as error:
        sys.stderr.write(f"{' port '.join(where)}: {error.strerror or error}\n")
        return 1
    except handshake.Refused:
        sys.stderr.write(f"{' port '.join(where)}: wrong token: use the token from the line that the rank printed\n")
        return 1
    return 0


def _to_socket(path: str) -> tuple[socket.socket, bytes]:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection, b""


def _to_port(host: str, port: int, token_file: str) -> tuple[socket.socket, bytes]:
    """Connect and prove the token; also returns what the debugger wrote by then."""
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
    stdin = sys.stdin.fileno()
    sources: list[socket.socket | int] = [connection, stdin]
    while True:
        ready = select.select(sources, [], [])[0]
        if connection in ready:
            text = connection.recv(65536)
            if not text:
                return
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        if stdin in ready:
            line = os.read(stdin, 65536)
            if line:
                connection.sendall(line)
            else:
                connection.shutdown(socket.SHUT_WR)
                sources.remove(stdin)


if __name__ == "__main__":
    sys.exit(main())
