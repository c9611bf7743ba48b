"""Listening TCP sockets of this machine, with the processes that hold them. See proc(5)."""

from __future__ import annotations

import glob
import os
import re
import socket
import struct
from dataclasses import dataclass

from distdiag.facts import machine

_LISTEN = "0A"  # include/net/tcp_states.h


@dataclass(frozen=True)
class Listener:
    """One listening socket; `pid`: None if the owner is not visible to us."""

    address: str
    port: int
    pid: int | None
    command: str


def listeners() -> tuple[Listener, ...]:
    """List the listening sockets, sorted by port."""
    found = {(address, port): inode for table in ("tcp", "tcp6") for address, port, inode in _table(table)}
    owners = _owners(set(found.values()))
    rows = []
    for (address, port), inode in sorted(found.items(), key=lambda entry: (entry[0][1], entry[0][0])):
        pid = owners.get(inode)
        rows.append(Listener(address, port, pid, machine.command_line(pid) if pid else ""))
    return tuple(rows)


def _table(name: str) -> list[tuple[str, int, str]]:
    rows = []
    for line in machine.read_text(f"/proc/net/{name}").splitlines()[1:]:
        columns = line.split()
        if columns[3] == _LISTEN:
            address, port = columns[1].split(":")
            rows.append((_address(address), int(port, 16), columns[9]))
    return rows


def _address(text: str) -> str:
    """Parse an address printed by the kernel: words in the machine's byte order."""
    words = struct.pack(f"={len(text) // 8}I", *(int(text[at : at + 8], 16) for at in range(0, len(text), 8)))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def _owners(inodes: set[str]) -> dict[str, int]:
    """Find the processes that hold sockets; other users' are visible only to root."""
    found: dict[str, int] = {}
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            target = os.readlink(path)
        except OSError:
            continue
        match = re.fullmatch(r"socket:\[(\d+)\]", target)
        if match and match[1] in inodes:
            found.setdefault(match[1], int(path.split("/")[2]))
    return found
