"""Train a small model on the CPU with one fault: `train.py hang|crash|nan|slow`, once for each rank.

`distdiag demo` starts four ranks. At step 3, with the fault, each creates ready-RANK beside this file.
"""

import fcntl
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
FAULT = sys.argv[1]
RANK = int(os.environ["RANK"])
STEPS = 100_000 if FAULT == "slow" else 40


class Attention(torch.nn.Module):
    """Attention over the rows of a batch; rows of zeros are padding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return for each row a weighted average of the non-padding rows."""
        is_padding = (x == 0).all(-1)
        weights = torch.softmax((x @ x.T).masked_fill(is_padding, float("-inf")), -1)
        return weights @ x


def load_batch(step: int) -> torch.Tensor:
    """Return the data of a step."""
    if FAULT == "hang" and RANK == 2 and step == 3:
        with open(HERE / "data.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
    if FAULT == "crash" and RANK == 2 and step == 3:
        raise ValueError("sample 1207 has 15 features, expected 16")
    return torch.zeros(8, 16) if FAULT == "nan" and step >= 3 else torch.ones(8, 16)


def augment(batch: torch.Tensor) -> torch.Tensor:
    """Return the batch scaled; on rank 2 of the slow job after 0.4 s of work."""
    until = time.monotonic() + 0.4
    while FAULT == "slow" and RANK == 2 and time.monotonic() < until:
        torch.rand_like(batch)
    return batch * 1.5


def train_step(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Train one step; return the loss, summed over all ranks."""
    loss: torch.Tensor = model(augment(batch)).square().mean()
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total)
    return total


def main() -> None:
    """Train on all ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(Attention(), torch.nn.Linear(16, 1))
    for step in range(STEPS):
        if step == 3:
            (HERE / f"ready-{RANK}").touch()
        loss = train_step(model, load_batch(step))
        if RANK == 0:
            print(f"step {step}: loss {loss:.3g}", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
