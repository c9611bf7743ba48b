"""A DataLoader worker of the last rank never returns from a file. START=fork or spawn, WORKERS for each rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

# isort: split
from job import RANK, WORLD_SIZE, join, ready


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and RANK == WORLD_SIZE - 1:
            with open(os.path.join(os.environ["JOB_FOLDER"], "sample")) as file:
                file.read()
        return torch.ones(8)


def train() -> None:
    loader = DataLoader(
        Samples(), batch_size=2, num_workers=int(os.environ["WORKERS"]), multiprocessing_context=os.environ["START"]
    )
    for step, batch in enumerate(loader):
        if step == 2 or (step == 1 and RANK == WORLD_SIZE - 1):
            ready()
        dist.all_reduce(batch)


if __name__ == "__main__":
    join()
    train()
