"""Rank 2 does not return from load_batch in step 3; the other ranks wait in all_reduce."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def load_batch(step: int) -> torch.Tensor:
    if step == 3:
        Path(f"ready-{dist.get_rank()}").touch()
        if dist.get_rank() == 2:
            time.sleep(600)
    return torch.zeros(1024)


def train_step(batch: torch.Tensor) -> None:
    dist.all_reduce(batch)


def train() -> None:
    for step in range(10):
        train_step(load_batch(step))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    train()
