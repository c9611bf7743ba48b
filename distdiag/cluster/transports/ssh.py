"""Many hosts over ssh: plain ones by paramiko from one process, all others by OpenSSH's own client.

Each stage (resolve, connect, banner, login, start) has its own deadline.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import random
import shlex
import threading
import time
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.transports import Transport, known_hosts, ssh_config
from distdiag.cluster.transports.command import CommandTransport
from distdiag.cluster.transports.ssh_connect import await_greeting, connect, raise_file_limit, resolve
from distdiag.cluster.transports.ssh_login import Login, NeedsOpenSsh, Refused, Retry
from distdiag.cluster.transports.threads import Limits, Threads
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host
    from distdiag.cluster.transports import Arrivals
    from distdiag.cluster.transports.ssh_config import SshSettings
    from distdiag.cluster.transports.ssh_connect import Address
    from distdiag.cluster.transports.ssh_login import ChannelLink


class OpenSshTransport(CommandTransport):
    """`ssh` with the user's configuration, never interactive; accepts unknown host keys only with `accept_new`."""

    def __init__(self, shell: str, shell_lines: bytes, *, accept_new: bool, connect_s: float) -> None:
        super().__init__(shell, shell_lines)
        self._accept_new = accept_new
        self._connect_s = connect_s
        self._settings: dict[str, SshSettings] = {}

    def bring(self, host: Host, settings: SshSettings, arrivals: Arrivals) -> None:
        """Start it for one host, and return when it has logged in or was given up, so that the caller paces us."""
        self._settings[host.name] = settings
        arrivals.put(host.name, "connect")
        link = self._start(host, arrivals)
        if link is not None:
            link.settled.wait()

    def argv(self, host: Host) -> list[str]:
        settings = self._settings.get(host.name)
        files = settings.user_known_hosts if settings is not None else ("~/.ssh/known_hosts",)
        words = ["ssh", "-T", "-a", "-x", *self._options(files)]
        words += [f"-oProxyCommand={self._proxy(settings.jumps)}"] if settings is not None and settings.jumps else []
        words += ["-l", host.user] if host.user else []
        words += ["-p", str(host.port)] if host.port else []
        return [*words, "--", host.name, f"exec {self._shell}"]

    def _options(self, known_hosts_files: Sequence[str]) -> list[str]:
        options = [
            "BatchMode=yes",
            f"ConnectTimeout={max(1, round(self._connect_s))}",
            f"StrictHostKeyChecking={'accept-new' if self._accept_new else 'yes'}",
            "ServerAliveInterval=2",
            "ServerAliveCountMax=3",
        ]
        if os.path.exists(known_hosts.own_file()):  # ssh writes to the first file, with --accept-new
            files = " ".join(f'"{file}"' for file in (known_hosts.own_file(), *known_hosts_files))
            options += [f"UserKnownHostsFile={files}", "HashKnownHosts=no"]
        return [f"-o{option}" for option in options]

    def _proxy(self, jumps: Sequence[str]) -> str:
        """Return the ProxyCommand for these hosts: ssh's own ProxyJump would not pass our strictness on."""
        *before, last = jumps
        words = ["ssh", *self._options(("~/.ssh/known_hosts",)), "-W", "[%h]:%p"]
        if before:
            words += ["-oProxyCommand=" + self._proxy(before).replace("%", "%%")]
        return shlex.join([*words, "--", f"ssh://{last}"])


_LOGINS_PER_CORE = 16
_MAX_LOGINS = 64
_WIDTH = 256
"""Concurrent hosts: an unresponsive host occupies a thread; a login costs processor time here."""
_ATTEMPTS = 3
_BEHIND_BASTION = 8
"""Logins at a time through other hosts: sshd accepts 10 by default (MaxStartups), and each opens its own there."""
_RESOLVE_S, _CONNECT_S, _BANNER_S, _LOGIN_S = 10.0, 5.0, 10.0, 20.0


