"""mpirun of Open MPI or MPICH: one process on each host."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

from distdiag.cluster.rows import HostState
from distdiag.cluster.transports.step import Payload, StepTransport, without
from distdiag.errors import DistdiagError
from distdiag.node import call_home, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host

_SSH_SAYS = re.compile(r"connect to host (\S+) port \d+: (.+)|Could not resolve hostname (\S+?): (.+)")


class MpiTransport(StepTransport):
    """The mpirun that is on PATH."""

    name = "mpirun"

    def __init__(self, payload: Payload, *, start_s: float) -> None:
        """Raises DistdiagError where there is no mpirun."""
        self._mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
        if self._mpirun is None:
            raise DistdiagError("mpirun is not on PATH", hint="module load openmpi, or use --launcher ssh")
        version = run.run([self._mpirun, "--version"], timeout_s=10).stdout
        self._is_open_mpi = b"Open MPI" in version or b"OpenRTE" in version
        super().__init__(payload, start_s=start_s)

    def command(self, hosts: Sequence[Host], program: list[str]) -> list[str]:
        assert self._mpirun is not None
        names = ",".join(host.name for host in hosts)
        if not self._is_open_mpi:
            return [self._mpirun, "-hosts", names, "-ppn", "1", "-n", str(len(hosts)), *program]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        shape = ["--host", names, "--map-by", "ppr:1:node", "--bind-to", "none", "--oversubscribe"]
        return [self._mpirun, *root, *shape, "-x", call_home.NONCE, *program]

    def environment(self) -> dict[str, str]:
        return without(dict(os.environ), "SLURM_STEP")

    def failed_hosts(self, line: str, hosts: Sequence[Host]) -> dict[str, str]:
        found = _SSH_SAYS.search(line)
        if found is None:
            return {}
        name, how = (found[1], found[2]) if found[1] else (found[3], found[4])
        named = [host.name for host in hosts if name in (host.name, host.address)]
        return {named[0]: f"mpirun's ssh says: {how.strip()}"} if named else {}

    def why_it_ended(self, said: list[str]) -> tuple[HostState, str, str]:
        words = " ".join(said)
        if "Host key verification failed" in words:
            return (
                HostState.HOST_KEY_UNKNOWN,
                "mpirun's ssh does not know a host key",
                "log in to each host once by hand",
            )
        if "Permission denied" in words:
            return HostState.AUTH, "mpirun's ssh is not let in", "see whether ssh logs in without a password"
        return super().why_it_ended(said)
