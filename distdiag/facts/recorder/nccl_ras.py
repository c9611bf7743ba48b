"""The job's state by NCCL's RAS service: two readings from the port of one of its processes.

NCCL 2.24 and later answer on localhost:28028 of each node, for the whole job (NCCL user guide, "RAS"). Lines of text in
both directions: CLIENT PROTOCOL, then SET FORMAT json (2.28.7 and later), TIMEOUT, VERBOSE STATUS; the server closes
the connection at the end of its status. Nothing is changed in the job. Nothing is judged here.
"""

from __future__ import annotations

import socket
import time

from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT_ADDRESS = "localhost:28028"
_PROTOCOL = 2
_MOST_BYTES = 8 * 2**20
_LONGEST_LINE = 1024
_MOST_ADDRESSES = 8
_CLOSED = "the connection was closed"
_TLS_ALERT = "\x15\x03"
"""Start of a TLS record that reports an error; some servers close without one."""
_TLS = "TLS (NCCL 2.32 and later, ncclSetEncryption)"
_SPARE_S = 1.0
"""NCCL's deadline is earlier than ours by this, so that its partial answer still arrives."""


@record
class Reading:
    """One answer. `form`: "json", "text" or ""; `at_s`: seconds after the start; `error`: why it is incomplete."""

    text: str = ""
    form: str = ""
    at_s: float = 0.0
    error: str = ""


@record
class RasFacts:
    """The readings from one address. `protocol`: of the handshake, or 0; `error`: why no reading was possible."""

    address: str
    protocol: int = 0
    readings: tuple[Reading, ...] = ()
    error: str = ""


class _Failure(Exception):
    """A question was not answered."""


def addresses(environs: Iterable[Mapping[str, str]]) -> list[str]:
    """List the addresses for these environments: NCCL_RAS_ADDR, or the default. Empty if RAS is off."""
    found: dict[str, None] = {}
    is_off = True
    for environ in environs:
        if environ.get("NCCL_RAS_ENABLE", "1") != "0":
            is_off = False
            found[environ.get("NCCL_RAS_ADDR") or DEFAULT_ADDRESS] = None
    return list(found)[:_MOST_ADDRESSES] if found or is_off else [DEFAULT_ADDRESS]


def read(address: str = DEFAULT_ADDRESS, *, timeout_s: float = 10.0, apart_s: float = 1.0) -> RasFacts:
    """Query twice, `apart_s` seconds apart, within `timeout_s` seconds in all. Never raises."""
    began = time.monotonic()
    until = began + timeout_s
    readings: list[Reading] = []
    protocol = 0
    for number in range(2):
        if number:
            time.sleep(max(0.0, min(apart_s, until - time.monotonic())))
        # The first reading leaves time for the second one.
        ends = until if number else min(until, began + max(1.0, (timeout_s - apart_s) / 2))
        at_s = time.monotonic() - began
        try:
            with _Server(address, ends) as server:
                protocol = server.protocol
                form, text, error = server.status()
        except _Failure as failure:
            if not readings:
                return RasFacts(address, protocol, error=str(failure))
            readings.append(Reading(at_s=at_s, error=str(failure)))
            break
        readings.append(Reading(text, form, at_s, error))
        if error:
            break
    return RasFacts(address, protocol, tuple(readings))


class _Server:
    """A connection to the service, after the handshake; queries end at `until`."""

    def __init__(self, address: str, until: float) -> None:
        self._until = until
        self._data = b""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise _Failure(f"NCCL_RAS_ADDR={address[:100]} is not HOST:PORT")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=self._left())
        except OSError as error:
            raise _Failure(self._reason(error)) from None
        try:
            self.protocol = self._handshake()
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise _Failure("no answer in time")
        return left

    def _reason(self, error: OSError) -> str:
        if isinstance(error, socket.timeout):
            return "no answer in time"
        return (error.strerror or str(error)).lower()[:200]

    def _send(self, line: str) -> None:
        try:
            self._socket.settimeout(self._left())
            self._socket.sendall(f"{line}\n".encode())
        except OSError as error:
            raise _Failure(self._reason(error)) from None

    def _receive(self) -> bytes:
        try:
            self._socket.settimeout(self._left())
            return self._socket.recv(65536)
        except OSError as error:
            raise _Failure(self._reason(error)) from None

    def _line(self) -> str:
        while b"\n" not in self._data:
            received = self._receive()
            if not received:
                raise _Failure(_CLOSED)
            self._data += received
            if len(self._data) > _LONGEST_LINE and b"\n" not in self._data:
                raise _Failure("not a NCCL RAS service: the first line has no end")
        line, _, self._data = self._data.partition(b"\n")
        return line.decode("utf-8", "replace")[:_LONGEST_LINE]

    def _handshake(self) -> int:
        self._send(f"CLIENT PROTOCOL {_PROTOCOL}")
        try:
            line = self._line()
        except _Failure as failure:
            if str(failure) != _CLOSED:
                raise
            line = _TLS_ALERT
        if line.startswith(_TLS_ALERT):
            raise _Failure(f"{_CLOSED} before it answered: no NCCL RAS service, or it expects {_TLS}")
        words = line.split()
        if [word.upper() for word in words[:2]] != ["SERVER", "PROTOCOL"] or not "".join(words[2:3]).isdigit():
            raise _Failure("not a NCCL RAS service")
        return min(int(words[2][:9]), 2**31)

    def status(self) -> tuple[str, str, str]:
        """Query the status: (form, text, why the text is incomplete). Raises _Failure without any text."""
        self._send(f"TIMEOUT {max(1, int(self._left() - _SPARE_S))}")
        if self._line().strip().upper() != "OK":
            raise _Failure("the RAS service refused TIMEOUT")
        self._send("SET FORMAT json")
        form = "json" if self._line().strip().upper() == "OK" else "text"  # an older server does not know SET FORMAT
        self._send("VERBOSE STATUS")
        parts, size = [self._data], len(self._data)
        try:
            while size <= _MOST_BYTES and (received := self._receive()):
                parts.append(received)
                size += len(received)
        except _Failure as failure:
            return form, self._text(parts), str(failure)
        return form, self._text(parts), f"more than {_MOST_BYTES >> 20} MiB" if size > _MOST_BYTES else ""

    @staticmethod
    def _text(parts: list[bytes]) -> str:
        return b"".join(parts)[:_MOST_BYTES].decode("utf-8", "replace")
