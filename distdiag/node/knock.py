"""One attempt to reach a listener of another node: small and large data, both ways.

More than a full packet goes in each direction: a path that swallows large packets passes a simple connection test.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import socket
import struct
import time
from dataclasses import dataclass

from distdiag.node import network
from distdiag.node.probing import BULK_BYTES, proof, returned
from distdiag.node.wire import printable

_KNOCK_AGAIN_S = 0.4
"""A lost SYN is sent again by the kernel after 1, 3, 7 s: too rarely to tell a lossy path from a closed one."""
_KNOCKS = 7
_FIRST_WORD_S = 0.7
"""Then it is asked over a new connection: after a lost SYN-ACK the kernel may wait 3 s before it sends a word again."""
_PROGRESS_BYTES = 6000
"""Acknowledged beyond this, several full packets came through: then packets are lost, not all swallowed."""
_TCP_INFO_BYTES = 136


@dataclass(frozen=True)
class Probe:
    """One attempt to reach a listener.

    `verdict`: ok; name (does not resolve), filtered (no answer), refused, rejected (a router or firewall said no),
    silent (connected, and nobody speaks), stranger, swallowed-up / swallowed-down (large packets towards the
    listener / from it vanish), lossy (it goes on, too slowly to finish), broken (the connection ended midway).
    """

    key: str
    address: str
    port: int
    verdict: str
    error: str
    resolved: tuple[str, ...]
    local_address: str
    interface: str
    said: str
    latency_s: float | None
    knocks: int
    retransmits: int
    bulk_bytes: int = 0
    bulk_s: float | None = None
    """Seconds for so many bytes there, and at most BULK_BYTES back; None if they were not all exchanged."""


@dataclass(frozen=True)
class Target:
    """Whom to try: a listener's address and port, and how many bytes to send there."""

    key: str
    address: str
    port: int
    bulk_bytes: int = BULK_BYTES


