"""Talks to the debugger of a rank: `python -m distdiag.training.connect HOST PORT TOKEN`. Ctrl-D quits the debugger."""

from __future__ import annotations

import os
import select
import socket
import sys


def main(arguments: list[str]) -> int:
    """Connect, and carry lines there and text back until either side ends; returns the exit status."""
    if len(arguments) != 3 or not arguments[1].isdigit():
        sys.stderr.write("usage: python -m distdiag.training.connect HOST PORT TOKEN\n")
        return 2
    try:
        with socket.create_connection((arguments[0], int(arguments[1])), timeout=10) as connection:
            connection.settimeout(None)
            connection.sendall(arguments[2].encode() + b"\n")
            _carry(connection)
    except OSError as error:
        sys.stderr.write(f"{arguments[0]} port {arguments[1]}: {error.strerror or error}\n")
        return 1
    return 0


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
