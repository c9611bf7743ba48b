"""From a name to a connection that greets as ssh does, and on to the login: one host after another in each thread.

Every stage has its own deadline. A host that does not answer occupies one of many threads; those that answer share a
few places to log in, as a login costs processor time here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.transports.ssh_login import NeedsOpenSsh, Refused, Retry
from distdiag.cluster.transports.threads import Limits, Threads
from distdiag.facts.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.cluster.hosts import Host
    from distdiag.cluster.transports import Arrivals
    from distdiag.cluster.transports.ssh_config import SshSettings
    from distdiag.cluster.transports.ssh_login import ChannelLink, Login

    Address = tuple[int, tuple[object, ...]]
    """Family, and address as connect() takes it."""

_ATTEMPTS = 3
_WIDTH = 256
"""Hosts on their way at a time."""
_BYTES = 65536
_GREETING_BYTES = 4096
_KNOCK = b"SSH-2.0-distdiag\r\n\r\n"
_KNOCK_S = 1.0
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6, "any": socket.AF_UNSPEC}
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_DROPPED = (
    "another program may listen there; or sshd drops connections: too many at once, or not allowed (MaxStartups, "
    "PerSourcePenalties, hosts.deny): check its log"
)
_FDS_PER_HOST = 3
"""The connection, and the pipe by which paramiko signals that there is something to read."""
_SPARE_FDS = 64


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


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds for each stage."""

    resolve_s: float = 10.0
    connect_s: float = 5.0
    banner_s: float = 10.0
    login_s: float = 20.0


@dataclass(frozen=True)
class Target:
    """One host on its way."""

    host: Host
    settings: SshSettings


