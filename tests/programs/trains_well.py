"""Nothing is wrong: a small model learns on every rank, which writes its losses, a line a step, as they come."""

from __future__ import annotations

import os
import time
from typing import TextIO

import torch
import torch._dynamo  # which the optimizer would import in each rank
import torch.distributed as dist
from job import RANK, join, ready

ENDLESS = "STEPS" not in os.environ
STEPS = int(os.environ.get("STEPS", "1000000"))


def train(losses: TextIO) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        batch = torch.sin(torch.arange(64.0).reshape(4, 16) + step + RANK)
        loss = (model(batch) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.write(f"{loss.item()!r}\n")
        if step == 3:
            ready()
        if ENDLESS:
            time.sleep(0.05)  # who looks at it needs a processor too


torch.set_num_threads(1)
join()
began = time.monotonic()
with open(os.path.join(os.environ["JOB_FOLDER"], f"losses-{RANK}"), "w", buffering=1) as file:
    train(file)
if RANK == 0:
    with open(os.path.join(os.environ["JOB_FOLDER"], "seconds"), "w") as file:
        file.write(str(time.monotonic() - began))
dist.destroy_process_group()