class Knock:
    """One probe under way."""

    def __init__(self, target: Target, nonce: str, deadline: float) -> None:
        self.key, self.address, self.port = target.key, target.address, target.port
        self._bulk_bytes = target.bulk_bytes
        self._bulk_s: float | None = None
        self._nonce = nonce
        self._deadline = deadline
        self._resolved: tuple[str, ...] = ()
        self._knocks = 0
        self._latency_s: float | None = None
        self._said = ""

    def go(self) -> Probe:
        """Resolve, connect, talk; never later than the deadline."""
        self._resolved, complaint = network.resolve(self.address)
        if not self._resolved:
            return self._verdict("name", complaint)
        try:
            connection = self._connect()
        except OSError as error:
            return self._verdict(*_why_not_connected(error))
        while True:
            with connection:
                verdict, complaint = self._talk(connection)
                if verdict != "silent":
                    return self._verdict(verdict, complaint, connection)
                silent = self._verdict(verdict, complaint, connection)
            try:
                connection = self._connect()
            except OSError:
                return silent

    def _connect(self) -> socket.socket:
        """Knock again and again until one attempt comes through; raises the last error."""
        waiting: list[socket.socket] = []
        last: OSError = TimeoutError(errno.ETIMEDOUT, "no answer")
        with selectors.DefaultSelector() as selector:
            try:
                while (left := self._deadline - time.monotonic()) > 0:
                    if self._knocks < _KNOCKS:
                        waiting.append(self._knock(selector))
                    for key, _ in selector.select(min(left, _KNOCK_AGAIN_S)):
                        connection = key.data
                        selector.unregister(connection)
                        status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                        if status == 0:
                            waiting.remove(connection)
                            return _blocking(connection)
                        last = OSError(status, os.strerror(status))
                        raise last
            finally:
                for connection in waiting:
                    connection.close()
        raise last

    def _knock(self, selector: selectors.BaseSelector) -> socket.socket:
        address = self._resolved[0]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        self._knocks += 1
        status = connection.connect_ex((address, self.port))
        if status not in (0, errno.EINPROGRESS):
            connection.close()
            raise OSError(status, os.strerror(status))
        selector.register(connection, selectors.EVENT_WRITE, connection)
        return connection

    def _talk(self, connection: socket.socket) -> tuple[str, str]:
        here = b"here %s\n" % proof(self._nonce, "here")
        began = time.monotonic()
        try:
            self._limit(connection)
            connection.sendall(b"probe %s %d\n" % (proof(self._nonce, "probe"), self._bulk_bytes))
            heard = self._read(connection, len(here), like=here, patience=_FIRST_WORD_S)
            self._latency_s = time.monotonic() - began
            if heard != here:
                self._said = _quote(heard)
                return ("stranger", "") if heard else ("broken", "it hung up without a word")
            return self._exchange_bulk(connection)
        except TimeoutError:
            return "silent", "connected, and then no answer"
        except OSError as error:
            return "broken", error.strerror or str(error)

    def _exchange_bulk(self, connection: socket.socket) -> tuple[str, str]:
        began = time.monotonic()
        try:
            self._limit(connection)
            connection.sendall(bytes(self._bulk_bytes))
            got = self._read(connection, 4)
        except TimeoutError:
            return self._stuck(connection, "swallowed-up")
        if got != b"got\n":
            return "broken", "the connection ended while data was sent"
        try:
            wanted = returned(self._bulk_bytes)
            received = len(self._read(connection, wanted))
        except TimeoutError:
            return self._stuck(connection, "swallowed-down")
        if received < wanted:
            return "broken", "the connection ended while data was received"
        self._bulk_s = time.monotonic() - began
        return "ok", ""

    def _stuck(self, connection: socket.socket, verdict: str) -> tuple[str, str]:
        """Say why data got stuck: large packets vanish, packets are lost, or the other end is too busy to take any."""
        acknowledged, received = _progress(connection)
        if verdict == "swallowed-up" and acknowledged >= self._bulk_bytes > 0:
            verdict = "swallowed-down"  # it has all of ours, and its answer, a full packet, does not come
        moved = acknowledged if verdict == "swallowed-up" else received
        if not self._bulk_bytes or (verdict == "swallowed-up" and not _retransmits(connection)):
            return "silent", "connected, and then too little in time: is a node very busy?"
        words = f"{moved} of {self._bulk_bytes} bytes came through in time"
        return (verdict if moved < _PROGRESS_BYTES else "lossy"), words

    def _read(self, connection: socket.socket, count: int, like: bytes = b"", patience: float = math.inf) -> bytes:
        """Read so many bytes; fewer at the end, or as soon as they are not `like` what was expected."""
        heard = bytearray()
        while len(heard) < count and (not like or like.startswith(heard)):
            self._limit(connection, patience)
            data = connection.recv(min(count - len(heard), 2**18))
            if not data:
                break
            heard += data
        return bytes(heard)

    def _limit(self, connection: socket.socket, patience: float = math.inf) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(min(left, patience))

    def _verdict(self, verdict: str, error: str, connection: socket.socket | None = None) -> Probe:
        local = "" if connection is None else str(connection.getsockname()[0]).replace("::ffff:", "")
        return Probe(
            key=self.key,
            address=self.address,
            port=self.port,
            verdict=verdict,
            error=error,
            resolved=self._resolved,
            local_address=local,
            interface=(network.interface_of(local) or "") if local else "",
            said=self._said,
            latency_s=self._latency_s,
            knocks=self._knocks,
            retransmits=_retransmits(connection) if connection is not None else 0,
            bulk_bytes=self._bulk_bytes,
            bulk_s=self._bulk_s,
        )


def _blocking(connection: socket.socket) -> socket.socket:
    connection.setblocking(True)
    return connection


def _why_not_connected(error: OSError) -> tuple[str, str]:
    words = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ECONNREFUSED:
        return "refused", words
    if error.errno == errno.ETIMEDOUT:
        return "filtered", "no answer"
    return "rejected", words


def _progress(connection: socket.socket) -> tuple[int, int]:
    """Bytes acknowledged by the peer and received from it (tcpi_bytes_..., include/uapi/linux/tcp.h)."""
    info = _tcp_info(connection)
    return struct.unpack_from("QQ", info, 120) if info else (0, 0)


def _retransmits(connection: socket.socket) -> int:
    info = _tcp_info(connection)
    return int(struct.unpack_from("I", info, 100)[0]) if info else 0  # tcpi_total_retrans


def _tcp_info(connection: socket.socket) -> bytes:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (OSError, AttributeError):  # macOS has none
        return b""
    return info if len(info) == _TCP_INFO_BYTES else b""


def _quote(heard: bytes) -> str:
    line = heard.strip().split(b"\n")[0][:80].decode("ascii", "replace").strip()
    return printable(line)
