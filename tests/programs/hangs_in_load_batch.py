"""Rank 2 never returns from load_batch in step 3; the others wait for it in all_reduce."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from job import RANK, join, ready


def load_batch(step: int) -> torch.Tensor:
    if step == 3:
        ready()
        if RANK == 2:
            time.sleep(600)
    return torch.ones(1024)


def train_step(batch: torch.Tensor) -> None:
    dist.all_reduce(batch)


def train() -> None:
    password = "hunter2"
    for step in range(10):
        train_step(load_batch(step))
    print(password)


join()
train()
