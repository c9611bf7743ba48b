"""What the small jobs here have in common: joining the group, and saying that the named defect is about to happen.

JOB_FORKS=4: who imports this becomes 4 ranks by fork, so that torch, imported before, is paid for once. What tells a
rank has a small letter in the names then (rANK=0, mASTER_ADDR=...): their parent is a launcher, and no part of the job.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path


def _become_ranks(count: int) -> None:
    """Return in each rank, a leader of its own session; the parent waits for all, as a launcher does, and leaves."""
    for rank in range(count):
        if os.fork() == 0:
            os.setsid()
            _show_rank(rank)
            folder = Path(os.environ["JOB_FOLDER"])
            new = folder / f".pid-{rank}"
            new.write_text(str(os.getpid()))
            new.replace(folder / f"pid-{rank}")  # whoever sees it sees all of it
            return
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _show_rank(rank: int) -> None:
    """Name the variables as a rank has them: in what /proc shows, which is this very memory, and in Python's."""
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    shown = ctypes.string_at(first, end - first)
    own = shown.replace(b"rANK=0\0", b"RANK=%d\0" % rank).replace(b"\0mASTER_", b"\0MASTER_")
    assert len(own) == len(shown), "there is room for no more"
    ctypes.memmove(first, own, len(own))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    for name in [name for name in os.environ if name.startswith("mASTER_")]:
        os.environ[name.upper()] = os.environ.pop(name)
    for name in ("JOB_FORKS", "rANK", "LOCAL_rANK"):
        del os.environ[name]


if "JOB_FORKS" in os.environ:
    _become_ranks(int(os.environ["JOB_FORKS"]))
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def join() -> None:
    """Join the group of the environment, on Gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo")


def ready(name: object = RANK) -> None:
    """Tell the test that this process is there."""
    Path(os.environ["JOB_FOLDER"], f"ready-{name}").touch()
