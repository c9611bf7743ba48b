"""Many hosts over ssh from one process, by paramiko: all connections at once, logins by a bounded number of threads.

A host that does not answer holds up nobody: connecting costs a descriptor, not a thread. Each stage (resolve, connect,
banner, login, start) has a deadline of its own that begins with the stage.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import random
import resource
import selectors
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import Host, parse_hosts
from distdiag.cluster.rows import HostState, Refusal
from distdiag.cluster.transports import Arrivals, Transport, ssh_config
from distdiag.cluster.transports.openssh import OpenSshTransport
from distdiag.cluster.transports.ssh_login import Login, Refused, Retry
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.cluster.transports.ssh_config import SshSettings

_THREADS_PER_CORE = 16
_MAX_THREADS = 64
_AT_ONE_BASTION = 8
"""sshd starts to drop connections at 10 that have not logged in (MaxStartups 10:30:100)."""
_FDS_PER_HOST = 4
_SPARE_FDS = 64
_ATTEMPTS = 3
_RESOLVERS = 16
_GREETING_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds for each stage."""

    resolve_s: float = 10.0
    connect_s: float = 5.0
    banner_s: float = 10.0
    login_s: float = 20.0


@dataclass(eq=False)
class _Target:
    """One host on its way."""

    host: Host
    settings: SshSettings
    addresses: list[tuple[int, tuple[object, ...]]] = field(default_factory=list)
    attempts: int = 0
    deadline: float = 0.0
    socket: socket.socket | None = None
    refusal: Refusal | None = None


class SshTransport(Transport):
    """Logs in to hosts and starts a shell there."""

    name = "ssh"

    def __init__(
        self,
        command: str,
        first_words: bytes,
        *,
        fanout: int | None = None,
        stage_s: float | None = None,
        accept_new: bool = False,
        config_file: str | None = None,
    ) -> None:
        """`command` is run on every host and sent `first_words`; `stage_s` overrides the patience of all stages.

        Raises:
            DistdiagError: ssh's configuration cannot be read.
        """
        self.patience = Patience() if stage_s is None else Patience(**dict.fromkeys(_STAGES, stage_s))
        self._command = command
        self._words = first_words
        self._config_file = config_file
        self._threads = fanout or min(_MAX_THREADS, _THREADS_PER_CORE * (os.cpu_count() or 1))
        self._login = Login(command, first_words, self.patience.login_s, accept_new=accept_new)
        self._openssh = OpenSshTransport(
            command.removeprefix("exec "), first_words, accept_new=accept_new, connect_s=self.patience.connect_s
        )
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="ssh-login")
        self._bastions: dict[tuple[str, ...], _Bastion] = {}
        self._lock = threading.Lock()
        self._closed = False
        logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)  # it would print tracebacks from its threads

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        threading.Thread(target=self._reach, args=(list(hosts), arrivals), daemon=True).start()

    def explain(self, host: Host) -> str:
        return self._openssh.explain(host)

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._login.close()

    def _reach(self, hosts: list[Host], arrivals: Arrivals) -> None:
        try:
            found = ssh_config.resolve_all(hosts, config_file=self._config_file)
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            found = [DistdiagError(f"ssh's configuration cannot be read: {error}")] * len(hosts)
        direct: list[_Target] = []
        for host, settings in zip(hosts, found, strict=True):
            if isinstance(settings, DistdiagError):
                refusal = Refusal(state=HostState.FAILED, stage="config", message=str(settings), hint=settings.hint)
                arrivals.refuse(host.name, refusal)
            elif settings.needs_openssh or self._login.needs_openssh(settings):
                self._pool.submit(self._by_openssh, host, arrivals)
            elif settings.proxy_jump:
                self._pool.submit(self._by_bastion, _Target(host, settings), arrivals)
            else:
                direct.append(_Target(host, settings))
        if direct:
            _Connector(direct, self, arrivals).go()

    def _by_openssh(self, host: Host, arrivals: Arrivals) -> None:
        arrivals.stage(host.name, "connect")
        self._openssh.start([host], arrivals)

    def _by_bastion(self, target: _Target, arrivals: Arrivals) -> None:
        try:
            bastion = self._bastion(target.settings.proxy_jump)
            with bastion.turn:
                arrivals.stage(target.host.name, "connect")
                for attempt in range(_ATTEMPTS):
                    try:
                        channel = bastion.lead_to(target.settings, self.patience.connect_s)
                        arrivals.stage(target.host.name, "login")
                        link = self._login.enter(channel, target.settings, through_bastion=True)
                        arrivals.link(target.host.name, link)
                        return
                    except Retry as error:
                        if attempt == _ATTEMPTS - 1:
                            raise Refused(error.refusal) from error
                        time.sleep(0.1 + random.random() * 0.4)
        except Refused as error:
            arrivals.refuse(target.host.name, error.refusal)
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            arrivals.refuse(target.host.name, Refusal(state=HostState.FAILED, stage="login", message=str(error)))

    def _bastion(self, jumps: tuple[str, ...]) -> _Bastion:
        with self._lock:
            if jumps not in self._bastions:
                self._bastions[jumps] = _Bastion(jumps, self)
            return self._bastions[jumps]

    def log_in(self, target: _Target, arrivals: Arrivals, again: Callable[[_Target, Refusal], None]) -> None:
        """Hand a connected socket to the threads that log in; `again` takes those that deserve another try."""
        self._pool.submit(self._log_in, target, arrivals, again)

    def _log_in(self, target: _Target, arrivals: Arrivals, again: Callable[[_Target, Refusal], None]) -> None:
        assert target.socket is not None
        name = target.host.name
        if self._closed:
            target.socket.close()
            return
        try:
            arrivals.stage(name, "login")
            arrivals.link(name, self._login.enter(target.socket, target.settings))
        except Retry as error:
            again(target, error.refusal)
        except Refused as error:
            arrivals.refuse(name, error.refusal)
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            arrivals.refuse(name, Refusal(state=HostState.FAILED, stage="login", message=f"{error!r}"))


