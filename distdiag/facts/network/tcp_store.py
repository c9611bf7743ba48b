"""The members of a job that its TCPStore knows, read like one more client.

The requests are those of torch/csrc/distributed/c10d/TCPStoreBackend.hpp, tried on torch 2.13 to 2.15. They change
nothing. An older torch without LIST_KEYS closes this connection and no other. Each request is one packet, because the
server without libuv blocks until the rest of a request arrives.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import re
import socket
import struct

from distdiag.facts.text import printable
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import BinaryIO

_VALIDATE, _GET, _PING, _LIST_KEYS = 0, 3, 13, 17
_MAGIC = 0x3C85F7CE
_NONCE = 0x64647374
_MOST_KEYS = 20_000
_LONGEST_NAME = 255
_MOST_BYTES = 1 << 20
_COUNTER = "init/"
_RENDEZVOUS = "/torch.rendezvous."
_NODE_RANK = re.compile(r"/(.+)/torchelastic/role_info/(\d+)")
_RANK = re.compile(r"/default_pg/0//cpu//0/(\d+)")
_SECTIONS = ("participants", "wait_list", "redundancy_list", "last_heartbeats")


@record
class Rendezvous:
    """The hosts of the launchers that joined a rendezvous of c10d. `is_complete`: their ranks have started."""

    run_id: str
    hosts: tuple[str, ...]
    is_complete: bool


@record
class Store:
    """The members of a job in its store. `connected`: clients with a world size; None without any.

    `node_ranks`: (--rdzv-id, --node-rank) of launchers that got past connecting. `ranks`: (rank, host) of those with a
    published Gloo address.
    """

    connected: int | None = None
    rendezvous: tuple[Rendezvous, ...] = ()
    node_ranks: tuple[tuple[str, int], ...] = ()
    ranks: tuple[tuple[int, str], ...] = ()


def read(address: str, port: int, *, timeout_s: float) -> Store | None:
    """Read a store; None if another program listens, or a torch without LIST_KEYS."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            hello = struct.pack("<BI", _VALIDATE, _MAGIC) + struct.pack("<BI", _PING, _NONCE)
            connection.sendall(hello + bytes([_LIST_KEYS]))
            with connection.makefile("rb") as answer:
                if _take(answer, 4) != struct.pack("<I", _NONCE):
                    return None
                keys = [_text(answer) for _ in range(_number(answer, _MOST_KEYS))]
                return _members(keys, connection, answer)
    except (OSError, ValueError):
        return None


def _take(answer: BinaryIO, size: int) -> bytes:
    data = answer.read(size)
    if len(data) < size:
        raise ValueError("the answer is incomplete")
    return data


def _number(answer: BinaryIO, most: int) -> int:
    (number,) = struct.unpack("<Q", _take(answer, 8))
    if number > most:
        raise ValueError("no answer of a TCPStore")
    return int(number)


def _text(answer: BinaryIO) -> str:
    return _take(answer, _number(answer, _MOST_BYTES)).decode("utf-8", "replace")


def _members(keys: Iterable[str], connection: socket.socket, answer: BinaryIO) -> Store:
    def value(key: str) -> bytes:
        connection.sendall(struct.pack("<BQ", _GET, len(key.encode())) + key.encode())
        return _take(answer, _number(answer, _MOST_BYTES))

    keys = sorted(keys)
    ranks = {int(match[1]): key for key in keys if (match := _RANK.fullmatch(key))}
    count = value(_COUNTER) if _COUNTER in keys else b""
    return Store(
        connected=int(count) if count.isdigit() else None,
        rendezvous=tuple(
            _rendezvous(key[len(_RENDEZVOUS) :], value(key)) for key in keys if key.startswith(_RENDEZVOUS)
        ),
        node_ranks=tuple((_shown(match[1]), int(match[2])) for key in keys if (match := _NODE_RANK.fullmatch(key))),
        ranks=tuple((rank, _host(value(key))) for rank, key in sorted(ranks.items())),
    )


def _host(value: bytes) -> str:
    """Return the host name before Gloo's addresses; empty if this Gloo writes none."""
    size = int.from_bytes(value[:8], "little")
    name = value[8 : 8 + size].decode("ascii", "replace") if 0 < size <= 255 else ""
    return name if re.fullmatch(r"[\w.-]+", name) else ""


def _rendezvous(run_id: str, value: bytes) -> Rendezvous:
    """Parse a base64 pickle of torch.distributed.elastic's _RendezvousState without unpickling it.

    Its nodes' names follow "addr"; repeated strings and nodes are references to the pickle's memo.
    """
    memo: list[object] = []
    hosts: list[str] = []
    section = before = text = ""
    is_complete = False
    try:
        for opcode, argument, _ in pickletools.genops(base64.b64decode(value)):
            if opcode.name == "MEMOIZE":
                memo.append(text)
                continue
            is_complete = is_complete or (opcode.name == "NEWTRUE" and text == "complete")
            before, text = text, str(memo[int(argument or 0)]) if opcode.name.endswith("BINGET") else ""
            if opcode.name.endswith("BINUNICODE"):
                text = str(argument)
            section = text if text in _SECTIONS else section
            if before == "addr" and section == "participants":
                hosts.append(text)
    except (ValueError, IndexError, binascii.Error):
        pass
    return Rendezvous(_shown(run_id), tuple(map(_shown, hosts)), is_complete)


def _shown(text: str) -> str:
    """Make a name printable: any program may listen there."""
    return printable(text[:_LONGEST_NAME])
