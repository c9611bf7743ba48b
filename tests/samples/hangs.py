"""A training script whose DataLoader worker blocks on one file of rank 2; the other ranks wait in all_reduce."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Corpus(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        rank = int(os.environ["RANK"])
        Path(f"ready-{rank}").touch()
        shard = Path(f"shard-{7 if rank == 2 and index == 5 else 0:04}.bin")
        return torch.tensor(list(shard.read_bytes()), dtype=torch.float32)


def train_step(batch: torch.Tensor) -> None:
    dist.all_reduce(batch)


def train() -> None:
    for _step, batch in enumerate(DataLoader(Corpus(), num_workers=1)):
        train_step(batch)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
