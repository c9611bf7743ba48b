"""Local TCP ports and the processes that hold them."""

from __future__ import annotations

import glob
import os

from distdiag.facts import machine
from distdiag.facts.network import sockets
from distdiag.record import record


@record
class Listener:
    """One listening socket; `pid`: None if the owner is not visible to us."""

    address: str
    port: int
    pid: int | None
    command: str


@record
class PortHolder:
    """The process on a TCP port; `pid`: None if the owner is not visible to us."""

    pid: int | None
    command: str
    listening: bool


def listeners() -> tuple[Listener, ...]:
    """List the listening sockets, sorted by port."""
    found = [sock for sock in sockets.tcp_table(os.getpid()).values() if sock.state == "LISTEN"]
    owners = _owners({sock.inode for sock in found})
    rows = set()
    for sock in found:
        address, _, port = sock.local.rpartition(":")
        rows.add(Listener(address.strip("[]"), int(port), *owners[sock.inode]))
    return tuple(sorted(rows, key=lambda row: (row.port, row.address)))


def port_holder(port: int) -> PortHolder | None:
    """Find the process on a local TCP port, listeners first; None if none is visible."""
    found = [sock for sock in sockets.tcp_table(os.getpid()).values() if sock.local.endswith(f":{port}")]
    sock = min(found, key=lambda sock: sock.state != "LISTEN", default=None)
    return PortHolder(*_owners({sock.inode})[sock.inode], sock.state == "LISTEN") if sock is not None else None


def _owners(inodes: set[int]) -> dict[int, tuple[int | None, str]]:
    """Find pid and command of the processes that hold sockets; other users' are visible only to root."""
    found: dict[int, tuple[int | None, str]] = dict.fromkeys(inodes, (None, ""))
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            inode = wanted.pop(os.readlink(path), None)
        except OSError:
            continue
        if inode is not None:
            pid = int(path.split("/")[2])
            found[inode] = pid, machine.command_line(pid)
    return found
