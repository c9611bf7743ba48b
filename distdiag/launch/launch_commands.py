"""Lines to paste that start the same test under a launcher. Pure."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold

if TYPE_CHECKING:
    from collections.abc import Sequence

_PORT = 29500
_CORES_BESIDE_GPU = 4
"""A rank's own thread, NCCL's proxy and watchdog, and a spare one."""
_MINUTES = 10


class Recipe(StrEnum):
    """The launcher of the lines."""

    SLURM = "slurm"
    MPI = "mpi"
    PDSH = "pdsh"
    TORCHRUN = "torchrun"


def lines(
    recipe: Recipe,
    hosts: Sequence[str],
    nproc: int,
    program: str,
    *,
    gpus: bool | None,
    port: int = 0,
    ifname: str = "",
) -> list[str]:
    """Return the lines that start `program` as `nproc` ranks on each host.

    `gpus`: whether to request as many from SLURM; None if unknown. `port`: torchrun's rendezvous port; 0: its default.
    `ifname`: the interface for MPI's own messages.
    """
    if recipe is Recipe.SLURM:
        return _slurm(hosts, nproc, program, gpus)
    if recipe is Recipe.MPI:
        return _mpi(hosts, nproc, program, ifname)
    if recipe is Recipe.PDSH:
        return _pdsh(hosts, nproc, program, port or _PORT)
    return _torchrun(hosts, nproc, program, port or _PORT)


def _slurm(hosts: Sequence[str], nproc: int, program: str, gpus: bool | None) -> list[str]:
    cores = _CORES_BESIDE_GPU if gpus else 1
    per_gpu = f"#SBATCH --gpus-per-node={nproc}"
    return [
        "#!/bin/bash",
        "#SBATCH --job-name=distdiag",
        f"#SBATCH --nodes={len(hosts)}",
        *([f"#SBATCH --nodelist={fold(hosts)}"] if len(hosts) > 1 else []),
        f"#SBATCH --ntasks-per-node={nproc}",
        f"#SBATCH --cpus-per-task={cores}",
        *([per_gpu] if gpus else [f"# For GPU nodes (this machine has no GPU): {per_gpu}"] if gpus is None else []),
        "#SBATCH --output=distdiag-%j.out",
        f"#SBATCH --time=00:{_MINUTES}:00",
        # srun ignores sbatch's value since SLURM 22.05.
        f"srun --kill-on-bad-exit=0 --cpus-per-task={cores} {program}",
    ]


def _mpi(hosts: Sequence[str], nproc: int, program: str, ifname: str) -> list[str]:
    total = nproc * len(hosts)
    mca = f"--mca btl_tcp_if_include {ifname or 'eth0'} --mca oob_tcp_if_include {ifname or 'eth0'}"
    ours, theirs = (f" {mca}", f" -iface {ifname}") if ifname else ("", "")
    # Open MPI uses all interfaces, and hangs on an unreachable one.
    several = (
        [f"# With several networks, select the interface that works: {mca}"] if len(hosts) > 1 and not ifname else []
    )
    return [
        "# Open MPI",
        *several,
        f"mpirun -np {total}{ours} --host {','.join(f'{host}:{nproc}' for host in hosts)} {program}",
        "# MPICH, Intel MPI",
        f"mpirun -n {total}{theirs} -hosts {','.join(hosts)} -ppn {nproc} {program}",
    ]


def _pdsh(hosts: Sequence[str], nproc: int, program: str, port: int) -> list[str]:
    # pdsh replaces %n by the host's number.
    return [f"pdsh -S -w {','.join(hosts)} {shlex.quote(_one_agent(hosts, nproc, program, '%n', port))}"]


def _torchrun(hosts: Sequence[str], nproc: int, program: str, port: int) -> list[str]:
    if len(hosts) == 1:
        return [f"torchrun --standalone --nproc-per-node {nproc} --no-python {program}"]
    return [
        f"{_one_agent(hosts, nproc, program, str(number), port)}   # on {host}" for number, host in enumerate(hosts)
    ]


def _one_agent(hosts: Sequence[str], nproc: int, program: str, number: str, port: int) -> str:
    where = f"--node-rank {number} --master-addr {hosts[0]} --master-port {port}"
    return f"torchrun --nnodes {len(hosts)} --nproc-per-node {nproc} {where} --no-python {program}"
