"""What sync_check costs when it is called every 100 steps: its time over that of 100 steps, on Gloo ranks on this CPU.

A decoder-like model with AdamW, once in DistributedDataParallel and once in fully_shard: 2 ranks with one thread each.
The time of a check is that of the slowest rank, with its collectives. The goal is 2 % of a step.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distdiag import sync_check

EVERY = 100


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return y


def timed(call: object) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()  # type: ignore[operator]
    took = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def measure(kind: str, d: int, layers: int, rounds: int) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(d) for _ in range(layers)))
    if kind == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(4, 256, d)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def check() -> None:
        assert sync_check(model, optimizer, step=0).ok

    step()
    check()
    steps = statistics.median(timed(step) for _ in range(rounds))
    checks = statistics.median(timed(check) for _ in range(rounds))
    if dist.get_rank() == 0:
        weights = sum(weight.numel() for weight in model.parameters()) / 1e6
        share = 100 * checks / (EVERY * steps)
        times = f"step {1e3 * steps:8.0f} ms  check {1e3 * checks:7.1f} ms"
        print(f"{kind:<24}{weights:8.1f} M weights  {times}  {share:6.3f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started = [
            subprocess.Popen([sys.executable, *sys.argv], env={**shared, "RANK": str(rank)}) for rank in range(2)
        ]
        sys.exit(max(process.wait() for process in started))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for d, layers in ((256, 4), (512, 8)):
            for kind in ("DistributedDataParallel", "fully_shard"):
                measure(kind, d, layers, rounds)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
