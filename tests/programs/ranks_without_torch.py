"""Five steps of ranks without torch, for tests of run: ranks_without_torch.py FOLDER [waits|environment|halves].

FOLDER holds their meeting points. An import of torch takes ten times as long as these steps.
"""

import os
import sys
import time
from pathlib import Path

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder, what = Path(sys.argv[1]), "".join(sys.argv[2:])


def meet(name: str) -> None:
    """Wait until all ranks are here."""
    (folder / f"{name}-{rank}").touch()
    while not all((folder / f"{name}-{other}").exists() for other in range(world)):
        time.sleep(0.01)


meet("start")
if rank == 0:
    for step in range(5):
        print("step", step, flush=True)
if what == "environment":
    # One write, so that lines of ranks are not torn.
    os.write(1, f"sync {rank} {os.environ.get('CUDA_LAUNCH_BLOCKING')}\n".encode())
if what == "waits":
    while not (folder / "go").exists():
        time.sleep(0.05)
if what == "halves":
    os.write(1, b"half ")
    meet("halves")
    os.write(1, f"half {rank}\n".encode())
meet("end")
if rank == 0:
    print("all steps done", flush=True)
