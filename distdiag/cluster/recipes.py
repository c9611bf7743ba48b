"""Lines to paste that start the same test under a launcher. Pure."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold

if TYPE_CHECKING:
    from collections.abc import Sequence

_PORT = 29500
_MINUTES = 10


class Recipe(StrEnum):
    """For whom the lines are."""

    SLURM = "slurm"
    MPI = "mpi"
    PDSH = "pdsh"
    TORCHRUN = "torchrun"


def lines(recipe: Recipe, hosts: Sequence[str], nproc: int, program: str, *, gpus: bool) -> list[str]:
    """Write the lines that start `program` as `nproc` ranks on each of the hosts; `gpus`: ask SLURM for as many."""
    return {
        Recipe.SLURM: _slurm,
        Recipe.MPI: _mpi,
        Recipe.PDSH: _pdsh,
        Recipe.TORCHRUN: _torchrun,
    }[recipe](hosts, nproc, program, gpus)


def _slurm(hosts: Sequence[str], nproc: int, program: str, gpus: bool) -> list[str]:
    return [
        "#!/bin/bash",
        "#SBATCH --job-name=distdiag",
        f"#SBATCH --nodes={len(hosts)}",
        *([f"#SBATCH --nodelist={fold(hosts)}"] if len(hosts) > 1 else []),
        f"#SBATCH --ntasks-per-node={nproc}",
        *([f"#SBATCH --gpus-per-node={nproc}"] if gpus else []),
        f"#SBATCH --time=00:{_MINUTES}:00",
        f"srun --kill-on-bad-exit=0 {program}",
    ]


def _mpi(hosts: Sequence[str], nproc: int, program: str, gpus: bool) -> list[str]:
    total = nproc * len(hosts)
    return [
        "# Open MPI",
        f"mpirun -np {total} --host {','.join(f'{host}:{nproc}' for host in hosts)} {program}",
        "# MPICH, Intel MPI",
        f"mpirun -n {total} -hosts {','.join(hosts)} -ppn {nproc} {program}",
    ]


def _pdsh(hosts: Sequence[str], nproc: int, program: str, gpus: bool) -> list[str]:
    # pdsh puts the number of the host in place of %n.
    return [f"pdsh -S -w {','.join(hosts)} {shlex.quote(_one_agent(hosts, nproc, program, '%n'))}"]


def _torchrun(hosts: Sequence[str], nproc: int, program: str, gpus: bool) -> list[str]:
    if len(hosts) == 1:
        return [f"torchrun --standalone --nproc-per-node {nproc} --no-python {program}"]
    return [f"{_one_agent(hosts, nproc, program, str(number))}   # on {host}" for number, host in enumerate(hosts)]


def _one_agent(hosts: Sequence[str], nproc: int, program: str, number: str) -> str:
    where = f"--node-rank {number} --master-addr {hosts[0]} --master-port {_PORT}"
    return f"torchrun --nnodes {len(hosts)} --nproc-per-node {nproc} {where} --no-python {program}"
