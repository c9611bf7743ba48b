"""OpenSSH's own client, one process for each host: for what paramiko cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.transports import known_hosts
from distdiag.cluster.transports.command import CommandTransport

if TYPE_CHECKING:
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
