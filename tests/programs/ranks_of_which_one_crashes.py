"""Four ranks on Gloo: rank 2 dies by SIGSEGV in load_batch; the others notice, and abort. Each in a folder rank-N."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

WORLD_SIZE = 4


def load_batch(step: int) -> None:
    if step == 2 and os.environ["RANK"] == "2":
        ctypes.string_at(0xDEAD000)


def train(rank: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{Path('../store').resolve()}", rank=rank, world_size=WORLD_SIZE
    )
    try:
        for step in range(4):
            load_batch(step)
            dist.all_reduce(torch.ones(8))
    except RuntimeError:
        time.sleep(0.2)
        os.abort()


def start(rank: int) -> "subprocess.Popen[bytes]":
    folder = Path(f"rank-{rank}")
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, Path(__file__).resolve()],
        cwd=folder,
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)},
    )


if "RANK" in os.environ:
    train(int(os.environ["RANK"]))
else:
    print("ready", flush=True)
    for process in [start(rank) for rank in range(WORLD_SIZE)]:
        process.wait()
