"""Two ranks that train small models under the detector; each case writes what it warned of: FOLDER CASE..."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distdiag import DebugUnderflowOverflow

top, cases = Path(sys.argv[1]), sys.argv[2:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def wrapped(case: str) -> nn.Module:
    model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    if case.startswith("shard"):
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = half if case == "shard-bfloat16" else wide
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)), mp_policy=policy)
        return model
    ddp = DistributedDataParallel(model.bfloat16() if case == "bfloat16" else model)
    if case == "compressed":
        ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


def train(case: str) -> list[str]:
    torch.manual_seed(0)
    model = wrapped(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with DebugUnderflowOverflow(model) as detector:
        for _ in range(3):
            x = torch.randn(8, 16, dtype=torch.bfloat16 if case == "bfloat16" else torch.float32)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [detector.counts.off] * bool(detector.counts.off) + detector.counts.warnings


dist.init_process_group("gloo")
try:
    for case in cases:
        (top / f"{case}-{rank}").write_text("\n".join(train(case)))
finally:
    dist.destroy_process_group()
