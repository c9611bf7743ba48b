"""A job of Gloo ranks that hangs, or is slow, in the way that HOW names; the rank at fault is BAD (2 by default).

RECORD=DIR keeps a flight recorder there. Each rank writes FOLDER/ready-RANK before it goes on, and the rank at fault
FOLDER/bad with its pid.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pdb
import signal
import socket
import sys
import threading
import time
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

if "JOB_FORKS" in os.environ:
    import job  # noqa: F401 - this process becomes all ranks

FOLDER = Path(os.environ["JOB_FOLDER"])
BAD = int(os.environ.get("BAD", "2"))
FAULT_AT = 3


def rank_of() -> tuple[int, int]:
    """Return rank and size, as torchrun, srun or mpirun gave them."""
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise SystemExit("no rank in the environment")


RANK, SIZE = rank_of()


def join() -> None:
    store = dist.FileStore(str(FOLDER / "store"), SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=600))
    if "RECORD" in os.environ:
        from distdiag import dump_flight_recorder

        dump_flight_recorder(os.environ["RECORD"], when_stuck_s=2.0)


def reduce_all(elements: int = 4) -> None:
    dist.all_reduce(torch.ones(elements))


def at_fault() -> None:
    (FOLDER / "bad").write_text(str(os.getpid()))


def sleeps() -> None:
    time.sleep(600)


def load_batch() -> None:
    time.sleep(600)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exits() -> None:
    os._exit(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_the_kernel() -> None:
    libc = ctypes.CDLL(None)
    if libc.vfork() == 0:
        libc.pause()


def reads_a_dead_file() -> None:
    path = FOLDER / "shard.bin"
    os.mkfifo(path)
    path.read_bytes()


def tokenize_corpus() -> None:
    done = 0
    began = time.monotonic()
    while True:
        done += 1
        sum(number * number for number in range(20_000))
        if done % 50 == 0:
            spent = time.monotonic() - began
            left = spent / done * (100_000 - done)
            clock = [f"{int(each // 60):02}:{int(each % 60):02}" for each in (spent, left)]
            bar = f"\rtokenize: {done // 1000:3d}%|#         | {done}/100000 [{clock[0]}<{clock[1]}, 9.9it/s]"
            sys.stderr.write(bar)
            sys.stderr.flush()


def download_weights() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/weights", timeout=600).read()


def save_checkpoint() -> None:
    path = FOLDER / "model.pt"
    os.mkfifo(path)
    torch.save({"weights": torch.ones(1 << 20)}, path)


def compiles() -> None:
    def slow_backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        time.sleep(600)
        return graph.forward

    torch.compile(lambda value: value + 1, backend=slow_backend)(torch.ones(4))


def waits_for_own_lock() -> None:
    lock = threading.Lock()
    held = threading.Event()

    def holder() -> None:
        with lock:
            held.set()
            time.sleep(600)

    threading.Thread(target=holder, daemon=True, name="holder").start()
    held.wait()
    lock.acquire()


def waits_for_file_lock() -> None:
    child_ready = FOLDER / "locked"
    if os.fork() == 0:
        with (FOLDER / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            child_ready.touch()
            time.sleep(600)
    while not child_ready.exists():
        time.sleep(0.01)
    with (FOLDER / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def holds_the_gil() -> None:
    ctypes.PyDLL(None).sleep(600)


def in_the_debugger() -> None:
    read, _ = os.pipe()
    os.dup2(read, 0)
    sys.stdin = os.fdopen(0)
    pdb.set_trace()


def broadcasts() -> None:
    dist.broadcast(torch.ones(4), 0)


def is_one_step_ahead() -> None:
    return


def waits_for_a_worker() -> None:
    class Stuck(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            time.sleep(600)
            return index

    next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1)))


WAYS: dict[str, Callable[[], None]] = {
    "sleeps": sleeps,
    "load-batch": load_batch,
    "stopped": stopped,
    "exits": exits,
    "killed": killed,
    "d-state": in_the_kernel,
    "dead-file": reads_a_dead_file,
    "tokenizes": tokenize_corpus,
    "downloads": download_weights,
    "saves": save_checkpoint,
    "compiles": compiles,
    "own-lock": waits_for_own_lock,
    "file-lock": waits_for_file_lock,
    "gil": holds_the_gil,
    "debugger": in_the_debugger,
    "other-collective": broadcasts,
    "left-out": is_one_step_ahead,
    "worker": waits_for_a_worker,
}


def train(how: str) -> None:
    for step in range(FAULT_AT + 3):
        if RANK == BAD and step == FAULT_AT:
            at_fault()
            WAYS[how]()
            if how == "left-out":
                continue
        reduce_all()
    time.sleep(600)


def swapped_groups() -> None:
    """Rank BAD and its neighbour call the collectives of two groups in different orders."""
    first, second = dist.new_group(), dist.new_group()
    reduce_all()
    if RANK == BAD:
        at_fault()
    for group in (second, first) if RANK == BAD else (first, second):
        dist.all_reduce(torch.ones(4), group=group)


def recv_from_each_other() -> None:
    """All ranks but 0 and 1 wait in a barrier for these two, which both receive first."""
    reduce_all()
    if RANK == 0:
        at_fault()
    if RANK < 2:
        dist.recv(torch.ones(4), src=1 - RANK)
    dist.barrier()


def slow(seconds: float) -> None:
    """Nothing hangs: one rank computes for longer in each step."""
    step = 0
    at_fault()
    while True:
        if RANK == BAD:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                sum(number * number for number in range(1000))
        reduce_all()
        step += 1
        if RANK == 0:
            (FOLDER / "steps").write_text(str(step))


def main() -> None:
    how = os.environ["HOW"]
    if how in ("never-joins", "exits-early") and RANK == BAD:
        at_fault()
        (FOLDER / f"ready-{RANK}").touch()
        if how == "never-joins":
            sleeps()
        return
    if how == "compiles":
        import torch._dynamo  # noqa: F401 - importing it takes seconds, and is not the fault
    (FOLDER / f"ready-{RANK}").touch()
    join()
    if how in WAYS:
        train(how)
    elif how == "two-groups":
        swapped_groups()
    elif how == "recv-cycle":
        recv_from_each_other()
    elif how == "slow":
        slow(1.0)
    elif how == "healthy":
        slow(0.01)


main()
