"""An attempt to reach a listener of another node, with small and large data in both directions.

More than a full packet is sent each way: a path that drops large packets passes a simple connection test.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time

from distdiag.agent import handshake
from distdiag.agent.probe_server import BULK_BYTES, returned
from distdiag.facts.network import interfaces as network
from distdiag.record import record

_CONNECT_AGAIN_S = 0.4
"""The kernel repeats a SYN after 1, 3, 7 s: too rarely to distinguish a lossy path from a closed one."""
_MOST_ATTEMPTS = 7
_FIRST_WORD_S = 0.7
"""Then retry on a new connection: after a lost SYN-ACK the kernel may wait 3 s before sending data again."""
_PROGRESS_BYTES = 6000
"""With more than this acknowledged, several full packets arrived: the path loses some packets, not all."""
_MANY_PACKETS_BYTES = 12000
_UNANSWERED = 3
"""A link with 1/3 loss delivers 9 packets in a row and then loses 3 in a row once in 1000 times."""
_LEAST_WAIT_S = 0.5
"""A younger SYN proves nothing: this process may not have had a processor before. Kernels answer without one."""
_TCP_INFO_BYTES = 136
"""Minimum; fields added by newer kernels are used if present."""
_UNACKED, _LAST_DATA, _SENT_AGAIN, _HAD_ALREADY, _OUT_OF_ORDER = 24, 52, 100, 216, 224
"""Offsets in tcp_info (include/uapi/linux/tcp.h): unacknowledged packets, ms since the last data received, packets
retransmitted (tcpi_total_retrans), those of them the peer had already (tcpi_dsack_dups), packets received out of order.
"""
_SILENT_MS = 1000
"""A sender repeats a lost packet after 0.2, 0.4 and 0.8 s."""
_VERDICTS = (
    *("ok", "lossy", "name", "filtered", "refused", "rejected", "silent", "stranger", "broken"),
    *("swallowed-up", "swallowed-down", "cut-off", "no-route", "no-port", "busy"),
)


@record
class ProbeResult:
    """An attempt to reach a listener.

    `verdict`: ok; name (does not resolve), filtered (no answer), refused, rejected (by a router or firewall), silent
    (connected, then no data), busy (no packet was lost, but no process answered in time), stranger, swallowed-up /
    swallowed-down (large packets towards the listener / from it vanish), lossy (data moves, too slowly to finish),
    broken (the connection ended midway), cut-off (some full packets, then none), no-route (this node's own kernel
    refused at once, see `route`), no-port (this node has no local port left).
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
    attempts: int
    retransmits: int
    bulk_bytes: int = 0
    bulk_s: float | None = None
    """Time to send bulk_bytes and to receive at most BULK_BYTES; None unless complete."""
    route: str = ""
    """With no-route: the node's output of `ip route get` for the address."""

    def __post_init__(self) -> None:
        if self.verdict not in _VERDICTS:
            raise ValueError(f"unknown verdict {self.verdict[:20]!r}")

    @property
    def is_open(self) -> bool:
        """Whether data gets through, even if slowly."""
        return self.verdict in ("ok", "lossy")


@record
class Target:
    """The target of a probe: a listener's address and port, and how many bytes to send there."""

    key: str
    address: str
    port: int
    bulk_bytes: int = BULK_BYTES


class _NoTime(OSError):
    """The deadline passed before a kernel could have answered, as this process had not been running."""


class _RefusedHere(OSError):
    """This node's own kernel refused before any packet was sent."""


