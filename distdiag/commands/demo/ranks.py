"""Start a script as ranks: `ranks.py train.py hang`, with WORLD_SIZE, and rANK=0 for each rank's RANK.

They are forks of this process, so torch is imported once. It ends when all have ended, and they end with it.
"""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

import torch.distributed  # noqa: F401 - for the script

LIBC = ctypes.CDLL(None)
LIBC.getenv.restype = ctypes.c_void_p
PIDS: list[int] = []


def become(rank: int) -> None:
    """Have the variable RANK, also in /proc, which shows this very memory: other launchers start a rank with it."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    ctypes.memmove(LIBC.getenv(b"rANK") - len("RANK="), f"RANK={rank}".encode(), len("RANK=0"))
    os.environ["RANK"] = str(rank)


def end(*_: object) -> None:
    """End the ranks."""
    for pid in PIDS:
        os.kill(pid, signal.SIGKILL)


del sys.argv[0]
gc.freeze()  # or each rank would copy what was imported, to look for garbage at its end
for number in range(int(os.environ["WORLD_SIZE"])):
    PIDS.append(os.fork())
    if not PIDS[-1]:
        become(number)
        script = Path(sys.argv[0])
        exec(compile(script.read_bytes(), script, "exec"), {"__name__": "__main__", "__file__": str(script)})
        sys.exit()
for stop in (signal.SIGINT, signal.SIGTERM):
    signal.signal(stop, end)
failed = 0
while PIDS:
    pid, status = os.wait()
    PIDS.remove(pid)
    failed |= status
sys.exit(bool(failed))
