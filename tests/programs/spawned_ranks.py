"""Ranks made by torch.multiprocessing.spawn, with no RANK in their environment; the second sleeps, the first waits."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from job import ready

COUNT = 2


def work(local_rank: int) -> None:
    os.environ.update(RANK=str(local_rank), WORLD_SIZE=str(COUNT))
    dist.init_process_group("gloo")
    ready(local_rank)
    if local_rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(8))


if __name__ == "__main__":
    mp.spawn(work, nprocs=COUNT)