_STAGES = ("resolve_s", "connect_s", "banner_s", "login_s")


class _Bastion:
    """A host, or a chain of them, through which others are reached; logged in to once, and kept until the end."""

    def __init__(self, jumps: tuple[str, ...], transport: SshTransport) -> None:
        self.turn = threading.Semaphore(_AT_ONE_BASTION)
        self._jumps = jumps
        self._transport = transport
        self._opened: object = None
        self._trouble: Refusal | None = None
        self._once = threading.Lock()

    def lead_to(self, settings: SshSettings, timeout_s: float) -> object:
        """Open a way to the host's ssh port. Raises Refused."""
        with self._once:
            if self._opened is None and self._trouble is None:
                try:
                    self._opened = self._open()
                except Refused as error:
                    words = f"its way leads through {' and '.join(self._jumps)}, where {error.refusal.message}"
                    self._trouble = Refusal(state=error.refusal.state, stage="bastion", message=words)
        if self._trouble is not None:
            raise Refused(self._trouble)
        return self._transport._login.open_way(self._opened, settings.hostname, settings.port, timeout_s)

    def _open(self) -> object:
        patience = self._transport.patience
        way: object = None
        for jump in self._jumps:
            (host,) = parse_hosts(jump if jump.startswith("ssh://") else f"ssh://{jump}").hosts
            settings = ssh_config.resolve(host, config_file=self._transport._config_file)
            if way is None:
                connection: object = _connect_plainly(settings, patience.connect_s)
            else:
                connection = self._transport._login.open_way(way, settings.hostname, settings.port, patience.connect_s)
            way = self._transport._login.authenticate(connection, settings)
        return way


