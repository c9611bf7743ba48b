"""Rank 1 sleeps before its fourth all_reduce, in which the others wait."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from job import RANK, join, ready


def step(number: int) -> None:
    tensor = torch.ones(4)
    if number == 3:
        ready()
        if RANK == 1:
            time.sleep(600)  # LATE
    dist.all_reduce(tensor)  # WAITS


def train() -> None:
    for number in range(10):
        step(number)


join()
train()
