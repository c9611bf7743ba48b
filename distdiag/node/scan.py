"""Tries many ports of many hosts at the same time, and says what each one answered.

One connect each; the kernel itself sends a SYN again after 1 and after 3 seconds, so three are sent before an answer
counts as missing. What is open is listened to for a moment, then asked one harmless line, to tell who it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import time
from dataclasses import dataclass
from typing import NamedTuple

from distdiag.node import network, patience
from distdiag.node.wire import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OPEN, CLOSED, FILTERED, REJECTED, NO_ROUTE, NAME, DENIED = (
    *("open", "closed", "filtered", "rejected", "no-route", "name", "denied"),
)
_ALL_STATES = (OPEN, CLOSED, FILTERED, REJECTED, NO_ROUTE, NAME, DENIED)
_STATES = {
    errno.ECONNREFUSED: CLOSED,
    errno.ETIMEDOUT: FILTERED,
    errno.EHOSTUNREACH: REJECTED,
    errno.EHOSTDOWN: REJECTED,
    errno.ENOPROTOOPT: REJECTED,
    errno.EMSGSIZE: REJECTED,
    errno.ECONNRESET: CLOSED,
    errno.ENETUNREACH: NO_ROUTE,
    errno.EADDRNOTAVAIL: NO_ROUTE,
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
}
"""What connect(2) says -> the state of the port. ICMP "port unreachable" reads as closed: sockets cannot tell."""
_AT_ONCE = 2048
_START = 64
_LOOK_S = 0.02
_BANNER_S = 0.25
_ANSWER_S = 0.7
_REFUSED = os.strerror(errno.ECONNREFUSED)
_QUESTION = b"HEAD / HTTP/1.0\r\n\r\n"
_RESOLVE_S = 5.0


@dataclass(frozen=True)
class Tried:
    """One port of one host.

    `state`: open, closed (reachable, nobody listens), filtered (no answer), rejected (somebody on the way, or this
    machine's kernel, said no), no-route, name (does not resolve), denied (this machine does not let us). `said` is the
    first line that an open port said; `hung_up`: it closed the connection instead. `seconds` until the state was known.
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
            raise ValueError(f"a port that is {self.state[:20]!r}")


class _Target(NamedTuple):
    """One port to try, at an address of the host."""

    host: str
    port: int
    address: str


def scan(targets: Iterable[tuple[str, int]], *, timeout_s: float) -> Iterator[Tried]:
    """Try all targets, (host, port), and yield each as soon as it is known."""
    wanted = list(dict.fromkeys(targets))
    hosts = dict.fromkeys(host for host, _ in wanted)
    known = {host: ((host,), "") for host in hosts if network.is_address(host)}
    names = [host for host in hosts if host not in known]
    addresses, late = patience.each(names, network.resolve, patience_s=_RESOLVE_S) if names else ({}, [])
    addresses.update(known)
    todo = []
    for host, port in wanted:
        if host in late:
            yield Tried(host, port, "", NAME, "the resolver does not answer")
        elif not addresses[host][0]:
            yield Tried(host, port, "", NAME, addresses[host][1])
        else:
            todo.append(_Target(host, port, addresses[host][0][0]))
    yield from _Scan(todo[::-1], timeout_s).run()


class _Scan:
    """Many connections under way."""

    def __init__(self, todo: list[_Target], timeout_s: float) -> None:
        self._todo = todo
        self._timeout_s = timeout_s
        self._width = _room()
        self._selector = selectors.DefaultSelector()
        self._interfaces: dict[str, str] = {}

    def run(self) -> Iterator[Tried]:
        running: set[_Try] = set()
        check_at = 0.0
        while self._todo or running:
            # A few at a time, so that answers are taken while others are still being asked.
            for _ in range(min(len(self._todo), self._width - len(running), _START)):
                target = self._todo.pop()
                began = time.monotonic()
                connection, status = _ask(target)
                if status == errno.ECONNREFUSED:
                    connection.close()
                    yield _refused(target, time.monotonic() - began)
                    continue
                one = _Try(target, connection, status, self._selector)
                if one.is_over:
                    yield self._finished(one)
                else:
                    running.add(one)
            if not running:
                continue
            now = time.monotonic()  # before the look: if we are held up after it, nobody is late for that
            for key, _ in self._selector.select(0 if self._todo and len(running) < self._width else _LOOK_S):
                one = key.data
                one.go_on()
                if one.is_over:
                    running.discard(one)
                    yield self._finished(one)
            if now >= check_at:
                check_at = now + _LOOK_S
                yield from self._late(running, now)
        self._selector.close()

    def _late(self, running: set[_Try], now: float) -> Iterator[Tried]:
        """Tell those that waited long enough."""
        for one in [one for one in running if now > one.deadline(self._timeout_s)]:
            one.late()
            if one.is_over:
                running.discard(one)
                yield self._finished(one)

    def _finished(self, one: _Try) -> Tried:
        one.close()
        local = one.local_address
        if local and local not in self._interfaces:
            self._interfaces[local] = network.interface_of(local) or ""
        return Tried(
            one.target.host,
            one.target.port,
            one.target.address,
            one.state,
            one.error,
            local,
            self._interfaces.get(local, ""),
            one.said,
            one.hung_up,
            one.rtt_s,
            round(time.monotonic() - one.began, 4),
        )


def _ask(target: _Target) -> tuple[socket.socket, int]:
    """Begin to connect; gives the error if it is known, else 0: the refusal of a near host is often there at once."""
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    status = connection.connect_ex((target.address, target.port))
    if status == errno.EINPROGRESS:
        status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return connection, status


def _refused(target: _Target, seconds: float) -> Tried:
    """Give what most ports of a host come to, without a _Try, which costs more than the connection."""
    return Tried(target.host, target.port, target.address, CLOSED, _REFUSED, rtt_s=seconds, seconds=round(seconds, 4))


def _room() -> int:
    """Tell how many connections may be open at once: below our limit of descriptors, which is raised if it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * _AT_ONCE and (hard == resource.RLIM_INFINITY or hard > soft):
        with contextlib.suppress(OSError, ValueError):
            more = 2 * _AT_ONCE if hard == resource.RLIM_INFINITY else min(2 * _AT_ONCE, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    return max(16, min(_AT_ONCE, soft - 64))


class _Try:
    """One connection: connecting, then listening for a banner, then waiting for an answer."""

    def __init__(
        self, target: _Target, connection: socket.socket, status: int, selector: selectors.BaseSelector
    ) -> None:
        self.target = target
        self.state = self.error = self.said = self.local_address = ""
        self.hung_up = self.is_over = False
        self.rtt_s: float | None = None
        self.began = self._since = time.monotonic()
        self._selector = selector
        self._registered = self._asked = False
        self._socket = connection
        if status:
            self._failed(status)
        else:
            selector.register(self._socket, selectors.EVENT_WRITE, self)
            self._registered = True

    def deadline(self, timeout_s: float) -> float:
        """Give when this stage is over."""
        if self.rtt_s is None:
            return self._since + timeout_s
        return self._since + (_ANSWER_S if self._asked else _BANNER_S)

    def go_on(self) -> None:
        """Something happened at the socket."""
        if self.rtt_s is None:
            status = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                self._failed(status)
                return
            self.rtt_s = time.monotonic() - self.began
            self._since = time.monotonic()
            self.local_address = str(self._socket.getsockname()[0])
            self._selector.modify(self._socket, selectors.EVENT_READ, self)
            return
        try:
            heard = self._socket.recv(256)
        except OSError:
            heard = b""
        self.said, self.hung_up = _first_line(heard), not heard
        self._open()

    def late(self) -> None:
        """The stage took too long."""
        if self.rtt_s is None:
            self._failed(errno.ETIMEDOUT)
        elif self._asked:
            self._open()
        else:
            self._asked, self._since = True, time.monotonic()
            with contextlib.suppress(OSError):
                self._socket.send(_QUESTION)

    def close(self) -> None:
        """End the connection."""
        if self._registered:
            self._selector.unregister(self._socket)
        self._socket.close()

    def _open(self) -> None:
        self.state, self.is_over = OPEN, True

    def _failed(self, status: int) -> None:
        self.state = _STATES.get(status, REJECTED)
        if status == errno.ECONNREFUSED:
            self.rtt_s = time.monotonic() - self.began
        self.error = "no answer" if status == errno.ETIMEDOUT else os.strerror(status)
        self.is_over = True


def _first_line(heard: bytes) -> str:
    line = heard.strip().split(b"\n")[0][:80].decode("ascii", "replace").strip()
    return printable(line)
