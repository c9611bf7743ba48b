"""From a name to a connection that greets as ssh does. Every stage has its own deadline."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import time
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostState
from distdiag.cluster.transports.ssh_login import Refused, Retry
from distdiag.facts.text import first_line

if TYPE_CHECKING:
    from distdiag.cluster.transports.ssh_config import SshSettings

    Address = tuple[int, tuple[object, ...]]
    """Family, and address as connect() takes it."""

_BYTES = 65536
_GREETING_BYTES = 4096
_KNOCK = b"SSH-2.0-distdiag\r\n\r\n"
_CHECK_S = 1.0
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6, "any": socket.AF_UNSPEC}
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_DROPPED = (
    "another program may listen there; or sshd drops connections: too many at once, or not allowed (MaxStartups, "
    "PerSourcePenalties, hosts.deny): check its log"
)
_FDS_PER_HOST = 3
"""File descriptors per host: the connection, and paramiko's pipe for readiness."""
_SPARE_FDS = 64
_MOST_FILES = 65536


class ReadsAhead(socket.socket):
    """Reads all that the kernel has at once: half the calls, for each of which paramiko's threads pass on the GIL.

    select() no longer shows whether data is left once it was read without flags.
    """

    _held = b""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As of any socket."""
        if flags:
            return super().recv(size, flags)
        held = self._held or super().recv(_BYTES)
        self._held = held[size:]
        return held[:size]


def resolve(settings: SshSettings) -> list[Address]:
    """Return the host's addresses. Raises Refused."""
    name = settings.hostname
    try:
        found = socket.getaddrinfo(name, settings.port, _FAMILIES[settings.address_family], socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        words = (getattr(error, "strerror", None) or str(error)).lower()
        words = words if name == settings.host else f"{name}: {words}"
        raise Refused(HostState.UNKNOWN_NAME, "resolve", words) from error
    return [(entry[0], entry[4]) for entry in found]


def connect(addresses: list[Address], port: int, limit_s: float) -> socket.socket:
    """Connect to the first address that answers, each within `limit_s` seconds. Raises Refused."""
    tried = dict[str, None]()
    trouble = Refused(HostState.FAILED, "connect", "it has no address")
    for family, address in addresses:
        connection = ReadsAhead(family, socket.SOCK_STREAM)
        connection.settimeout(limit_s)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            state, words, message = _not_connected(error, port, limit_s)
            tried[f"{address[0]} port {port}: {words}"] = None
            trouble = Refused(state, "connect", message, evidence=tuple(tried))
        else:
            return connection
    raise trouble


def await_greeting(connection: socket.socket, port: int, patience_s: float) -> None:
    """Wait for the banner without taking it, as paramiko wants to read it itself. Raises Refused or Retry.

    Servers of other protocols wait for the client to begin: shortly before the deadline we do, to see what it is.
    """
    knock_s = min(_CHECK_S, patience_s / 2)
    deadline, knocked, said = time.monotonic() + patience_s - knock_s, False, b""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 and knocked:
            raise _no_banner(port, said, patience_s)
        if left_s <= 0:
            knocked, deadline = True, deadline + knock_s
            with contextlib.suppress(OSError):
                connection.send(_KNOCK)
        if not poll.poll(max(0.0, left_s) * 1000):
            continue
        said = _peek(connection)
        if said.startswith(b"SSH-") or b"\nSSH-" in said:  # other lines may precede (RFC 4253, 4.2)
            break
        if b"\n" in said or len(said) >= _GREETING_BYTES:
            raise _no_banner(port, said, patience_s)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(said) + 1)  # wake up on more data
    if knocked:  # our probe is no valid login
        words = f"its ssh banner came only after {patience_s - knock_s:g} s"
        raise Retry(HostState.TIMEOUT, "banner", words)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _peek(connection: socket.socket) -> bytes:
    """Return the data received so far. Raises Retry if the connection was closed instead."""
    try:
        said = connection.recv(_GREETING_BYTES, socket.MSG_PEEK)
    except OSError as error:
        said, words = b"", (error.strerror or str(error)).lower()
    else:
        words = "it closed the connection without an ssh banner"
    if not said:
        raise Retry(HostState.NOT_SSH, "banner", words, hint=_DROPPED)
    return said


def _not_connected(error: OSError, port: int, limit_s: float) -> tuple[HostState, str, str]:
    """Return the state, and the error in words: for one address, and for the host."""
    if isinstance(error, TimeoutError):
        words = f"no answer within {limit_s:g} s"
        return HostState.FILTERED, words, f"no answer on port {port} within {limit_s:g} s"
    words = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno == errno.ECONNREFUSED:
        return HostState.REFUSED, words, f"nothing listens on port {port}"
    return (HostState.NO_ROUTE if error.errno in _UNREACHABLE else HostState.FAILED), words, words


def _no_banner(port: int, said: bytes, patience_s: float) -> Refused:
    """Return the refusal for a port without an ssh greeting."""
    if not said:
        words = f"port {port} accepts the connection but sends nothing for {patience_s:g} s"
        return Refused(HostState.TIMEOUT, "banner", words)
    return Refused(HostState.NOT_SSH, "banner", f'port {port} is not ssh, it answers "{first_line(said)}"')


def raise_file_limit() -> int:
    """Raise our limit of open files to the maximum; return the number of hosts it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(4, (limit - _SPARE_FDS) // _FDS_PER_HOST)
