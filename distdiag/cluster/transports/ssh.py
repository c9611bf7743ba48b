"""Many hosts over ssh: plain ones by paramiko from one process, all others by OpenSSH's own client.

Each stage (resolve, connect, banner, login, start) has a deadline of its own that begins with the stage.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import threading
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.transports import Transport, known_hosts, ssh_config
from distdiag.cluster.transports.command import CommandTransport
from distdiag.cluster.transports.ssh_connect import Connector, Patience, Target
from distdiag.cluster.transports.ssh_login import Login
from distdiag.cluster.transports.threads import Threads
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host
    from distdiag.cluster.transports import Arrivals
    from distdiag.cluster.transports.ssh_config import SshSettings


class OpenSshTransport(CommandTransport):
    """`ssh` with the user's own configuration; it never asks, and never takes an unknown host key unless told to."""

    name = "openssh"

    def __init__(
        self, shell: str, shell_lines: bytes, *, width: int | None = None, accept_new: bool = False, connect_s: float
    ) -> None:
        super().__init__(shell, shell_lines, width=width)
        self._accept_new = accept_new
        self._connect_s = connect_s
        self._settings: dict[str, SshSettings] = {}

    def bring(self, target: Target, arrivals: Arrivals) -> None:
        """Start it for one host, and return when it has logged in or was given up, so that the caller paces us."""
        host = target.host
        self._settings[host.name] = target.settings
        arrivals.stage(host.name, "connect")
        link = self._start(host, arrivals)
        if link is not None:
            link.settled.wait()

    def argv(self, host: Host) -> list[str]:
        settings = self._settings.get(host.name)
        files = settings.user_known_hosts if settings is not None else ("~/.ssh/known_hosts",)
        words = ["ssh", "-T", "-a", "-x", *self._options(files)]
        words += [f"-oHostName={host.address}"] if host.address else []
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
        if self._accept_new:  # the first file is the one that is written
            files = " ".join(f'"{file}"' for file in (known_hosts.own_file(), *known_hosts_files))
            options += [f"UserKnownHostsFile={files}", "HashKnownHosts=no"]
        return [f"-o{option}" for option in options]

    def _proxy(self, jumps: Sequence[str]) -> str:
        """Return the ProxyCommand for these hosts: ssh's own ProxyJump would not pass our strictness on to them."""
        *before, last = jumps
        words = ["ssh", *self._options(("~/.ssh/known_hosts",)), "-W", "[%h]:%p"]
        if before:
            words += ["-oProxyCommand=" + self._proxy(before).replace("%", "%%")]
        return shlex.join([*words, "--", f"ssh://{last}"])


_THREADS_PER_CORE = 16
_MAX_THREADS = 64
_BEHIND_BASTION = 8
"""Logins at a time through other hosts: sshd accepts 10 by default (MaxStartups), and each opens its own there."""
_STAGES = ("resolve_s", "connect_s", "banner_s", "login_s")


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
        """`command` is run on every host and sent `first_words`; `stage_s` overrides the patience of all stages."""
        patience = Patience() if stage_s is None else Patience(**dict.fromkeys(_STAGES, stage_s))
        self._config_file = config_file
        self._accept_new = accept_new
        self._login = Login(command, first_words, patience.login_s, accept_new=accept_new)
        width = fanout or min(_MAX_THREADS, _THREADS_PER_CORE * (os.cpu_count() or 1))
        self._connector = Connector(patience, self._login, width, self._by_openssh)
        self._openssh = OpenSshTransport(
            command.removeprefix("exec "), first_words, accept_new=accept_new, connect_s=patience.connect_s
        )
        self._direct = Threads(self._openssh.width, "openssh")
        self._proxied = Threads(_BEHIND_BASTION, "openssh-proxied")
        logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)  # it would print tracebacks from its threads

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        threading.Thread(target=self._reach, args=(list(hosts), arrivals), daemon=True).start()

    def explain(self, host: Host) -> str:
        return self._openssh.explain(host)

    def close(self) -> None:
        for closed in (self._direct, self._proxied, self._connector):
            closed.close()

    def _reach(self, hosts: list[Host], arrivals: Arrivals) -> None:
        try:
            if self._accept_new:
                known_hosts.make_own_file()
            found = ssh_config.resolve_all(hosts, config_file=self._config_file)
            for host, settings in zip(hosts, found, strict=True):
                if isinstance(settings, DistdiagError):
                    refusal = HostError(
                        state=HostState.FAILED, stage="config", message=str(settings), hint=settings.hint
                    )
                    arrivals.refuse(host.name, refusal)
                elif not _has_paramiko() or settings.needs_openssh or self._login.needs_openssh(settings):
                    self._by_openssh(Target(host, settings), arrivals)
                else:
                    self._connector.submit(Target(host, settings), arrivals)
        except Exception as error:  # noqa: BLE001 - a thread has no caller that could catch it
            for host in hosts:
                refusal = HostError(state=HostState.FAILED, stage="config", message=f"cannot set up ssh: {error!r}")
                arrivals.refuse(host.name, refusal)

    def _by_openssh(self, target: Target, arrivals: Arrivals) -> None:
        threads = self._proxied if target.settings.proxied else self._direct
        threads.submit(self._openssh.bring, target, arrivals)


def _has_paramiko() -> bool:
    """Return whether paramiko is installed: distdiag.pyz comes without it, and OpenSSH's client does its work."""
    return importlib.util.find_spec("paramiko") is not None
