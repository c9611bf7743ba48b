"""Three ranks that train two steps and then compare their state, once for each fault: FOLDER FAULT...

The fault is planted on the last rank. Each rank writes its findings as lines. "pair": only ranks 0 and 1 compare.
"zero-...", "fsdp-...": weights or optimizer state are sharded; "...-broken": a value that two ranks hold differs.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distdiag import sync_check

# isort: split
from job import RANK as rank  # the ranks are forked here, and import nothing more
from job import WORLD_SIZE as size
from job import join, ready

top, faults = Path(sys.argv[1]), sys.argv[2:]


class Model(torch.nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)
        self.last = torch.nn.Linear(64, 8)
        self.register_buffer("mask", torch.ones(64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)) * self.mask)
        return out


def plant(fault: str, model: Model, optimizer: torch.optim.Optimizer) -> None:
    if fault in ("parameter", "pair"):
        model.last.weight[3, 5] = torch.nextafter(model.last.weight[3, 5], torch.tensor(9.0))
    elif fault == "swapped":
        row = model.last.weight[2].clone()
        model.last.weight[2, 0], model.last.weight[2, 1] = row[1], row[0]
    elif fault == "buffer":
        model.mask[0].zero_()
    elif fault == "optimizer":
        optimizer.state[model.first.bias]["exp_avg"][0] += 1
    elif fault == "lr":
        optimizer.param_groups[0]["lr"] = 0.02
    elif fault == "missing":
        del optimizer.state[model.first.bias]


def check(fault: str, pair: dist.ProcessGroup | None) -> None:
    torch.manual_seed(0)
    model = Model()
    if fault == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        wrapped: torch.nn.Module = model
    else:
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    random.seed(7)
    torch.manual_seed(7 if fault != "rng" else rank)
    np.random.seed(7 if fault != "numpy" or rank < size - 1 else 8)
    batch = torch.randn(16, 64) + (rank if fault in ("batchnorm", "sharded") else 0)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(batch).sum().backward()
        optimizer.step()
    step, data = 2, [0] * 10
    if rank == (1 if fault == "pair" else size - 1):
        with torch.no_grad():
            plant(fault, model, optimizer)
        step += fault == "step"
        data = data[: 9 if fault == "dataloader" else 10]
    rng, folder = fault in ("rng", "numpy", "same-rng"), top / fault
    group = pair if fault == "pair" else None
    if fault == "pair" and rank > 1:
        return
    result = sync_check(
        wrapped, optimizer, step=step, dataloader=data, rng=rng, group=group, save=str(folder / "saved")
    )
    lines = [f"{'expected: ' if each.expected else ''}{each}" for each in result.differences]
    (folder / f"found-{rank}").write_text("\n".join([f"ok={result.ok} sharded={result.sharded > 0}", *lines]))


def check_shards(case: str, alone: dist.ProcessGroup | None) -> None:
    """Train with FSDP 1 or ZeRO-1, over all ranks or (alone) each rank in a group of its own."""
    torch.manual_seed(0)
    first, last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
    model: torch.nn.Module = torch.nn.Sequential(first, last)
    whole = last if "whole" in case else None
    if case.startswith("zero"):
        model = DistributedDataParallel(model)
        group = alone if "replicas" in case else None
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01
        )
    else:
        keeps = "orig" in case or "whole" in case
        strategy = ShardingStrategy.NO_SHARD if "none" in case else ShardingStrategy.FULL_SHARD
        group = alone if "replicas" in case else None
        sharded = FullyShardedDataParallel(
            first if "inner" in case else model,
            process_group=group,
            sharding_strategy=strategy,
            use_orig_params=keeps,
            device_id=torch.device("cpu"),
            ignored_modules=[whole] if whole is not None else None,
        )
        model = torch.nn.Sequential(sharded, DistributedDataParallel(last)) if "inner" in case else sharded
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(16, 64)).sum().backward()
        if whole is not None:
            for weight in whole.parameters():
                dist.all_reduce(weight.grad)
        optimizer.step()
    if case.endswith("broken") and rank == size - 1:
        with torch.no_grad():
            if case.startswith("zero"):
                inner = optimizer.optim  # type: ignore[attr-defined]
                next(iter(inner.state.values()))["exp_avg"][0] += 1
            else:
                next(weight for weight in reversed(list(model.parameters())) if weight.numel()).view(-1)[0] += 1
    result = sync_check(model, optimizer, save=str(top / case / "saved"))
    lines = [f"{'expected: ' if each.expected else ''}{each}" for each in result.differences]
    (top / case / f"found-{rank}").write_text("\n".join([f"ok={result.ok} sharded={result.sharded > 0}", *lines]))


join()
try:
    of_two = dist.new_group([0, 1])
    groups = [dist.new_group([each]) for each in range(size)]
    for each in faults:
        if each.startswith(("zero", "fsdp")):
            check_shards(each, groups[rank])
        else:
            check(each, of_two)
        print(f"done {each}", file=sys.stderr, flush=True)
    ready()
    dist.barrier()
finally:
    dist.destroy_process_group()
os._exit(0)  # threads of Gloo and of DDP's hooks now and then abort an orderly exit on a busy machine
