"""The streams of a rank's pdb: the terminal itself, or a socket of this node's file system, for `-m ...console SOCKET`.

The terminal is opened anew, so that a prompt appears also where the launcher captures stdout or drops it. The socket is
in a folder that only this user and root can enter.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import threading

from distdiag.facts import machine, private_files
from distdiag.facts.process.rank_identity import own_label

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

_LONGEST_FOLDER = 100 - len("/4194304.socket")  # the kernel takes 107 bytes of a socket's path, unix(7)


class NoTerminal(RuntimeError):
    """No terminal is usable; the message names the reason."""


def open_console(place: str, *, listen: bool | None, timeout_s: float) -> tuple[TextIO, TextIO]:
    """Open the terminal, or listen for `timeout_s` seconds until a client connects; return a reader and a writer.

    `place`: the line of this rank; `listen`: as for `distdiag.breakpoint`.

    Raises:
        NoTerminal: no terminal is usable, or no client connected in time.
        OSError: no private directory can be created.
    """
    if not listen:
        try:
            return _open(_terminal())
        except NoTerminal as error:
            if listen is not None:
                raise NoTerminal(f"{error}; listen=True waits for a connection instead") from None
    folder = private_files.temporary_folder("breakpoint", longest=_LONGEST_FOLDER)
    path = os.path.join(folder, f"{os.getpid()}.socket")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # left by a killed process with this pid
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            server.settimeout(timeout_s)
            host = machine.host_name()
            command = shlex.join([sys.executable, "-m", "distdiag.training.breakpoint.console", path])
            where = f"on {host} (from another node, first: ssh -t {host})"
            sys.stderr.write(f"{own_label()} distdiag: stopped at {place}; to debug it, {where}: {command}\n")
            sys.stderr.flush()
            connection = server.accept()[0]
            connection.settimeout(None)
            return _open(connection.detach())
    except TimeoutError:
        raise NoTerminal(f"no client connected within {timeout_s:g} s") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _open(file: int) -> tuple[TextIO, TextIO]:
    writer = os.fdopen(os.dup(file), "w", encoding="utf-8", errors="replace")
    return os.fdopen(file, encoding="utf-8", errors="replace"), writer


def _terminal() -> int:
    paths = ["/dev/tty"]
    with contextlib.suppress(OSError):
        paths.insert(0, os.ttyname(0))
    for path in paths:
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    raise NoTerminal(
        "stdin is not a terminal and /dev/tty cannot be opened; srun without --pty and mpirun give no rank a terminal, "
        "torchrun only the ranks of its own node"
    )


def main(path: str) -> str | None:
    """Connect to a rank's debugger until it ends (Ctrl-D quits it); return the error, if any."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        threading.Thread(target=_send_lines, args=(connection,), daemon=True).start()
        with contextlib.suppress(ConnectionError):
            while text := connection.recv(65536):
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
    return None


def _send_lines(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for line in sys.stdin.buffer:
            connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    complaint = main(sys.argv[-1])
    if complaint is not None:
        sys.exit(complaint)
    sys.stdout.flush()
    os._exit(0)  # the thread that reads stdin holds its lock, which aborts a normal exit
