"""All wait at the same line: rank 2 one step behind, because it did one all_reduce too many; or all in the same step.

The two groups simulate NCCL: calls of different steps never match. With EQUAL=1 rank 2 takes the
wrong group in step 2, and the loop counters say nothing.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from job import RANK, join, ready

EQUAL = os.environ.get("EQUAL") == "1"


def train() -> None:
    groups = [dist.new_group(), dist.new_group()]
    if RANK == 2 and not EQUAL:
        dist.all_reduce(torch.ones(8), group=groups[1])
    for step in range(1, 10):
        if step == (1 if RANK == 2 and not EQUAL else 2):
            ready()
        wrong = EQUAL and RANK == 2 and step == 2
        dist.all_reduce(torch.ones(8), group=groups[(step + wrong) % 2])


join()
train()