class TcpProbe:
    """A probe under way."""

    def __init__(self, target: Target, key: str, deadline: float) -> None:
        self.key, self.address, self.port = target.key, target.address, target.port
        self._bulk_bytes = target.bulk_bytes
        self._bulk_s: float | None = None
        self._key = key
        self._deadline = deadline
        self._resolved: tuple[str, ...] = ()
        self._attempts = 0
        self._latency_s: float | None = None
        self._said = ""
        self._unread = b""

    def run(self) -> ProbeResult:
        """Resolve, connect, exchange data; never later than the deadline."""
        self._resolved, complaint = network.resolve(self.address)
        if not self._resolved:
            return self._result("name", complaint)
        try:
            connection = self._connect()
        except OSError as error:
            return self._result(*_why_not_connected(error))
        while True:
            with connection:
                verdict, complaint = self._exchange(connection)
                if verdict not in ("silent", "busy"):
                    return self._result(verdict, complaint, connection)
                silent = self._result(verdict, complaint, connection)
            try:
                connection = self._connect()
            except OSError:
                return silent

    def _connect(self) -> socket.socket:
        """Repeat attempts until one succeeds; raises the last error."""
        waiting: list[socket.socket] = []
        last: OSError = TimeoutError(errno.ETIMEDOUT, "no answer")
        began, left = time.monotonic(), 1.0
        with selectors.DefaultSelector() as selector:
            try:
                while left > 0:
                    left = max(0.0, self._deadline - time.monotonic())
                    if left and self._attempts < _MOST_ATTEMPTS:
                        waiting.append(self._begin(selector))
                    # Once more after the deadline: an answer that arrived while this process was paused is in time.
                    for key, _ in selector.select(min(left, _CONNECT_AGAIN_S)):
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
        if not waiting or time.monotonic() - began < _LEAST_WAIT_S:
            raise _NoTime(errno.ETIMEDOUT, "this node was too busy to try in time")
        raise last

    def _begin(self, selector: selectors.BaseSelector) -> socket.socket:
        address = self._resolved[0]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        self._attempts += 1
        status = connection.connect_ex((address, self.port))
        if status not in (0, errno.EINPROGRESS):
            connection.close()
            kind = OSError if status == errno.ECONNREFUSED else _RefusedHere  # a port of this node refuses at once
            raise kind(status, os.strerror(status))
        selector.register(connection, selectors.EVENT_WRITE, connection)
        return connection

    def _exchange(self, connection: socket.socket) -> tuple[str, str]:
        began = time.monotonic()
        first_word_by = min(self._deadline, began + _FIRST_WORD_S)
        try:
            met = handshake.introduce(connection, self._key, b"%d" % self._bulk_bytes, deadline=first_word_by)
            self._unread = met.rest
            self._latency_s = time.monotonic() - began
            return self._exchange_bulk(connection)
        except handshake.Refused as stranger:
            self._said = stranger.said
            return ("stranger", "") if stranger.said else ("broken", "the peer closed the connection without a reply")
        except TimeoutError:
            if _all_acknowledged(connection):
                return "busy", "connected, and its kernel took the data; no process answered in time"
            return "silent", "connected, then no answer"
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
            expected = returned(self._bulk_bytes)
            received = len(self._read(connection, expected))
        except TimeoutError:
            return self._stuck(connection, "swallowed-down")
        if received < expected:
            return "broken", "the connection ended while data was received"
        self._bulk_s = time.monotonic() - began
        return "ok", ""

    def _stuck(self, connection: socket.socket, verdict: str) -> tuple[str, str]:
        """Return the reason: large packets vanish, packets are lost, or the peer is too busy."""
        acknowledged, received = _progress(connection)
        came_to_an_end = _nothing_repaired(connection, sent=verdict == "swallowed-up")
        if verdict == "swallowed-up" and acknowledged >= self._bulk_bytes > 0:
            verdict = "swallowed-down"  # the peer has all our data, and its reply, a full packet, is missing
        moved = acknowledged if verdict == "swallowed-up" else received
        if not self._bulk_bytes or (verdict == "swallowed-up" and not _retransmits(connection)):
            verdict = "busy" if _all_acknowledged(connection) or self._bulk_bytes else "silent"
            return verdict, "connected, then too little data in time: is a node very busy?"
        words = f"{moved} of {self._bulk_bytes} bytes arrived in time"
        if moved < _PROGRESS_BYTES:
            return verdict, words
        return ("cut-off" if came_to_an_end and moved >= _MANY_PACKETS_BYTES else "lossy"), words

    def _read(self, connection: socket.socket, count: int) -> bytes:
        """Read `count` bytes; fewer at the end."""
        received, self._unread = bytearray(self._unread[:count]), self._unread[count:]
        while len(received) < count:
            self._limit(connection)
            data = connection.recv(min(count - len(received), 2**18))
            if not data:
                break
            received += data
        return bytes(received)

    def _limit(self, connection: socket.socket) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)

    def _result(self, verdict: str, error: str, connection: socket.socket | None = None) -> ProbeResult:
        local = "" if connection is None else str(connection.getsockname()[0]).replace("::ffff:", "")
        return ProbeResult(
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
            attempts=self._attempts,
            retransmits=_retransmits(connection) if connection is not None else 0,
            bulk_bytes=self._bulk_bytes,
            bulk_s=self._bulk_s,
            route=network.route_to(self._resolved[0]) if verdict == "no-route" else "",
        )


