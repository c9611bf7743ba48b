"""Rank 1 leaves without a word before step 2; a child of it lives on and holds its connections, so the others wait."""

from __future__ import annotations

import multiprocessing
import os
import time

import torch
import torch.distributed as dist
from job import RANK, join, ready


def train() -> None:
    for step in range(10):
        if step == 2 and RANK == 1:
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
            ready()
            os._exit(0)
        if step == 2:
            ready()
        dist.all_reduce(torch.ones(8))


join()
train()
