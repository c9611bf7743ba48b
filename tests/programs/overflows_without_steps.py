"""Two ranks of DistributedDataParallel without an optimizer step; rank 1's forward makes inf in batch 1.

`overflows_without_steps.py FOLDER HOW:BATCHES...`: one job after the other, forked after the import of torch;
FOLDER/HOW holds their output.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # which DistributedDataParallel would import in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distdiag import DebugUnderflowOverflow
from distdiag.facts import programs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        found: Tensor = self.last(self.first(x) * scale)
        return found


def main(store: str, how: str, batches: int) -> None:
    rank = int(os.fork() == 0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    net = Net()
    DebugUnderflowOverflow(net)
    model = DistributedDataParallel(net)
    if "optimizer" in how:
        torch.optim.SGD(model.parameters(), 0.1)
    for batch in range(batches):
        output = model(torch.ones(3, 4), float("inf") if (rank, batch) == (1, 1) else 1.0)
        if "backward" in how:
            output.sum().backward()
    print("end", rank, flush=True)
    if "exits" in how:
        os._exit(0)


def job(folder: Path, how: str, batches: int) -> None:
    """Start a job; its rank 0, which is returned from, starts the other."""
    programs.die_with_parent()
    file = os.open(folder / how, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(file, fd)
    main(str(folder / f"{how}.store"), how, batches)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: both ranks are waited for
    for case in sys.argv[2:]:
        how, _, batches = case.partition(":")
        if os.fork() == 0:
            job(Path(sys.argv[1]), how, int(batches))
            break
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
