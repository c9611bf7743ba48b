"""Tries many ports of many hosts in parallel, and reports the answer of each.

One non-blocking connect each, in parallel up to the limit of open files. The kernel repeats a SYN after 1 and after 3
seconds, so three are sent before an answer counts as missing. An open port gets a moment to send its banner, then a
harmless line, to identify it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import selectors
import socket
import time
from dataclasses import dataclass, field

from distdiag.facts import deadlines
from distdiag.facts.network import interfaces as network
from distdiag.facts.text import first_line
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OPEN, CLOSED, FILTERED, REJECTED, NO_ROUTE, NAME, DENIED = (
    *("open", "closed", "filtered", "rejected", "no-route", "name", "denied"),
)
_ALL_STATES = (OPEN, CLOSED, FILTERED, REJECTED, NO_ROUTE, NAME, DENIED)
_STATES = {
    errno.ECONNREFUSED: CLOSED,
    errno.ECONNRESET: CLOSED,
    errno.ETIMEDOUT: FILTERED,
    errno.ENETUNREACH: NO_ROUTE,
    errno.EADDRNOTAVAIL: NO_ROUTE,
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
}
"""Error of connect(2) -> state of the port; rejected for any other. ICMP "port unreachable" also yields ECONNREFUSED.
"""
_AT_ONCE = 1024
_START = 64
_TICK_S = 0.02
_BANNER_S = 0.25
_ANSWER_S = 0.7
_QUESTION = b"HEAD / HTTP/1.0\r\n\r\n"
_RESOLVE_S = 5.0


@record
class PortResult:
    """A port of a host.

    `state`: open, closed (reachable, nothing listens), filtered (no answer), rejected (by a device on the path, or by
    this machine's kernel), no-route, name (does not resolve), denied (this machine does not allow it). `said`: the
    first line sent by an open port; `hung_up`: it closed the connection instead. `seconds` until the state was known.
    """

    host: str
    port: int
    address: str
    state: str
    error: str = ""
    local_address: str = ""
    interface: str = ""
    said: str = ""
    hung_up: bool = False
    rtt_s: float | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.state not in _ALL_STATES:
            raise ValueError(f"unknown port state {self.state[:20]!r}")


@dataclass(eq=False)
class _Attempt:
    """A connection: connecting, then waiting for a banner, then for an answer; `until` ends each step."""

    host: str
    port: int
    address: str
    until: float
    began: float = field(default_factory=time.monotonic)
    rtt_s: float | None = None
    asked: bool = False

    def result(self, status: int = 0, data: bytes | None = None, local: str = "") -> PortResult:
        """Return the result for an error of connect(2), or for the data sent by an open port (None: no data)."""
        took = time.monotonic() - self.began
        words = "" if not status else "no answer" if status == errno.ETIMEDOUT else os.strerror(status)
        return PortResult(
            *(self.host, self.port, self.address),
            _STATES.get(status, REJECTED) if status else OPEN,
            words,
            local,
            (network.interface_of(local) or "") if local else "",
            first_line(data or b""),
            hung_up=data == b"",
            rtt_s=took if status == errno.ECONNREFUSED else self.rtt_s,
            seconds=round(took, 4),
        )


def scan(targets: Iterable[tuple[str, int]], *, timeout_s: float) -> Iterator[PortResult]:
    """Try all (host, port), each once; yield each result when known."""
    unique = list(dict.fromkeys(targets))
    hosts = dict.fromkeys(host for host, _ in unique)
    names = [host for host in hosts if not network.is_address(host)]
    resolved, late = deadlines.each(names, network.resolve, patience_s=_RESOLVE_S) if names else ({}, [])
    resolved |= {host: ((host,), "") for host in hosts if network.is_address(host)}
    resolved |= {host: ((), "the resolver does not answer") for host in late}
    for host, port in unique:
        if not resolved[host][0]:
            yield PortResult(host, port, "", NAME, resolved[host][1])
    waiting = [(host, port, resolved[host][0][0]) for host, port in unique if resolved[host][0]]
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    at_once = _AT_ONCE if most_files == resource.RLIM_INFINITY else max(16, min(_AT_ONCE, most_files - 64))
    with selectors.DefaultSelector() as selector:
        yield from _run(waiting[::-1], timeout_s, at_once, selector)


def try_port(address: str, port: int, *, timeout_s: float) -> str:
    """Return the state of one port. Sends no byte, as a job's own store may be listening."""
    connection, status = _connect(address, port)
    with connection:
        if not status:
            _, ready, _ = select.select([], [connection], [], timeout_s)
            status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if ready else errno.ETIMEDOUT
    return _STATES.get(status, REJECTED) if status else OPEN


def _run(
    waiting: list[tuple[str, int, str]], timeout_s: float, at_once: int, selector: selectors.BaseSelector
) -> Iterator[PortResult]:
    running: dict[socket.socket, _Attempt] = {}
    while waiting or running:
        # A few at a time, so that answers are read while other connects are still being started.
        for _ in range(min(len(waiting), at_once - len(running), _START)):
            attempt = _Attempt(*waiting.pop(), time.monotonic() + timeout_s)
            connection, status = _connect(attempt.address, attempt.port)
            if status:
                connection.close()
                yield attempt.result(status)
            else:
                running[connection] = attempt
                selector.register(connection, selectors.EVENT_WRITE, connection)
        now = time.monotonic()  # taken before select: a pause of this process after it makes no port late
        ready: set[socket.socket] = {
            key.data for key, _ in selector.select(0 if waiting and len(running) < at_once else _TICK_S)
        }
        for connection in [*ready, *(late for late, attempt in running.items() if now > attempt.until)]:
            if connection not in running:
                continue
            step = _go_on if connection in ready else _too_late
            result = step(connection, running[connection], selector)
            if result is not None:
                del running[connection]
                selector.unregister(connection)
                connection.close()
                yield result


def _connect(address: str, port: int) -> tuple[socket.socket, int]:
    """Start to connect; also return the error if already known, as with many refusals by near hosts."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    status = connection.connect_ex((address, port))
    return connection, connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_ERROR
    ) if status == errno.EINPROGRESS else status


def _go_on(connection: socket.socket, attempt: _Attempt, selector: selectors.BaseSelector) -> PortResult | None:
    """Handle an event: connected, refused, or data received."""
    if attempt.rtt_s is not None:
        try:
            data = connection.recv(256)
        except OSError:
            data = b""
        return attempt.result(data=data, local=str(connection.getsockname()[0]))
    status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if status:
        return attempt.result(status)
    attempt.rtt_s = time.monotonic() - attempt.began
    attempt.until = time.monotonic() + _BANNER_S
    selector.modify(connection, selectors.EVENT_READ, connection)
    return None


def _too_late(connection: socket.socket, attempt: _Attempt, selector: selectors.BaseSelector) -> PortResult | None:
    """Handle a timeout: no answer, or an open port that stays silent until it gets a request."""
    if attempt.rtt_s is None:
        return attempt.result(errno.ETIMEDOUT)
    if attempt.asked:
        return attempt.result(local=str(connection.getsockname()[0]))
    attempt.asked, attempt.until = True, time.monotonic() + _ANSWER_S
    with contextlib.suppress(OSError):
        connection.send(_QUESTION)
    return None
