"""SLURM: an overlapping step inside a job, one task per node."""

from __future__ import annotations

import os
import random
import re
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostState
from distdiag.cluster.transports.step import Payload, StepTransport, without
from distdiag.facts import programs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.hosts import Host

# What a batch script or another step left there would change the shape of ours.
_SHAPE = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_STEP", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_MEM_PER", "SLURM_GPUS_PER", "SLURM_GRES", "SLURM_EXACT"),
    *("SLURM_KILL_BAD_EXIT", "SLURM_LABELIO", "SLURM_WAIT", "SLURM_EXPORT_ENV", "SRUN_", "SLURM_HINT"),
)
_CONFIG_S = 5.0
_TRIES = 50
_FAILED = re.compile(r"(?:failed on node|Task launch.*on node) ([\w.-]+): (.+)")


class SlurmTransport(StepTransport):
    """`srun --overlap` into a job."""

    name = "srun"

    def __init__(self, job: str, payload: Payload, *, start_s: float) -> None:
        super().__init__(payload, start_s=start_s)
        self._job = job

    def ports(self) -> Sequence[int]:
        """Return the ports to listen on: SrunPortRange if set, since a firewall may admit only these."""
        said = programs.run(["scontrol", "show", "config"], timeout_s=_CONFIG_S).stdout.decode("utf-8", "replace")
        found = re.search(r"^SrunPortRange\s*=\s*(\d+)-(\d+)", said, re.MULTILINE)
        if found is None or found[2] == "0":
            return (0,)
        span = range(int(found[1]), int(found[2]) + 1)
        return random.sample(span, min(len(span), _TRIES))

    def command(self, hosts: Sequence[Host], program: list[str]) -> list[str]:
        count = len(hosts)
        return [
            "srun",
            "--overlap",
            f"--jobid={self._job}",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(host.name for host in hosts)}",
            "--input=none",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--mpi=none",
            "--cpu-bind=none",
            "--mem=0",
            "--export=ALL",  # never by value: a comma would cut it
            "--quit-on-interrupt",
            *program,
        ]

    def environment(self) -> dict[str, str]:
        return without(dict(os.environ), *_SHAPE)

    def failed_hosts(self, line: str, hosts: Sequence[Host]) -> dict[str, str]:
        found = _FAILED.search(line)
        if found is None or found[1] not in {host.name for host in hosts}:
            return {}
        return {found[1]: f"slurmd there does not respond: {found[2]}"}

    def why_it_ended(self, said: list[str]) -> tuple[HostState, str, str]:
        words = " ".join(said)
        if "Invalid job id" in words:
            return HostState.FAILED, f"no running SLURM job {self._job}", "list yours: squeue --me"
        if "ccess/permission denied" in words:
            hint = f"it is another user's job; see whose: squeue -j {self._job}"
            return HostState.AUTH, f"SLURM denies access to job {self._job}", hint
        if "Requested node configuration is not available" in words:
            return HostState.FAILED, f"it is not a node of job {self._job}", f"squeue -j {self._job} -o %N"
        if "Job/step already completing or completed" in words or "has expired" in words:
            return HostState.FAILED, f"job {self._job} has ended", "list yours: squeue --me"
        return super().why_it_ended(said)
