"""Hosts behind a bastion, or a chain of them (ProxyJump): one connection to it leads to all of them."""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.hosts import parse_hosts
from distdiag.cluster.transports import ssh_config
from distdiag.cluster.transports.ssh_connect import ATTEMPTS
from distdiag.cluster.transports.ssh_login import Refused, Retry
from distdiag.cluster.transports.threads import Threads
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.cluster.transports import Arrivals
    from distdiag.cluster.transports.ssh_config import SshSettings
    from distdiag.cluster.transports.ssh_connect import Patience, Target
    from distdiag.cluster.transports.ssh_login import Login

_WIDTH = 32
"""It is one connection to the bastion, so sshd's MaxStartups and MaxSessions there do not count."""


class NeedsOpenSsh(Exception):
    """What is set for a bastion is more than paramiko can do."""


class Bastion:
    """Logged in to once, when the first host behind it is wanted, and kept until the end."""

    def __init__(self, jumps: tuple[str, ...], login: Login, patience: Patience, config_file: str | None) -> None:
        self._jumps = jumps
        self._login = login
        self._patience = patience
        self._config_file = config_file
        self._threads = Threads(_WIDTH, "ssh-bastion")
        self._once = threading.Lock()
        self._opened: object = None
        self._trouble: Refused | NeedsOpenSsh | None = None

    def reach(self, target: Target, arrivals: Arrivals, by_openssh: Callable[[Target, Arrivals], None]) -> None:
        """Have a thread reach a host behind it; or `by_openssh`, if that is what the bastion needs."""
        self._threads.submit(self._reach, target, arrivals, by_openssh)

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.close()

    def _reach(self, target: Target, arrivals: Arrivals, by_openssh: Callable[[Target, Arrivals], None]) -> None:
        name = target.host.name
        try:
            for attempt in range(ATTEMPTS):
                try:
                    arrivals.stage(name, "connect")
                    channel = self._lead_to(target.settings)
                    arrivals.stage(name, "login")
                    arrivals.link(name, self._login.enter(channel, target.settings, through_bastion=True))
                    return
                except Retry:
                    if attempt == ATTEMPTS - 1:
                        raise
                    time.sleep(0.1 + random.random() * 0.4)
        except Refused as error:
            arrivals.refuse(name, error.refusal)
        except NeedsOpenSsh:
            by_openssh(target, arrivals)
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            arrivals.refuse(name, HostError(state=HostState.FAILED, stage="login", message=repr(error)))

    def _lead_to(self, settings: SshSettings) -> object:
        """Open a way to the host's ssh port. Raises Refused or NeedsOpenSsh."""
        with self._once:
            if self._opened is None and self._trouble is None:
                try:
                    self._opened = self._open()
                except NeedsOpenSsh as trouble:
                    self._trouble = trouble
                except Refused as error:
                    words = f"bastion {' and '.join(self._jumps)}: {error.refusal.message}"
                    self._trouble = Refused(replace(error.refusal, stage="bastion", message=words))
        if self._trouble is not None:
            raise self._trouble
        return self._login.open_way(self._opened, settings.hostname, settings.port, self._patience.connect_s)

    def _open(self) -> object:
        way: object = None
        for settings in self._settings():
            for attempt in range(ATTEMPTS):
                try:
                    way = self._login.authenticate(self._connect(way, settings), settings)
                    break
                except Retry:
                    if attempt == ATTEMPTS - 1:
                        raise
        return way

    def _settings(self) -> list[SshSettings]:
        found = []
        for jump in self._jumps:
            try:
                (host,) = parse_hosts(jump if jump.startswith("ssh://") else f"ssh://{jump}").hosts
                found.append(ssh_config.resolve(host, config_file=self._config_file))
            except DistdiagError as error:
                refusal = HostError(state=HostState.FAILED, stage="config", message=str(error), hint=error.hint)
                raise Refused(refusal) from error
        if found[0].proxy_jump or any(
            settings.needs_openssh or self._login.needs_openssh(settings) for settings in found
        ):
            raise NeedsOpenSsh
        return found

    def _connect(self, way: object, settings: SshSettings) -> object:
        if way is not None:
            return self._login.open_way(way, settings.hostname, settings.port, self._patience.connect_s)
        return _connect(settings, self._patience.connect_s)


def _connect(settings: SshSettings, timeout_s: float) -> socket.socket:
    """Connect to the first bastion. Raises Refused."""
    name, port = settings.hostname, settings.port
    try:
        return socket.create_connection((name, port), timeout=timeout_s)
    except socket.gaierror as error:
        state, words = HostState.UNKNOWN_NAME, f"cannot resolve {name}: {(error.strerror or str(error)).lower()}"
    except TimeoutError:
        state, words = HostState.FILTERED, f"no answer from {name} port {port} within {timeout_s:g} s"
    except OSError as error:
        words = f"{name} port {port}: {(error.strerror or str(error)).lower()}"
        state = HostState.REFUSED if error.errno == errno.ECONNREFUSED else HostState.NO_ROUTE
    raise Refused(HostError(state=state, stage="connect", message=words))
