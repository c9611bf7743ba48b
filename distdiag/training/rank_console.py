"""Where the debugger of a rank talks to a person: the terminal itself, or a socket to connect to.

The terminal is opened anew, so that a prompt is seen also where the launcher captures stdout or drops it. A socket is
by default one of this node's file system, in a folder that only this user and root can enter; nothing has to be known
to connect to it, and nothing is open to the network.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import socket
import struct
import sys
import time

from distdiag.node import handshake, private
from distdiag.training.whoami import host, label

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

_PROOF_S = 10.0
_MOST_UNPROVEN = 64
_LONGEST_PATH = 100
"""Of the path of a socket; the kernel takes 107 bytes."""
_PEER = struct.Struct("iII")
"""struct ucred of <sys/socket.h>: process, user, group."""


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
    """Listen until a person connects; print on stderr, in one line, what to type.

    Whoever connects may do in this process whatever it may do.

    Args:
        address: of an interface of this node, to listen on for whoever has the token, which is in a file that only
            this user can read; empty for this user and root on this node.
        place: where this rank stands.
        timeout_s: seconds to listen.

    Raises:
        NoTerminal: no connection was made in time.
        OSError: this node has no such address, or no folder of this user's own can be made.
    """
    folder = _folder()
    deadline = time.monotonic() + timeout_s
    with _kept(os.path.join(folder, f"{os.getpid()}.{'token' if address else 'socket'}")) as path:
        console = _by_port(address, place, path, deadline) if address else _by_path(place, path, deadline)
    if console is None:
        raise NoTerminal(f"nobody connected within {timeout_s:g} s")
    return console


def _folder() -> str:
    """Make or find a folder of this user's own. Raises OSError."""
    failed = OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    for above in (os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm"):
        path = os.path.join(above, f"distdiag-breakpoint-{os.geteuid()}")
        if os.path.isabs(path) and len(os.fsencode(path)) <= _LONGEST_PATH - len("/4194304.socket"):
            try:
                os.close(private.open_folder(path, own=True))
            except OSError as error:
                failed = error
            else:
                return path
    raise failed


@contextlib.contextmanager
def _kept(path: str) -> Iterator[str]:
    """Make place for a file, and remove it in the end."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a process that was killed, and had this number
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _by_path(place: str, path: str, deadline: float) -> Console | None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        _announce(place, f"on {host()} (else after: ssh -t {host()})", f"{_CONNECT} {shlex.quote(path)}")
        coming = select.poll()
        coming.register(server, select.POLLIN)
        while coming.poll(max(deadline - time.monotonic(), 0) * 1000):
            connection, _ = server.accept()
            if _user(connection) in (0, os.geteuid()):
                return _console(connection)
            connection.close()
    return None


def _user(connection: socket.socket) -> int:
    """Return the user at the other end; the folder keeps others out, where the file system heeds its mode."""
    return int(_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def _by_port(address: str, place: str, path: str, deadline: float) -> Console | None:
    token = handshake.new_key()
    private.write_whole(path, token.encode())
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        bound, port = server.getsockname()[:2]
        acceptor = handshake.Acceptor([server], token, most=_MOST_UNPROVEN, patience_s=_PROOF_S)
        shown = host() if address in ("0.0.0.0", "::") else address
        here = bound.startswith("127.") or bound == "::1"
        read = f"cat {shlex.quote(path)}" if here else f"ssh {host()} cat {shlex.quote(path)}"
        where = f"on {host()} (else after: ssh -t {host()})" if here else "from any node"
        _announce(place, where, f"{handshake.TOKEN}=$({read}) {_CONNECT} {shown} {port}")
        try:
            while (left := deadline - time.monotonic()) > 0:
                for peer in acceptor.wait(left)[0]:
                    return _console(peer.connection)
        finally:
            acceptor.close()
    return None


_CONNECT = f"{shlex.quote(sys.executable)} -m distdiag.training.connect"


def _announce(place: str, where: str, command: str) -> None:
    sys.stderr.write(f"{label()} distdiag: stopped at {place}; to debug it, {where}: {command}\n")
    sys.stderr.flush()


def _console(connection: socket.socket) -> Console:
    connection.settimeout(None)
    # A person thinks for long; a connection that is cut in the meantime is noticed all the same.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    reader = connection.makefile("r", encoding="utf-8", errors="replace")
    return Console(reader, connection.makefile("w", encoding="utf-8", errors="replace"), connection)
