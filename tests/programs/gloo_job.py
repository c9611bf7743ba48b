"""Parts shared by the jobs of busy_matrix.py: Gloo ranks that report to FOLDER, and processes outside the job.

Each rank touches FOLDER/ready-RANK; the rank at fault writes its pid to FOLDER/bad. The progress counter is in a mapped
file: an update makes no system call and leaves no trace in /proc that the work itself would not.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(os.environ["JOB_FOLDER"])
RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
BAD = 2
FAULT_AT = 3


def _counter() -> mmap.mmap:
    path = FOLDER / f"steps-{RANK}"
    path.write_bytes(bytes(8))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 8)


_steps = _counter()


def progress() -> None:
    """Count one unit of work; forked children count in the same file."""
    _steps[:] = (int.from_bytes(_steps[:], "little") + 1).to_bytes(8, "little")


def compute(seconds: float = 0.2) -> None:
    """Compute in Python."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(number * number for number in range(2000))
    progress()


def compute_on(*_: object) -> None:
    """Compute in Python without end."""
    while True:
        compute()


def join() -> None:
    torch.set_num_threads(1)
    (FOLDER / f"ready-{RANK}").touch()
    dist.init_process_group("gloo", timeout=timedelta(hours=1))


def reduce_all() -> None:
    dist.all_reduce(torch.ones(4))


def begin() -> None:
    """Report that the phase to be judged begins."""
    (FOLDER / "bad").write_text(str(os.getpid()))


def wait_for(path: Path) -> str:
    """Return the text of a file once it has some."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            if text := path.read_text():
                return text
        time.sleep(0.02)


def outside(how: str) -> str:
    """Start far_ends.py as a process outside the job; return its port, or pid, once it serves.

    Its environment is empty and its parent exits at once: only the pipe, socket or file connects it to the rank.
    """
    program = Path(__file__).with_name("far_ends.py")
    command = 'env -i PATH="$PATH" setsid "$@" </dev/null >/dev/null 2>&1 &'
    subprocess.run(["sh", "-c", command, "sh", sys.executable, str(program), how, str(FOLDER)], check=True)
    return wait_for(FOLDER / f"far-{how}")
