"""This machine, this Python: the node side runs in a child process, so that a wedged driver cannot hang us."""

from __future__ import annotations

import contextlib
import fcntl
import shlex
import sys
from typing import TYPE_CHECKING

from distdiag.cluster.links import ProcessLink
from distdiag.cluster.rows import HostState, Refusal
from distdiag.cluster.transports import Arrivals, Transport
from distdiag.node import boot, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host


_PIPE_BYTES = 2**18
"""What a command sends first fits whole, so that nobody has to come back for the rest of it. Only here, where there is
one pipe: the pipes of a user share 64 MiB, and once these are used up all new ones are small."""


class LocalTransport(Transport):
    """Starts the node side right here; only for this one machine."""

    name = "local"
    names_itself = True
    remote = False

    def __init__(self, payload_bytes: int) -> None:
        flags = ["-B"] if sys.dont_write_bytecode else []
        self._argv = [sys.executable, *flags, "-c", boot.START, str(payload_bytes), "distdiag-agent"]

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        for host in hosts:
            try:
                link = ProcessLink(self._argv)
            except run.CannotRun as error:
                arrivals.refuse(host.name, Refusal(state=HostState.FAILED, stage="start", message=str(error)))
                continue
            link.pid = link.process.pid
            assert link.process.stdin is not None
            # Not everywhere (macOS), nor for everybody: the rest is sent later then.
            with contextlib.suppress(AttributeError, OSError):
                fcntl.fcntl(link.process.stdin.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            arrivals.link(host.name, link)

    def explain(self, host: Host) -> str:
        return shlex.join([sys.executable, "-c", "..."])
