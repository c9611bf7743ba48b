"""Five steps of ranks without torch, for tests of run: ranks_without_torch.py FOLDER [WHAT].

WHAT: waits, environment, halves, raises (rank 1 does, the others wait), kill (rank 1 kills itself; rank 0 fails when
its connection closes). FOLDER holds their meeting points. An import of torch takes ten times as long as these steps.
"""

import os
import signal
import socket
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


def serve() -> None:
    """Wait for data of rank 1."""
    with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)) as server:
        meet("served")
        connection = server.accept()[0]
    if not connection.recv(1):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:6545.")  # as Gloo


meet("start")
if rank == 0:
    for step in range(5):
        print("step", step, flush=True)
if what == "environment":
    # One write, so that lines of ranks are not torn.
    os.write(1, f"sync {rank} {os.environ.get('CUDA_LAUNCH_BLOCKING')}\n".encode())
if what == "kill" and rank == 0:
    serve()
if what == "kill":
    meet("served")
    connection = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1))
    os.kill(os.getpid(), signal.SIGKILL)
if what == "raises" and rank == 1:
    raise ValueError("label 1000 is out of range for 1000 classes")
if what in ("waits", "raises"):
    while not (folder / "go").exists():
        time.sleep(0.05)
if what == "halves":
    os.write(1, b"half ")
    meet("halves")
    os.write(1, f"half {rank}\n".encode())
meet("end")
if rank == 0:
    print("all steps done", flush=True)
