"""Any command that runs a program elsewhere and hands on its streams: kubectl exec, docker exec, ip netns exec, ssh."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.links import ProcessLink
from distdiag.cluster.transports import Arrivals, Transport
from distdiag.errors import UsageError
from distdiag.facts import programs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host

_WIDTH = 32


class CommandTransport(Transport):
    """One process on this machine for each host."""

    def __init__(self, shell: str, shell_lines: bytes, *, width: int | None = None) -> None:
        self.width: int = width or _WIDTH
        self._shell = shell
        self._lines = shell_lines

    def argv(self, host: Host) -> list[str]:
        """Return the command for one host; it ends with the shell to start there."""
        raise NotImplementedError

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        for host in hosts:
            self._start(host, arrivals)

    def _start(self, host: Host, arrivals: Arrivals) -> ProcessLink | None:
        try:
            link = ProcessLink(programs.start(self.argv(host)))
        except programs.CannotRun as error:
            arrivals.put(host.name, HostError(state=HostState.FAILED, stage="start", message=str(error)))
            return None
        link.write(self._lines)
        arrivals.put(host.name, link)
        return link


class ViaTransport(CommandTransport):
    """A template that the user gives, with {host} in it."""

    def __init__(self, template: str, shell: str, shell_lines: bytes, *, width: int | None = None) -> None:
        """Raises UsageError for a template without a command or {host}."""
        super().__init__(shell, shell_lines, width=width)
        try:
            self._words = shlex.split(template)
        except ValueError as error:
            raise UsageError(f"cannot parse --via {template!r}: {error}", hint="close the quotes") from error
        if not any("{host}" in word for word in self._words):
            raise UsageError(
                f"--via {template!r} has no {{host}} in it",
                hint='write {host} where the host name goes: --via "kubectl exec -i {host} --"',
            )

    def argv(self, host: Host) -> list[str]:
        known = {"host": host.name, "user": host.user or "", "port": str(host.port or "")}
        words = [re.sub(r"\{(host|user|port)\}", lambda name: known[name[1]], word) for word in self._words]
        return [*words, self._shell]
