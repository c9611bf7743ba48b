"""mpirun of Open MPI or MPICH: one process on each host."""

from __future__ import annotations

import os
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from distdiag.agent import connect_back
from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.transports import ssh_config
from distdiag.cluster.transports.step import Payload, StepTransport, without
from distdiag.errors import DistdiagError
from distdiag.facts import programs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host

_KNOCKERS = 32
_CHECK_S = 3.0
_SSH_SAYS = re.compile(r"connect to host (\S+) port \d+: (.+)|Could not resolve hostname (\S+?): (.+)")


class MpiTransport(StepTransport):
    """The mpirun found on PATH."""

    name = "mpirun"

    def __init__(self, payload: Payload, *, start_s: float) -> None:
        """Raises DistdiagError if mpirun is not installed."""
        self._mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
        if self._mpirun is None:
            raise DistdiagError("mpirun is not on PATH", hint="module load openmpi, or use --launcher ssh")
        version = programs.run([self._mpirun, "--version"], timeout_s=10).stdout
        self._is_open_mpi = b"Open MPI" in version or b"OpenRTE" in version
        super().__init__(payload, start_s=start_s)

    def command(self, hosts: Sequence[Host], program: list[str]) -> list[str]:
        assert self._mpirun is not None
        names = ",".join(host.name for host in hosts)
        if not self._is_open_mpi:
            return [self._mpirun, "-hosts", names, "-ppn", "1", "-n", str(len(hosts)), *program]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        shape = ["--host", names, "--map-by", "ppr:1:node", "--bind-to", "none", "--oversubscribe"]
        return [self._mpirun, *root, *shape, "-x", connect_back.NONCE, *program]

    def environment(self) -> dict[str, str]:
        return without(dict(os.environ), "SLURM_STEP")

    def failed_hosts(self, line: str, hosts: Sequence[Host]) -> dict[str, str]:
        found = _SSH_SAYS.search(line)
        if found is None:
            return {}
        name, how = (found[1], found[2]) if found[1] else (found[3], found[4])
        named = [host.name for host in hosts if name in (host.name, host.address)]
        return {named[0]: f"mpirun's ssh: {how.strip()}"} if named else {}

    def unreachable(self, hosts: Sequence[Host]) -> dict[str, HostError]:
        """Probe the ssh ports: mpirun waits for its ssh, whose own timeout is minutes."""
        with ThreadPoolExecutor(_KNOCKERS) as pool:
            found = dict(zip([host.name for host in hosts], pool.map(_check_ssh_port, hosts), strict=True))
        return {name: refusal for name, refusal in found.items() if refusal is not None}

    def why_it_ended(self, said: list[str]) -> tuple[HostState, str, str]:
        words = " ".join(said)
        if "Host key verification failed" in words:
            return (
                HostState.HOST_KEY_UNKNOWN,
                "mpirun's ssh does not know a host key",
                "log in to each host once by hand",
            )
        if "Permission denied" in words:
            return HostState.AUTH, "mpirun's ssh is denied the login", "check that ssh logs in without a password"
        return super().why_it_ended(said)


def _check_ssh_port(host: Host) -> HostError | None:
    """Try the host's ssh port; only an unreachable one is reported."""
    try:
        settings = ssh_config.resolve(host)
    except DistdiagError:
        return None
    if settings.proxied:
        return None
    where = f"{settings.hostname} port {settings.port}"
    try:
        socket.create_connection((settings.hostname, settings.port), timeout=_CHECK_S).close()
    except socket.gaierror as error:
        words = f"cannot resolve {settings.hostname}: {error.strerror}"
        return HostError(state=HostState.UNKNOWN_NAME, stage="resolve", message=words)
    except TimeoutError:
        words = f"no answer from {where} within {_CHECK_S:g} s"
        return HostError(state=HostState.FILTERED, stage="connect", message=words)
    except ConnectionRefusedError:
        return HostError(state=HostState.REFUSED, stage="connect", message=f"nothing listens on {where}")
    except OSError as error:
        words = f"{where}: {(error.strerror or str(error)).lower()}"
        return HostError(state=HostState.NO_ROUTE, stage="connect", message=words)
    return None
