"""A DataLoader worker of the last rank never returns from a file. START=fork: it has one more, and
other ranks have two; START=spawn: it is the only one, as each imports torch."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

# isort: split
from job import RANK, WORLD_SIZE, join, ready

START = os.environ["START"]


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and RANK == WORLD_SIZE - 1:
            with open(os.path.join(os.environ["JOB_FOLDER"], "sample")) as file:
                file.read()
        return torch.ones(8)


def train() -> None:
    workers = 2 if START == "fork" else int(RANK == WORLD_SIZE - 1)
    loader = DataLoader(
        Samples(), batch_size=2, num_workers=workers, multiprocessing_context=START if workers else None
    )
    for step, batch in enumerate(loader):
        if step == 2 or (step == 1 and RANK == WORLD_SIZE - 1):
            ready()
        dist.all_reduce(batch)


if __name__ == "__main__":
    join()
    train()
