"""A healthy job of Gloo ranks that looks hung at a glance, in the way that HOW names: nothing is wrong with any.

Each rank writes FOLDER/ready-RANK before it goes on, rank 0 FOLDER/bad once the odd phase has begun, and whoever works
its progress to FOLDER/steps.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(os.environ["JOB_FOLDER"])
RANK = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("SLURM_PROCID", "0"))))
SIZE = int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))))
HOUR = timedelta(hours=1)
_made = 0


def progress() -> None:
    global _made
    _made += 1
    (FOLDER / f"steps-{RANK}").write_text(str(_made))


def begin() -> None:
    if RANK == 0:
        (FOLDER / "bad").write_text(str(os.getpid()))


def compute(seconds: float) -> None:
    weights = torch.rand(128, 128)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        weights = torch.tanh(weights @ weights)


def step() -> None:
    dist.all_reduce(torch.ones(4))
    progress()


def evaluate() -> None:
    """Rank 0 evaluates for minutes; the others wait for it in a barrier."""
    step()
    begin()
    if RANK == 0:
        while True:
            compute(0.2)
            progress()
    dist.barrier()


def save_checkpoint() -> None:
    """Rank 0 writes a checkpoint; the others wait for it in a barrier."""
    step()
    begin()
    if RANK == 0:
        while True:
            torch.save({"weights": torch.ones(1 << 22)}, FOLDER / "model.pt")
            progress()
    dist.barrier()


def compile_first() -> None:
    """Every rank compiles before its first step, which takes longer on some."""
    step()
    begin()
    while True:
        model = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))))
        torch.compiler.reset()
        torch.compile(model)(torch.ones(2, 8)).sum().backward()
        step()


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample takes as long as a far file system needs."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(2.0)
        return torch.full((4,), float(index))


def load_slowly() -> None:
    """The DataLoaders of all ranks are slow."""
    begin()
    for batch in torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=1):
        dist.all_reduce(batch)
        progress()


def accumulate() -> None:
    """Gradients are only reduced in each 16th backward."""
    model = DistributedDataParallel(nn.Linear(16, 16))
    begin()
    while True:
        with model.no_sync():
            for _ in range(15):
                model(torch.ones(2, 16)).sum().backward()
                compute(0.5)
                progress()
        model(torch.ones(2, 16)).sum().backward()


def pipeline() -> None:
    """Of a pipeline the middle stage takes much longer than the others."""
    begin()
    while True:
        if RANK > 0:
            dist.recv(torch.ones(4), src=RANK - 1)
        compute(4.0 if RANK == 1 else 0.05)
        if RANK < SIZE - 1:
            dist.send(torch.ones(4), dst=RANK + 1)
        progress()


def pause_between_epochs() -> None:
    """All ranks sleep between epochs, as some do to let a file system settle."""
    while True:
        step()
        begin()
        time.sleep(15.0)


def train() -> None:
    begin()
    while True:
        compute(0.2)
        step()


def restart() -> None:
    """One rank fails; torchrun starts all again, which takes a while before they meet."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        step()
        if RANK == 1:
            raise SystemExit(1)
        dist.barrier()
    begin()
    while True:
        compute(0.2)
        progress()


def idle_notebook() -> None:
    """A kernel that waits for the next cell, with a process group of its own."""
    step()
    begin()

    async def serve() -> None:
        await asyncio.Event().wait()

    asyncio.run(serve())


def download() -> None:
    """Rank 0 downloads slowly but steadily; the others wait for it in a barrier."""
    step()
    begin()
    if RANK == 0:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            far, _ = server.accept()

            def trickle() -> None:
                while True:
                    far.sendall(b"x" * 4096)
                    time.sleep(0.3)

            threading.Thread(target=trickle, daemon=True).start()
            while client.recv(4096):
                progress()
    dist.barrier()


def evaluate_in_a_child() -> None:
    """Rank 0 waits for an evaluator of its own that computes; the others wait for it in a barrier."""
    step()
    begin()
    if RANK == 0:
        count = (
            f"n = 0\nwhile True:\n    n += 1\n    n % 1000000 or open({str(FOLDER / 'steps-0')!r}, 'w').write(str(n))"
        )
        subprocess.run([sys.executable, "-c", count], check=True)
    dist.barrier()


WAYS: dict[str, Callable[[], None]] = {
    "evaluates": evaluate,
    "checkpoints": save_checkpoint,
    "first-compile": compile_first,
    "slow-loader": load_slowly,
    "accumulates": accumulate,
    "pipeline": pipeline,
    "pauses": pause_between_epochs,
    "restarts": restart,
    "two-jobs": train,
    "notebook": idle_notebook,
    "trickles": download,
    "evaluator": evaluate_in_a_child,
}


def main() -> None:
    torch.set_num_threads(1)
    (FOLDER / f"ready-{RANK}").touch()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        store = dist.FileStore(str(FOLDER / "store"), SIZE)
        dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=HOUR)
    WAYS[os.environ["HOW"]]()


main()
