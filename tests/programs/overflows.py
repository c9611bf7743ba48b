"""A training loop whose numbers go wrong: `overflows.py WRAP WHERE`.

WRAP: bare, ddp, fsdp-before, fsdp-after (the detector before or after fully_shard), ddp-compile; with "none:" before
it, it has no detector of its own. WHERE: forward (rank 1, batch 1), backward (rank 0, batch 2), weights, never.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distdiag import DebugUnderflowOverflow


class Scale(nn.Module):
    def forward(self, x: Tensor, by: float) -> Tensor:
        return x * by


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(8, 8), Scale(), nn.Linear(8, 8)

    def forward(self, x: Tensor, by: float) -> Tensor:
        out: Tensor = self.last(self.scale(self.first(x), by))
        return out


def wrapped(model: nn.Module, how: str, watch: bool) -> nn.Module:
    if how == "fsdp-before" and watch:
        DebugUnderflowOverflow(model)
    outer = model
    if how.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard

        for one in (*model.children(), model):
            if list(one.parameters()):
                fully_shard(one)
    elif how.startswith("ddp"):
        outer = nn.parallel.DistributedDataParallel(model)
        if how == "ddp-compile":
            outer = torch.compile(outer, backend="eager")  # type: ignore[assignment]
    if how != "fsdp-before" and watch:
        DebugUnderflowOverflow(outer)
    return outer


def main() -> None:
    how, where = sys.argv[1:3]
    watch = not how.startswith("none:")
    how = how.removeprefix("none:")
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    outer = wrapped(model, how, watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(4):
        optimizer.zero_grad()
        bad = where == "forward" and batch == 1 and (rank == 1 or not dist.is_initialized())
        loss = outer(torch.randn(4, 8), float("inf") if bad else 1.0).sum()
        if where == "backward" and rank == 0 and batch == 2:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        if where == "weights" and batch == 1:
            with torch.no_grad():
                model.last.bias[0] = float("nan")
        print(f"batch {batch} done", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
