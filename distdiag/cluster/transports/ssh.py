"""Many hosts over ssh from one process: each by paramiko, through a bastion, or by OpenSSH's own client.

Each stage (resolve, connect, banner, login, start) has a deadline of its own that begins with the stage.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.transports import Transport, known_hosts, ssh_config
from distdiag.cluster.transports.command import CommandTransport
from distdiag.cluster.transports.ssh_bastion import Bastion
from distdiag.cluster.transports.ssh_connect import Connector, Patience, Room, Target
from distdiag.cluster.transports.ssh_login import Login
from distdiag.cluster.transports.threads import Threads
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host
    from distdiag.cluster.transports import Arrivals


class OpenSshTransport(CommandTransport):
    """`ssh` with the user's own configuration; it never asks, and never takes an unknown host key unless told to."""

    name = "openssh"

    def __init__(
        self, shell: str, shell_lines: bytes, *, width: int | None = None, accept_new: bool = False, connect_s: float
    ) -> None:
        super().__init__(shell, shell_lines, width=width)
        self._accept_new = accept_new
        self._connect_s = connect_s

    def bring(self, host: Host, arrivals: Arrivals) -> None:
        """Start it for one host, and return when that has got somewhere or was given up: whoever calls paces us."""
        arrivals.stage(host.name, "connect")
        link = self._start(host, arrivals)
        if link is not None:
            link.settled.wait()

    def argv(self, host: Host) -> list[str]:
        options = [
            "BatchMode=yes",
            f"ConnectTimeout={max(1, round(self._connect_s))}",
            f"StrictHostKeyChecking={'accept-new' if self._accept_new else 'yes'}",
            "ServerAliveInterval=2",
            "ServerAliveCountMax=3",
            *([f"HostName={host.address}"] if host.address else []),
            *([f"UserKnownHostsFile={known_hosts.own_file()} ~/.ssh/known_hosts"] if self._accept_new else []),
        ]
        words = ["ssh", "-T", "-a", "-x", *(f"-o{option}" for option in options)]
        if host.user:
            words += ["-l", host.user]
        if host.port:
            words += ["-p", str(host.port)]
        return [*words, "--", host.name, f"exec {self._shell}"]


_THREADS_PER_CORE = 16
_MAX_THREADS = 64
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
        """`command` is run on every host and sent `first_words`; `stage_s` overrides the patience of all stages.

        Raises:
            DistdiagError: ssh's configuration cannot be read.
        """
        self.patience = Patience() if stage_s is None else Patience(**dict.fromkeys(_STAGES, stage_s))
        self._command = command
        self._words = first_words
        self._config_file = config_file
        self._width = fanout or min(_MAX_THREADS, _THREADS_PER_CORE * (os.cpu_count() or 1))
        self._login = Login(command, first_words, self.patience.login_s, accept_new=accept_new)
        self._openssh = OpenSshTransport(
            command.removeprefix("exec "), first_words, accept_new=accept_new, connect_s=self.patience.connect_s
        )
        self._openssh_threads = Threads(self._openssh.width, "openssh")
        self._room = Room()
        self._connectors: list[Connector] = []
        self._bastions: dict[tuple[str, ...], Bastion] = {}
        self._closed = False
        logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)  # it would print tracebacks from its threads

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        threading.Thread(target=self._reach, args=(list(hosts), arrivals), daemon=True).start()

    def explain(self, host: Host) -> str:
        return self._openssh.explain(host)

    def close(self) -> None:
        self._closed = True
        self._openssh_threads.close()
        for connector in self._connectors:
            connector.close()
        for bastion in self._bastions.values():
            bastion.close()
        self._login.close()

    def _reach(self, hosts: list[Host], arrivals: Arrivals) -> None:
        try:
            found = ssh_config.resolve_all(hosts, config_file=self._config_file)
            direct: list[Target] = []
            for host, settings in zip(hosts, found, strict=True):
                if isinstance(settings, DistdiagError):
                    refusal = HostError(
                        state=HostState.FAILED, stage="config", message=str(settings), hint=settings.hint
                    )
                    arrivals.refuse(host.name, refusal)
                    continue
                target = Target(host, settings)
                if not _has_paramiko() or settings.needs_openssh or self._login.needs_openssh(settings):
                    self._by_openssh(target, arrivals)
                elif settings.proxy_jump:
                    self._bastion(settings.proxy_jump).reach(target, arrivals, self._by_openssh)
                else:
                    direct.append(target)
            connector = Connector(direct, self.patience, arrivals, self._room, self._login, self._width)
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            for host in hosts:
                refusal = HostError(state=HostState.FAILED, stage="config", message=f"cannot set up ssh: {error!r}")
                arrivals.refuse(host.name, refusal)
            return
        self._connectors.append(connector)
        if not self._closed:
            connector.go()

    def _by_openssh(self, target: Target, arrivals: Arrivals) -> None:
        self._openssh_threads.submit(self._openssh.bring, target.host, arrivals)

    def _bastion(self, jumps: tuple[str, ...]) -> Bastion:
        if jumps not in self._bastions:
            self._bastions[jumps] = Bastion(jumps, self._login, self.patience, self._config_file)
        return self._bastions[jumps]


def _has_paramiko() -> bool:
    """Return whether paramiko is installed: distdiag.pyz comes without it, and OpenSSH's client does its work."""
    return importlib.util.find_spec("paramiko") is not None