class SshTransport(Transport):
    """Logs in to hosts and starts a shell there."""

    def __init__(
        self,
        command: str,
        first_words: bytes,
        *,
        fanout: int | None = None,
        stage_s: float | None = None,
        accept_new: bool = False,
    ) -> None:
        """`command` is run on every host and sent `first_words`; `stage_s` overrides the patience of all stages."""
        patience = [stage_s or default_s for default_s in (_RESOLVE_S, _CONNECT_S, _BANNER_S, _LOGIN_S)]
        self._resolve_s, self._connect_s, self._banner_s, login_s = patience
        self._accept_new = accept_new
        self._login = Login(command, first_words, login_s, accept_new=accept_new)
        self._limits = Limits()
        self._most_hosts = raise_file_limit()
        self._room = threading.Semaphore(self._most_hosts)
        self._logins = threading.Semaphore(fanout or min(_MAX_LOGINS, _LOGINS_PER_CORE * (os.cpu_count() or 1)))
        self._openssh = OpenSshTransport(
            command.removeprefix("exec "), first_words, accept_new=accept_new, connect_s=self._connect_s
        )
        self._plain = Threads(_WIDTH, "ssh")
        self._direct = Threads(self._openssh.width, "openssh")
        self._proxied = Threads(_BEHIND_BASTION, "openssh-proxied")
        self._closed = False
        logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)  # it would print tracebacks from its threads

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        threading.Thread(target=self._begin, args=(list(hosts), arrivals), daemon=True).start()

    def close(self) -> None:
        self._closed = True
        for threads in (self._plain, self._direct, self._proxied):
            threads.close()

    def _begin(self, hosts: list[Host], arrivals: Arrivals) -> None:
        try:
            if self._accept_new:
                known_hosts.make_own_file()
            found = ssh_config.resolve_all(hosts)
            has_paramiko = importlib.util.find_spec("paramiko") is not None  # distdiag.pyz lacks it
            for host, settings in zip(hosts, found, strict=True):
                if isinstance(settings, DistdiagError):
                    arrivals.put(host.name, _failed("config", str(settings), settings.hint))
                elif not has_paramiko or settings.needs_openssh or self._login.needs_openssh(settings):
                    self._by_openssh(host, settings, arrivals)
                else:
                    self._plain.submit(self._reach, host, settings, arrivals)
        except Exception as error:  # noqa: BLE001 - a thread has no caller that could catch it
            for host in hosts:
                arrivals.put(host.name, _failed("config", f"cannot set up ssh: {error}"))

    def _by_openssh(self, host: Host, settings: SshSettings, arrivals: Arrivals) -> None:
        threads = self._proxied if settings.proxied else self._direct
        threads.submit(self._openssh.bring, host, settings, arrivals)

    def _reach(self, host: Host, settings: SshSettings, arrivals: Arrivals) -> None:
        """Log in by paramiko, and pass the link or the refusal to `arrivals`."""
        if not self._room.acquire(timeout=self._connect_s + self._banner_s + _LOGIN_S):
            words = f"no file descriptor left: their limit is enough for {self._most_hosts} hosts"
            hint = "raise the limit (ulimit -n 8192), or use fewer hosts at once"
            arrivals.put(host.name, _failed("connect", words, hint))
            return
        link = None
        try:
            link = self._try(host.name, settings, arrivals)
            link.when_dropped = self._room.release
            arrivals.put(host.name, link)
        except NeedsOpenSsh:
            self._by_openssh(host, settings, arrivals)
        except Refused as error:
            arrivals.put(host.name, error.refusal)
        except Exception as error:  # noqa: BLE001 - a thread has no caller that could catch it
            arrivals.put(host.name, _failed("connect", repr(error)))
        finally:
            if link is None:
                self._room.release()

    def _try(self, name: str, settings: SshSettings, arrivals: Arrivals) -> ChannelLink:
        """Connect to a host in up to _ATTEMPTS tries: sshd drops connections beyond MaxStartups. Raises Refused."""
        words = f"the name server did not answer within {self._resolve_s:g} s"
        late = HostError(state=HostState.UNKNOWN_NAME, stage="resolve", message=words)
        with self._limits.within(self._resolve_s, functools.partial(arrivals.put, name, late)):
            addresses = resolve(settings)
        for attempt in range(1, _ATTEMPTS):
            with contextlib.suppress(Retry):
                return self._try_once(name, settings, addresses, arrivals)
            time.sleep(0.2 + random.random() * 0.5 * attempt)
        return self._try_once(name, settings, addresses, arrivals)

    def _try_once(self, name: str, settings: SshSettings, addresses: list[Address], arrivals: Arrivals) -> ChannelLink:
        arrivals.put(name, "connect")
        connection = connect(addresses, settings.port, self._connect_s)
        try:
            arrivals.put(name, "banner")
            await_greeting(connection, settings.port, self._banner_s)
            connection.settimeout(None)
            with self._logins:
                if self._closed:
                    raise Refused(HostState.FAILED, "login", "interrupted")
                arrivals.put(name, "login")
                return self._login.enter(connection, settings)
        except Exception:
            connection.close()
            raise


def _failed(stage: str, message: str, hint: str = "") -> HostError:
    return HostError(state=HostState.FAILED, stage=stage, message=message, hint=hint)
