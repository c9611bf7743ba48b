"""Three ranks on Gloo: rank 2 dies by SIGSEGV in a hook of backward(), the others notice, and abort; each in rank-N."""

import ctypes
import gc
import os
import subprocess
import sys
import time
from pathlib import Path


def clip_gradient(gradient: object) -> object:
    ctypes.string_at(0xDEAD0)
    return gradient


def train() -> None:
    gc.disable()  # imports make no garbage, and to look for it takes a third of their time
    import torch
    import torch.distributed as dist
    from job import RANK, WORLD_SIZE

    folder = Path(f"rank-{RANK}")
    folder.mkdir()
    os.chdir(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path('../store').resolve()}", rank=RANK, world_size=WORLD_SIZE
    )
    try:
        for step in range(4):
            if step == 2 and RANK == 2:
                activations = torch.ones(64, 64, requires_grad=True) * 2
                activations.register_hook(clip_gradient)
                activations.sum().backward()
            dist.all_reduce(torch.ones(8))
    except RuntimeError:
        time.sleep(0.2)
        os.abort()


if "JOB_FORKS" in os.environ:
    train()
else:
    print("ready", flush=True)
    job = {"JOB_FORKS": "3", "rANK": "0", "LOCAL_rANK": "0", "WORLD_SIZE": "3", "JOB_FOLDER": os.getcwd()}
    subprocess.run([sys.executable, Path(__file__).resolve()], env={**os.environ, **job}, check=True)
