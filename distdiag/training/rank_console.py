"""Where the debugger of a rank talks to a person: the terminal itself, or a socket that one connects to.

The terminal is opened anew, so that a prompt is seen also where the launcher captures stdout or drops it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import sys
import time

from distdiag.training.whoami import host, label

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

_TOKEN_S = 10.0
_TOKEN_LENGTH = 200


class NoTerminal(RuntimeError):
    """Nobody could type here; the message says why."""


class Console:
    """Two text streams, and what they belong to."""

    def __init__(self, reader: TextIO, writer: TextIO, connection: socket.socket | None = None) -> None:
        self.reader, self.writer = reader, writer
        self._connection = connection

    def close(self) -> None:
        """Close it; that nobody is at the other end any more is no error."""
        for one in (self.writer, self.reader, self._connection):
            if one is not None:
                with contextlib.suppress(OSError, ValueError):
                    one.close()


def terminal() -> Console:
    """Open the terminal of this process.

    Raises:
        NoTerminal: there is none, or this process is in its background, where reading would stop it.
    """
    file = _open_terminal()
    # OSError: it is not the controlling terminal, as in the sessions that torchrun makes, and has no background then.
    with contextlib.suppress(OSError):
        if os.tcgetpgrp(file) != os.getpgrp():
            os.close(file)
            raise NoTerminal("it runs in the background of its terminal, where reading would stop it")
    writer = os.fdopen(os.dup(file), "w", encoding="utf-8", errors="replace")
    return Console(os.fdopen(file, encoding="utf-8", errors="replace"), writer)


def _open_terminal() -> int:
    flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
    for path in (_of_stdin(), "/dev/tty"):
        with contextlib.suppress(OSError):
            return os.open(path, flags)
    if os.isatty(0):  # a terminal that has no name in this container
        return os.dup(0)
    raise NoTerminal(
        "stdin is no terminal and /dev/tty cannot be opened; srun without --pty and mpirun give their terminal to "
        "no rank, torchrun to those of its own node"
    )


def _of_stdin() -> str:
    with contextlib.suppress(OSError):
        return os.ttyname(0)
    return ""


def by_socket(address: str, place: str, timeout_s: float) -> Console:
    """Listen until somebody connects who knows the token; say on stderr, in one line, what to type.

    Whoever can read that line, and reach the address, may do in this process whatever it may do.

    Args:
        address: of an interface of this node, "127.0.0.1" for those on this node only.
        place: where this rank stands.
        timeout_s: seconds to listen.

    Raises:
        NoTerminal: nobody came in time.
        OSError: this node has no such address.
    """
    token = secrets.token_hex(16)
    deadline = time.monotonic() + timeout_s
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        sys.stderr.write(
            f"{label()} distdiag: stopped at {place}; to debug it, on {host()} (else after: ssh -t {host()}): "
            f"{sys.executable} -m distdiag.training.connect {address} {port} {token}\n"
        )
        sys.stderr.flush()
        coming = select.poll()
        coming.register(server, select.POLLIN)
        while coming.poll(max(deadline - time.monotonic(), 0) * 1000):
            console = _admit(server.accept()[0], token)
            if console is not None:
                return console
    raise NoTerminal(f"nobody connected to {address} port {port} within {timeout_s:g} s")


def _admit(connection: socket.socket, token: str) -> Console | None:
    """Make a console of a connection whose first line is the token; turn away any other."""
    connection.settimeout(_TOKEN_S)
    reader = connection.makefile("r", encoding="utf-8", errors="replace")
    writer = connection.makefile("w", encoding="utf-8", errors="replace")
    console = Console(reader, writer, connection)
    try:
        if hmac.compare_digest(reader.readline(_TOKEN_LENGTH).strip().encode(), token.encode()):
            connection.settimeout(None)
            # A person thinks for long; a line that is cut in the meantime is noticed all the same.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return console
        writer.write("wrong token: it is the last word of the line that the rank printed\n")
    except OSError:  # gone again, or silent
        pass
    console.close()
    return None
