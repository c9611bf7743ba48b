"""This machine, this Python: the node side runs in a child process, so that a wedged driver cannot hang us."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from distdiag.cluster.bootstrap import AGENT_START
from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.links import ProcessLink
from distdiag.cluster.transports import Arrivals, Transport
from distdiag.facts import programs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host


class LocalTransport(Transport):
    """Starts the node side right here; only for this one machine."""

    names_itself = True
    remote = False

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        flags = ["-B"] if sys.dont_write_bytecode else []
        # The agent needs no site-packages, and scanning them doubles Python's start time.
        self._argv = [sys.executable, *flags, "-S", "-c", AGENT_START, str(len(payload)), "distdiag-agent"]

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        for host in hosts:
            try:
                process = programs.start(self._argv)
            except programs.CannotRun as error:
                arrivals.put(host.name, HostError(state=HostState.FAILED, stage="start", message=str(error)))
                continue
            link = ProcessLink(process)
            link.pid = process.pid
            # No shell in between could swallow this.
            link.write(self._payload)
            arrivals.put(host.name, link)