class _Connector:
    """Connects to all targets at once and looks at what greets us, before any thread is spent on it."""

    def __init__(self, targets: list[_Target], transport: SshTransport, arrivals: Arrivals) -> None:
        self._transport = transport
        self._patience = transport.patience
        self._arrivals = arrivals
        self._selector = selectors.DefaultSelector()
        self._new: queue.SimpleQueue[_Target] = queue.SimpleQueue()
        self._bell, self._push = os.pipe()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._later: list[tuple[float, _Target]] = []
        self._open = len(targets)
        self._targets = targets
        self._room = _room_for_hosts()

    def go(self) -> None:
        """Work until every target is handed on or given up."""
        pool = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="ssh-resolve")
        for target in self._targets:
            target.deadline = time.monotonic() + self._patience.resolve_s
            pool.submit(self._resolve, target)
        unresolved = set(self._targets)
        ready: list[_Target] = []
        while self._open > 0 and not self._transport._closed:
            for key, _ in self._selector.select(0.05):
                if key.data is None:
                    os.read(self._bell, 65536)
                else:
                    key.data[0](key.data[1])
            now = time.monotonic()
            while not self._new.empty():
                target = self._new.get()
                if target in unresolved or target.attempts:
                    unresolved.discard(target)
                    ready.append(target)
            ready += [target for at, target in self._later if at <= now]
            self._later = [(at, target) for at, target in self._later if at > now]
            while ready and len(self._selector.get_map()) <= self._room:
                self._begin(ready.pop(0))
            self._give_up_late(now, unresolved)
        pool.shutdown(wait=False, cancel_futures=True)

    def _resolve(self, target: _Target) -> None:
        families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6, "any": socket.AF_UNSPEC}
        settings = target.settings
        try:
            found = socket.getaddrinfo(
                settings.hostname, settings.port, families[settings.address_family], socket.SOCK_STREAM
            )
            target.addresses = [(entry[0], entry[4]) for entry in found]
        except (OSError, UnicodeError) as error:
            words = f"{settings.hostname} has no address: {getattr(error, 'strerror', None) or error}"
            target.refusal = Refusal(state=HostState.UNKNOWN_NAME, stage="resolve", message=words)
        self._offer(target)

    def _offer(self, target: _Target) -> None:
        self._new.put(target)
        os.write(self._push, b".")

    def _begin(self, target: _Target) -> None:
        """Connect to the next address of a target."""
        if not target.addresses:
            assert target.refusal is not None
            self._give_up(target, target.refusal)
            return
        self._arrivals.stage(target.host.name, "connect")
        family, address = target.addresses[0]
        target.deadline = time.monotonic() + self._patience.connect_s
        connection = socket.socket(family, socket.SOCK_STREAM)
        target.socket = connection
        connection.setblocking(False)
        try:
            if target.settings.bind_address:
                connection.bind((target.settings.bind_address, 0))
            status = connection.connect_ex(address)
        except OSError as error:
            status = error.errno or errno.EINVAL
        if status not in (0, errno.EINPROGRESS):
            self._not_connected(target, status)
            return
        self._selector.register(connection, selectors.EVENT_WRITE, (self._connected, target))

    def _connected(self, target: _Target) -> None:
        assert target.socket is not None
        self._selector.unregister(target.socket)
        status = target.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            self._not_connected(target, status)
            return
        self._arrivals.stage(target.host.name, "banner")
        target.deadline = time.monotonic() + self._patience.banner_s
        self._selector.register(target.socket, selectors.EVENT_READ, (self._greeted, target))

    def _greeted(self, target: _Target) -> None:
        """Look at the greeting without taking it: paramiko wants to read it itself."""
        assert target.socket is not None
        try:
            said = target.socket.recv(_GREETING_BYTES, socket.MSG_PEEK)
        except OSError as error:
            said, words = b"", error.strerror or str(error)
        else:
            words = "it closed the connection without a word"
        if not said:
            self._selector.unregister(target.socket)
            self._again(target, Refusal(state=HostState.NOT_SSH, stage="banner", message=words))
        elif b"SSH-" in said.split(b"\n")[-2 if said.endswith(b"\n") else -1] or b"\nSSH-" in said:
            self._selector.unregister(target.socket)
            target.socket.setblocking(True)
            self._open -= 1
            self._transport.log_in(target, self._arrivals, self._retry_login)
        elif b"\n" in said or len(said) >= _GREETING_BYTES:
            self._selector.unregister(target.socket)
            line = said.split(b"\n")[0][:80].decode("ascii", "replace").strip()
            words = f'port {target.settings.port} answers, and not with ssh: "{_printable(line)}"'
            self._give_up(target, Refusal(state=HostState.NOT_SSH, stage="banner", message=words))

    def _retry_login(self, target: _Target, refusal: Refusal) -> None:
        """Called by a login thread whose connection broke before it was logged in."""
        if target.attempts + 1 >= _ATTEMPTS or self._open <= 0:
            self._arrivals.refuse(target.host.name, refusal)
            return
        target.attempts += 1
        target.refusal = refusal
        self._open += 1
        self._offer(target)

    def _again(self, target: _Target, refusal: Refusal) -> None:
        """Try once more a little later: sshd drops connections when too many come at once."""
        if target.attempts + 1 >= _ATTEMPTS:
            self._give_up(target, refusal)
            return
        self._close(target)
        target.attempts += 1
        self._later.append((time.monotonic() + 0.2 + random.random() * 0.5 * target.attempts, target))

    def _not_connected(self, target: _Target, status: int) -> None:
        port = target.settings.port
        at = target.addresses.pop(0)[1][0]
        where = f"{at} port {port}"
        if status == errno.ECONNREFUSED:
            refusal = Refusal(state=HostState.REFUSED, stage="connect", message=f"nothing listens at {where}")
        elif status in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            words = f"{where}: {os.strerror(status).lower()}"
            refusal = Refusal(state=HostState.NO_ROUTE, stage="connect", message=words)
        elif status == errno.ETIMEDOUT:
            words = f"no answer from {where} within {self._patience.connect_s:g} s"
            refusal = Refusal(state=HostState.FILTERED, stage="connect", message=words)
        else:
            words = f"{where}: {os.strerror(status).lower()}"
            refusal = Refusal(state=HostState.FAILED, stage="connect", message=words)
        self._close(target)
        target.refusal = refusal
        self._begin(target)

    def _give_up_late(self, now: float, unresolved: set[_Target]) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is None or key.data[1].deadline > now:
                continue
            target = key.data[1]
            self._selector.unregister(key.fileobj)
            if key.data[0] == self._connected:
                self._not_connected(target, errno.ETIMEDOUT)
            else:
                words = (
                    f"port {target.settings.port} takes the connection and says nothing "
                    f"for {self._patience.banner_s:g} s"
                )
                self._give_up(target, Refusal(state=HostState.TIMEOUT, stage="banner", message=words))
        for target in [target for target in unresolved if target.deadline <= now]:
            unresolved.discard(target)
            words = f"the name server did not answer within {self._patience.resolve_s:g} s"
            self._give_up(target, Refusal(state=HostState.UNKNOWN_NAME, stage="resolve", message=words))

    def _give_up(self, target: _Target, refusal: Refusal) -> None:
        self._close(target)
        self._open -= 1
        self._arrivals.refuse(target.host.name, refusal)

    def _close(self, target: _Target) -> None:
        if target.socket is not None:
            target.socket.close()
            target.socket = None


def _connect_plainly(settings: SshSettings, timeout_s: float) -> socket.socket:
    """Connect to a bastion. Raises Refused."""
    try:
        return socket.create_connection((settings.hostname, settings.port), timeout=timeout_s)
    except socket.gaierror as error:
        words = f"{settings.hostname} has no address: {error.strerror}"
        raise Refused(Refusal(state=HostState.UNKNOWN_NAME, stage="bastion", message=words)) from error
    except TimeoutError as error:
        words = f"there is no answer from {settings.hostname} port {settings.port} within {timeout_s:g} s"
        raise Refused(Refusal(state=HostState.FILTERED, stage="bastion", message=words)) from error
    except OSError as error:
        words = f"{settings.hostname} port {settings.port}: {(error.strerror or str(error)).lower()}"
        state = HostState.REFUSED if error.errno == errno.ECONNREFUSED else HostState.NO_ROUTE
        raise Refused(Refusal(state=state, stage="bastion", message=words)) from error


def _room_for_hosts() -> int:
    """Raise our limit of descriptors as far as we may; how many hosts can be on their way within it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(8, (max(soft, wanted) - _SPARE_FDS) // _FDS_PER_HOST)


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in line)
