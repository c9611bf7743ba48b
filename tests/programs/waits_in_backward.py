"""DistributedDataParallel: rank 1 sleeps before its backward, the others wait for its gradients inside of theirs."""

from __future__ import annotations

import time

import torch
import torch._dynamo  # which DistributedDataParallel would import in each rank
from job import RANK, join, ready
from torch.nn.parallel import DistributedDataParallel


def validate() -> None:
    time.sleep(600)


def train() -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    for step in range(10):
        loss = model(torch.ones(2, 8)).sum()
        if step == 2:
            ready()
            if RANK == 1:
                validate()
        loss.backward()


join()
train()
