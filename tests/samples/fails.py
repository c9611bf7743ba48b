"""Rank 2 raises in step 3, while the other ranks wait for it in all_reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist


def loss(labels: torch.Tensor) -> torch.Tensor:
    if int(labels.max()) >= 1000:
        raise ValueError(f"label {int(labels.max())} is out of range for 1000 classes")
    return labels.float().mean()


def train() -> None:
    for step in range(10):
        labels = torch.full((8,), 1000 if step == 3 and dist.get_rank() == 2 else step)
        dist.all_reduce(loss(labels))
        print(f"step {step}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