class Connector:
    """Connects to hosts and logs in; `width` logins at a time."""

    def __init__(
        self, patience: Patience, login: Login, width: int, by_openssh: Callable[[Target, Arrivals], None]
    ) -> None:
        self._patience = patience
        self._by_openssh = by_openssh
        self._login = login
        self._threads = Threads(_WIDTH, "ssh")
        self._logins = threading.Semaphore(width)
        self._limits = Limits()
        self._room = Room()
        self._closed = False

    def submit(self, target: Target, arrivals: Arrivals) -> None:
        """Have a thread reach a host; its link, or why there is none, goes to `arrivals`."""
        self._threads.submit(self._reach, target, arrivals)

    def close(self) -> None:
        """Begin nothing more."""
        self._closed = True
        self._threads.close()

    def _reach(self, target: Target, arrivals: Arrivals) -> None:
        name = target.host.name
        if not self._room.take(sum((self._patience.connect_s, self._patience.banner_s, self._patience.login_s))):
            words = f"no file descriptor left: the limit of {self._room.limit} is enough for {self._room.hosts} hosts"
            hint = "raise the limit (ulimit -n 8192), or use fewer hosts at once"
            arrivals.refuse(name, HostError(state=HostState.FAILED, stage="connect", message=words, hint=hint))
            return
        try:
            link = self._try(target, arrivals)
        except NeedsOpenSsh:
            self._by_openssh(target, arrivals)
        except Refused as error:
            arrivals.refuse(name, error.refusal)
        except Exception as error:  # noqa: BLE001 - a thread has no caller that could catch it
            arrivals.refuse(name, HostError(state=HostState.FAILED, stage="connect", message=repr(error)))
        else:
            if link is not None:
                link.when_dropped = self._room.give_back
                arrivals.link(name, link)
                return
        self._room.give_back()

    def _try(self, target: Target, arrivals: Arrivals) -> ChannelLink | None:
        """Reach a host, up to _ATTEMPTS times: sshd drops connections when too many come at once. Raises Refused."""
        addresses = self._resolve(target, arrivals)
        for attempt in range(1, _ATTEMPTS + 1):
            if self._closed or not addresses:
                return None
            try:
                return self._try_once(target, addresses, arrivals)
            except Retry:
                if attempt == _ATTEMPTS:
                    raise
                time.sleep(0.2 + random.random() * 0.5 * attempt)
        return None

    def _try_once(self, target: Target, addresses: list[Address], arrivals: Arrivals) -> ChannelLink | None:
        name, port = target.host.name, target.settings.port
        arrivals.stage(name, "connect")
        connection = self._connect(addresses, port)
        try:
            arrivals.stage(name, "banner")
            self._await_greeting(connection, port)
            connection.settimeout(None)
            with self._logins:
                if self._closed:
                    connection.close()
                    return None
                arrivals.stage(name, "login")
                return self._login.enter(connection, target.settings)
        except Exception:
            connection.close()
            raise

    def _resolve(self, target: Target, arrivals: Arrivals) -> list[Address]:
        """Return the host's addresses; none if the name server was too slow, which is reported by then."""
        name, port, limit_s = target.settings.hostname, target.settings.port, self._patience.resolve_s
        late: list[bool] = []

        def give_up() -> None:
            late.append(True)
            words = f"the name server did not answer within {limit_s:g} s"
            refusal = HostError(state=HostState.UNKNOWN_NAME, stage="resolve", message=words)
            arrivals.refuse(target.host.name, refusal)

        try:
            with self._limits.within(limit_s, give_up):
                found = socket.getaddrinfo(name, port, _FAMILIES[target.settings.address_family], socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if late:
                return []
            words = (getattr(error, "strerror", None) or str(error)).lower()
            words = words if name == target.host.name else f"{name}: {words}"
            raise Refused(HostState.UNKNOWN_NAME, "resolve", words) from error
        return [] if late else [(entry[0], entry[4]) for entry in found]

    def _connect(self, addresses: list[Address], port: int) -> socket.socket:
        """Connect to the first address that answers. Raises Refused."""
        limit_s, tried = self._patience.connect_s, dict[str, None]()
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

    def _await_greeting(self, connection: socket.socket, port: int) -> None:
        """Wait for the banner without taking it, as paramiko wants to read it itself. Raises Refused or Retry.

        Servers of other protocols wait for the client to begin: shortly before the deadline we do, to see what it is.
        """
        patience_s = self._patience.banner_s
        knock_s = min(_KNOCK_S, patience_s / 2)
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
            if said.startswith(b"SSH-") or b"\nSSH-" in said:  # other lines may come first (RFC 4253, 4.2)
                break
            if b"\n" in said or len(said) >= _GREETING_BYTES:
                raise _no_banner(port, said, patience_s)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(said) + 1)  # wake up when there is more
        if knocked:  # what we sent is no beginning of a login
            words = f"its ssh banner came only after {patience_s - knock_s:g} s"
            raise Retry(HostState.TIMEOUT, "banner", words)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _peek(connection: socket.socket) -> bytes:
    """Return what was sent so far. Raises Retry if the connection was closed instead."""
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
    """Return the state, and what happened in words: for one address, and for the host."""
    if isinstance(error, TimeoutError):
        words = f"no answer within {limit_s:g} s"
        return HostState.FILTERED, words, f"no answer on port {port} within {limit_s:g} s"
    words = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno == errno.ECONNREFUSED:
        return HostState.REFUSED, words, f"nothing listens on port {port}"
    return (HostState.NO_ROUTE if error.errno in _UNREACHABLE else HostState.FAILED), words, words


def _no_banner(port: int, said: bytes, patience_s: float) -> Refused:
    """Return what the port does instead of greeting as ssh does."""
    if not said:
        words = f"port {port} accepts the connection but sends nothing for {patience_s:g} s"
        return Refused(HostState.TIMEOUT, "banner", words)
    line = said.split(b"\n")[0][:80].decode("ascii", "replace").strip()
    return Refused(HostState.NOT_SSH, "banner", f'port {port} is not ssh, it answers "{printable(line)}"')


class Room:
    """Descriptors for hosts; our limit of them is raised as far as we may."""

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = soft
        wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            self.limit = wanted
        self.hosts = self._free = max(4, (self.limit - _SPARE_FDS) // _FDS_PER_HOST)
        self._changed = threading.Condition()

    def take(self, patience_s: float) -> bool:
        """Take one host's share; False if none was given back for `patience_s` seconds."""
        with self._changed:
            while not self._free:
                if not self._changed.wait(patience_s):
                    return False
            self._free -= 1
            return True

    def give_back(self) -> None:
        """Return one host's share."""
        with self._changed:
            self._free += 1
            self._changed.notify_all()
