"""Jobs of srun that do not start, on three nodes of a real SLURM: a batch script on mn1 runs srun, as users do."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from start_faults import TORCHRUN, TRAIN, hang

if TYPE_CHECKING:
    from pathlib import Path

    from cluster_slurm import Slurm

_RANK = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID"
_PLACE = "MASTER_ADDR=mn1 MASTER_PORT=29500 WORLD_SIZE=3"
_ENDS_S = 20


@dataclass(frozen=True)
class SrunFault:
    """`exports`: of the batch script; `task`: shell lines before the program of each of `tasks`, one a node.

    `culprits`, `words`, `alone`: see StartFault; `log`: in the first finding of `logs`.
    """

    culprits: tuple[int, ...]
    words: str
    log: str
    alone: str = ""
    exports: str = _PLACE
    task: str = _RANK
    program: str = f"exec {sys.executable} {TRAIN}"
    tasks: int = 3


_C10D = "--nnodes=3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=7 --rdzv-endpoint=mn1:29400"
SRUN_FAULTS = {
    "srun-port": SrunFault(
        (1,),
        "rank 1 on mn2 & mn1:29501, & mn1:29500",
        "mn1:29501",
        alone="2 of 3 & mn2 has not",
        task=f"{_RANK}; test $RANK != 1 || MASTER_PORT=29501",
    ),
    "srun-name": SrunFault(
        (0, 1, 2), "mn3|mn[1-3] & cannot resolve mn01", "mn01", exports=_PLACE.replace("mn1", "mn01")
    ),
    "srun-world-size": SrunFault(
        (), "4 & has started 3", "3 of 4", exports="MASTER_ADDR=mn1 MASTER_PORT=29500 WORLD_SIZE=4"
    ),
    "srun-rank-0-exits": SrunFault(
        (0,),
        "rank 2 on mn3 & mn1:29500 & nothing listens",
        "mn1:29500|rank 0",
        task=f"{_RANK}; test $RANK != 0 || exit 0",
    ),
    "srun-torchrun-missing": SrunFault(
        (2,), "2 of 3 & on mn3", "2 of 3|mn3", program=f"exec {TORCHRUN} {_C10D} {TRAIN}", tasks=2
    ),
}


def start(fault: SrunFault, slurm: Slurm, *, limit_s: float = 1800) -> Path:
    """Submit the job on all nodes; return the output of its batch script."""
    output, script = slurm.folder / "output", slurm.folder / "job.sh"
    limits = f"PET_RDZV_CONF=join_timeout={_ENDS_S},read_timeout={_ENDS_S}" if limit_s < 60 else ""
    (slurm.folder / "task.sh").write_text(f"{fault.task}\n{fault.program}\n")
    script.write_text(
        f"#!/bin/sh\nexport OMP_NUM_THREADS=1 TIMEOUT_S={limit_s:g} {fault.exports} {limits}\n"
        f"srun --label --nodes={fault.tasks} --ntasks={fault.tasks} --kill-on-bad-exit=0 sh {slurm.folder}/task.sh\n"
        f"echo $? >{slurm.folder}/ended\n"
    )
    slurm.submit(script, "--nodes=3", "--exclusive", f"--output={output}", f"--chdir={slurm.folder}")
    return output


def log_of(fault: SrunFault, slurm: Slurm, *, patience_s: float = 120) -> Path:
    """Run the job with short limits until it has given up."""
    output, until = start(fault, slurm, limit_s=_ENDS_S), time.monotonic() + patience_s
    while not (slurm.folder / "ended").exists() and time.monotonic() < until:
        time.sleep(0.5)
    return output


def ask(slurm: Slurm, name: str) -> dict[str, Any]:
    """Ask hang on this node alone, or about the SLURM job if the name is "all"."""
    (job,) = {step.partition(".")[0] for step in slurm.run("squeue", "--noheader", "--format=%i").stdout.split()}
    where, hosts = (slurm.client, ["--slurm-job", job]) if name == "all" else (slurm.network[name], [])
    return hang(where, hosts, slurm.env())
