"""What the small jobs here have in common: joining the group, and saying that the named defect is about to happen.

JOB_FORKS=4: who imports this becomes 4 ranks by fork, so that torch, imported before, is paid for once. What tells a
rank has a small letter in the names then (rANK=0, mASTER_ADDR=...): their parent is a launcher, and no part of the job.

JOB_SERVES=1: and the launchers are forked too, one for each line of stdin, which is the environment of a job as JSON;
the answer is a line with the launcher's process id. So several jobs pay for one import of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path


def die_with_parent() -> None:
    """Have the kernel kill this process with its parent: a killed test run cleans nothing up."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which no child inherits


def _become_launchers() -> None:
    """Return in the launcher of each job that is asked for; the server itself leaves at the end of its stdin."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended launchers need no wait
    for line in sys.stdin.buffer:
        environment: dict[str, str] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with_parent()
            _show({name: (os.environ[name], new) for name, new in environment.items() if name in os.environ})
            os.environ.update(environment)
            _redirect(Path(environment["JOB_FOLDER"], "stderr-0"))
            return
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    os._exit(0)


def _redirect(log: Path) -> None:
    """Give a process the streams that it has when it is started by itself."""
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, os.devnull, os.O_WRONLY), (2, log, os.O_WRONLY)):
        fd = os.open(path, flags | os.O_CREAT, 0o600)
        os.dup2(fd, number)
        os.close(fd)


def _show(changes: dict[str, tuple[str, str]]) -> None:
    """Change variables, given as (old, new) values of one length, in /proc."""
    first, end = _environment_memory()
    shown = b"\0" + ctypes.string_at(first, end - first)
    for name, (old, new) in changes.items():
        assert len(old) == len(new), f"there is no room for {name}={new}"
        shown = shown.replace(f"\0{name}={old}\0".encode(), f"\0{name}={new}\0".encode())
    ctypes.memmove(first, shown[1:], end - first)


def _environment_memory() -> tuple[int, int]:
    """Return where the environment that /proc shows begins and ends in this process's memory."""
    first, end = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49]
    return int(first), int(end)


def _become_ranks(count: int) -> None:
    """Return in each rank, a leader of its own session; the parent waits for all, as a launcher does, and leaves."""
    for rank in range(count):
        if os.fork() == 0:
            os.setsid()
            die_with_parent()
            _show_rank(rank)
            folder = Path(os.environ["JOB_FOLDER"])
            if rank:
                _redirect(folder / f"stderr-{rank}")
            new = folder / f".pid-{rank}"
            new.write_text(str(os.getpid()))
            new.replace(folder / f"pid-{rank}")  # visible only when complete
            return
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _show_rank(rank: int) -> None:
    """Name the variables like a rank's: in /proc, which shows this very memory, and in Python's copy."""
    first, end = _environment_memory()
    shown = ctypes.string_at(first, end - first)
    own = shown.replace(b"rANK=0\0", b"RANK=%d\0" % rank).replace(b"\0mASTER_", b"\0MASTER_")
    assert len(own) == len(shown), "there is room for no more"
    ctypes.memmove(first, own, len(own))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    for name in [name for name in os.environ if name.startswith("mASTER_")]:
        os.environ[name.upper()] = os.environ.pop(name)
    for name in ("JOB_FORKS", "rANK", "LOCAL_rANK"):
        del os.environ[name]


die_with_parent()
if os.environ.pop("JOB_STARTER", str(os.getppid())) != str(os.getppid()):
    os._exit(1)  # it has ended during the imports
gc.freeze()  # no search for garbage among what was imported, which a fork would copy, nor at the end, 0.4 s with torch
if "JOB_SERVES" in os.environ:
    _become_launchers()
if "JOB_FORKS" in os.environ:
    _become_ranks(int(os.environ["JOB_FORKS"]))
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def join() -> None:
    """Join the group of the environment, on Gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo")


def ready(name: object = RANK) -> None:
    """Report this process's readiness to the test."""
    Path(os.environ["JOB_FOLDER"], f"ready-{name}").touch()