def _blocking(connection: socket.socket) -> socket.socket:
    connection.setblocking(True)
    return connection


def _why_not_connected(error: OSError) -> tuple[str, str]:
    words = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ECONNREFUSED:
        return "refused", words
    if isinstance(error, _NoTime):
        return "busy", str(error.strerror)
    if error.errno == errno.ETIMEDOUT:
        return "filtered", "no answer"
    if error.errno == errno.EADDRNOTAVAIL:
        return "no-port", words
    return ("no-route" if isinstance(error, _RefusedHere) else "rejected"), words


def _progress(connection: socket.socket) -> tuple[int, int]:
    """Return the bytes acknowledged by the peer and received from it (tcpi_bytes_..., include/uapi/linux/tcp.h)."""
    info = _tcp_info(connection)
    return struct.unpack_from("QQ", info, 120) if info else (0, 0)


def _nothing_repaired(connection: socket.socket, *, sent: bool) -> bool:
    """Return whether all packets arrived in sequence until none did; a path with random loss keeps delivering some.

    Sending: every lost packet is one of the last (tcpi_retransmits counts the unanswered; one more may be the
    tail loss probe). Receiving: no packet arrived out of order (tcpi_rcv_ooopack), none of ours was lost before, and
    the last is older than the sender's retransmission timeout.
    """
    info = _tcp_info(connection)
    if not info:
        return False
    sent_again = _lost(info)
    if sent:
        return info[2] >= _UNANSWERED and sent_again <= info[2] + 1
    silent_ms = int(struct.unpack_from("I", info, _LAST_DATA)[0])
    in_order = len(info) >= _OUT_OF_ORDER + 4 and struct.unpack_from("I", info, _OUT_OF_ORDER)[0] == 0
    return in_order and sent_again <= 1 and silent_ms >= _SILENT_MS


def _retransmits(connection: socket.socket) -> int:
    info = _tcp_info(connection)
    return _lost(info) if info else 0


def _lost(info: bytes) -> int:
    """Return the number of retransmissions except those of packets that had arrived: their acknowledgement was late.

    On a busy node a tenth of all connections have such ones. Kernels before 4.19 do not tell.
    """
    (again,) = struct.unpack_from("I", info, _SENT_AGAIN)
    (had,) = struct.unpack_from("I", info, _HAD_ALREADY) if len(info) >= _HAD_ALREADY + 4 else (0,)
    return max(0, int(again) - int(had))


def _all_acknowledged(connection: socket.socket) -> bool:
    """Return whether all sent data arrived at the first attempt, which proves that the network carries data."""
    info = _tcp_info(connection)
    return bool(info) and not struct.unpack_from("I", info, _UNACKED)[0] and not _retransmits(connection)


def _tcp_info(connection: socket.socket) -> bytes:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except (OSError, AttributeError):  # macOS has none
        return b""
    return info if len(info) >= _TCP_INFO_BYTES else b""
