"""Where the debugger of a rank talks to a person: the terminal itself, or a socket to connect to.

The terminal is opened anew, so that a prompt is seen also where the launcher captures stdout or drops it. A socket is
by default one of this node's file system, in a folder that only this user and root can enter; nothing has to be known
to connect to it, and nothing is open to the network.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import socket
import struct
import sys
import time

from distdiag.agent import handshake
from distdiag.facts import machine, private_files
from distdiag.facts.rank_identity import own_label

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

_PROOF_S = 10.0
_MOST_UNPROVEN = 64
_LONGEST_FOLDER = 100 - len("/4194304.socket")
"""Of the path of a socket the kernel takes 107 bytes, see unix(7)."""
_PEER = struct.Struct("iII")
"""struct ucred of <sys/socket.h>: process, user, group."""
_CONNECT = f"{shlex.quote(sys.executable)} -m distdiag.training.breakpoint.connect"


class NoTerminal(RuntimeError):
    """Nobody could type here; the message says why."""


class Console:
    """Two text streams."""

    def __init__(self, reader: TextIO, writer: TextIO) -> None:
        self.reader, self.writer = reader, writer

    def close(self) -> None:
        """Close them; that nobody is at the other end any more is no error."""
        for stream in (self.writer, self.reader):
            with contextlib.suppress(OSError, ValueError):
                stream.close()


def open_console(place: str, *, listen: bool | None, address: str, timeout_s: float) -> Console:
    """Open the terminal, or listen until a person connects: `listen` as for `distdiag.breakpoint`.

    Whoever connects may do in this process whatever it may do.

    Args:
        place: where this rank is.
        listen: None: where there is no terminal.
        address: of an interface of this node, to listen on for whoever has the token, which is in a file that only
            this user can read; empty for this user and root on this node.
        timeout_s: seconds to listen.

    Raises:
        NoTerminal: there is no terminal, or this process is in its background; no connection was made in time.
        OSError: this node has no such address, or no folder of this user's own can be made.
    """
    if not listen:
        try:
            return _terminal()
        except NoTerminal as error:
            if listen is not None:
                raise NoTerminal(f"{error}; listen=True waits for a connection instead") from None
    folder = private_files.temporary_folder("breakpoint", longest=_LONGEST_FOLDER)
    deadline = time.monotonic() + timeout_s
    with _removed_after(os.path.join(folder, f"{os.getpid()}.{'token' if address else 'socket'}")) as path:
        connection = _by_port(address, place, path, deadline) if address else _by_socket(place, path, deadline)
    if connection is None:
        raise NoTerminal(f"no client connected within {timeout_s:g} s")
    with connection:  # the streams keep it open
        connection.settimeout(None)
        # A person thinks for long; a connection that is cut in the meantime is noticed all the same.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        reader = connection.makefile("r", encoding="utf-8", errors="replace")
        return Console(reader, connection.makefile("w", encoding="utf-8", errors="replace"))


def _terminal() -> Console:
    file = _open_terminal()
    # OSError: it is not the controlling terminal, as in the sessions that torchrun makes, and has no background then.
    with contextlib.suppress(OSError):
        if os.tcgetpgrp(file) != os.getpgrp():
            os.close(file)
            raise NoTerminal("it runs in the background of its terminal, where reading stdin would stop it")
    writer = os.fdopen(os.dup(file), "w", encoding="utf-8", errors="replace")
    return Console(os.fdopen(file, encoding="utf-8", errors="replace"), writer)


def _open_terminal() -> int:
    paths = ["/dev/tty"]
    with contextlib.suppress(OSError):
        paths.insert(0, os.ttyname(0))
    for path in paths:
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    if os.isatty(0):  # a terminal that has no name in this container
        return os.dup(0)
    raise NoTerminal(
        "stdin is not a terminal and /dev/tty cannot be opened; srun without --pty and mpirun give no rank a "
        "terminal, torchrun only the ranks of its own node"
    )


@contextlib.contextmanager
def _removed_after(path: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a process that was killed, and had this number
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _by_socket(place: str, path: str, deadline: float) -> socket.socket | None:
    """Take the first connection of this user's or root's: the folder keeps others out, where its mode is heeded."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        _announce(place, is_local=True, command=f"{_CONNECT} {shlex.quote(path)}")
        waiting = select.poll()
        waiting.register(server, select.POLLIN)
        while waiting.poll(max(deadline - time.monotonic(), 0) * 1000):
            connection, _ = server.accept()
            _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user in (0, os.geteuid()):
                return connection
            connection.close()
    return None


def _by_port(address: str, place: str, path: str, deadline: float) -> socket.socket | None:
    """Take the first connection that proves the token, which is written to `path`."""
    token = handshake.new_key()
    private_files.write_whole(path, token.encode())
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        bound, port = server.getsockname()[:2]
        acceptor = handshake.Acceptor([server], token, most=_MOST_UNPROVEN, patience_s=_PROOF_S)
        host = machine.host_name()
        is_local = bound.startswith("127.") or bound == "::1"
        read = f"cat {shlex.quote(path)}" if is_local else f"ssh {host} cat {shlex.quote(path)}"
        shown = host if address in ("0.0.0.0", "::") else address
        _announce(place, is_local=is_local, command=f"{handshake.TOKEN}=$({read}) {_CONNECT} {shown} {port}")
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                for peer in acceptor.wait(left_s)[0]:
                    return peer.connection
        finally:
            acceptor.close()
    return None


def _announce(place: str, *, is_local: bool, command: str) -> None:
    host = machine.host_name()
    where = f"on {host} (from another node, first: ssh -t {host})" if is_local else "from any node"
    sys.stderr.write(f"{own_label()} distdiag: stopped at {place}; to debug it, {where}: {command}\n")
    sys.stderr.flush()
