"""A job of 4 Gloo ranks that hangs for good in the way that HOW names: no wait here ends by itself.

Function names are typical of user code, since a name such as wait_for_file or push is no evidence of progress.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import gc
import multiprocessing
import os
import pdb
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from gloo_job import BAD, FAULT_AT, FOLDER, RANK, begin, join, outside, reduce_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Lock

FOREVER_S = 86_400


def connect() -> socket.socket:
    """Connect to a server that accepts and never answers."""
    return socket.create_connection(("127.0.0.1", int(outside("mute"))))


def save_state_dict_to_s3() -> None:
    connect().recv(4096)


def push() -> None:
    connect().recv(4096)


def download() -> None:
    connect().recv(4096)


def die_with_lock(lock: Lock) -> None:
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_lock_of_dead_worker() -> None:
    lock = multiprocessing.Lock()
    worker = multiprocessing.Process(target=die_with_lock, args=(lock,))
    worker.start()
    worker.join()
    lock.acquire()


def wait_for_event() -> None:
    threading.Event().wait()


def get_from_dead_thread() -> None:
    batches: queue.Queue[int] = queue.Queue()

    def produce() -> None:
        batches.put(1 // 0)

    threading.Thread(target=produce, daemon=True).start()
    batches.get()


def open_fifo_without_writer() -> None:
    os.mkfifo(FOLDER / "shard")
    (FOLDER / "shard").read_bytes()


def read_fifo_of_stopped_writer() -> None:
    outside("stops-writing")
    (FOLDER / "fifo").read_bytes()


def write_fifo_of_stopped_reader() -> None:
    outside("stops-reading")
    with (FOLDER / "fifo").open("wb") as file:
        file.write(bytes(1 << 20))


def poll_file(seconds: float) -> None:
    while not (FOLDER / "never").exists():
        time.sleep(seconds)


def wait_for_file() -> None:
    while not (FOLDER / "never").exists():
        time.sleep(1)


def poll_http() -> None:
    url = f"http://127.0.0.1:{outside('refuses')}/ready"
    while True:
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(url).read()
            return
        time.sleep(0.5)


def read_stdin() -> None:
    sys.stdin.read()


def ask_user() -> None:
    input("continue? ")


def run_a_child_that_sleeps() -> None:
    subprocess.run(["sleep", str(FOREVER_S)], check=True)


def run_a_child_that_reads() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        child.wait()


def find_a_stale_build_lock() -> None:
    from torch.utils.file_baton import FileBaton

    (FOLDER / "lock").touch()
    FileBaton(str(FOLDER / "lock")).wait()


def lock_file(name: str) -> int:
    """Take the lock FOLDER/NAME, however long that takes; return its descriptor."""
    file = os.open(FOLDER / name, os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def wait_for_lock_of_other_program() -> None:
    outside("locks")
    lock_file("lock")


def wait_for_condition() -> None:
    condition = threading.Condition()
    with condition:
        condition.wait()


def await_future() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    asyncio.run(wait())


def wait_flag() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def nap() -> None:
    time.sleep(FOREVER_S)


def accept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.accept()


def send_unasked() -> None:
    dist.send(torch.ones(1 << 22), dst=1)


class Locked(torch.utils.data.Dataset[int]):
    """Its worker inherits a lock that the parent holds."""

    lock = threading.Lock()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        with self.lock:
            return index


class Unreadable(Locked):
    def __getitem__(self, index: int) -> int:
        return len((FOLDER / "shard").read_bytes())


def load(data: Locked) -> None:
    os.mkfifo(FOLDER / "shard")
    Locked.lock.acquire()
    next(iter(torch.utils.data.DataLoader(data, num_workers=1)))


class Flag:
    ready = False


def spin() -> None:
    while not Flag.ready:
        pass


class Waits:
    """Its finalizer waits for an event that only the same thread could set."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        threading.Event().wait()


def collect_garbage() -> None:
    Waits()
    gc.collect()


def leave_with_a_waiting_exit_handler() -> None:
    atexit.register(threading.Event().wait)
    sys.exit()


def join_a_sleeping_thread() -> None:
    thread = threading.Thread(target=time.sleep, args=(FOREVER_S,))
    thread.start()
    thread.join()


WAYS: dict[str, Callable[[], None]] = {
    "s3": save_state_dict_to_s3,
    "push": push,
    "download": download,
    "dead-holder": wait_for_lock_of_dead_worker,
    "event": wait_for_event,
    "dead-thread": get_from_dead_thread,
    "fifo": open_fifo_without_writer,
    "fifo-stopped": read_fifo_of_stopped_writer,
    "pipe-full": write_fifo_of_stopped_reader,
    "polls-fast": lambda: poll_file(0.05),
    "polls": lambda: poll_file(1),
    "wait-for-file": wait_for_file,
    "polls-http": poll_http,
    "stdin": read_stdin,
    "input": ask_user,
    "child-sleeps": run_a_child_that_sleeps,
    "child-reads": run_a_child_that_reads,
    "build-lock": find_a_stale_build_lock,
    "flock-outside": wait_for_lock_of_other_program,
    "condition": wait_for_condition,
    "future": await_future,
    "send": send_unasked,
    "loader-lock": lambda: load(Locked()),
    "loader-read": lambda: load(Unreadable()),
    "spins": spin,
    "finalizer": collect_garbage,
    "exit-handler": leave_with_a_waiting_exit_handler,
    "join": join_a_sleeping_thread,
    "sigpause": signal.pause,
    "debugger": pdb.set_trace,
}


def three_places() -> None:
    """Three of four ranks are outside the collective, each at another place: the majority is at fault."""
    if RANK == BAD:
        begin()
    {1: wait_flag, 2: nap, 3: accept}.get(RANK, reduce_all)()


def lock_of_a_waiting_rank() -> None:
    """Rank 1 waits in the collective with a lock that rank 2 needs to get there."""
    if RANK == 1:
        lock_file("lock")
    dist.barrier()
    if RANK == BAD:
        begin()
        lock_file("lock")
    reduce_all()


def two_locks() -> None:
    """Ranks 1 and 2 each hold the lock that the other wants."""
    if RANK in (1, 2):
        lock_file(f"lock-{RANK}")
    dist.barrier()
    if RANK == BAD:
        begin()
    if RANK in (1, 2):
        lock_file(f"lock-{3 - RANK}")
    reduce_all()


def restart_for_ever() -> None:
    """Rank 1 fails at once, each time that torchrun starts the ranks again."""
    (FOLDER / f"ready-{RANK}").touch()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "2":
        begin()
    if RANK == 1:
        raise ModuleNotFoundError("No module named 'apex'")
    join()
    reduce_all()


TOGETHER: dict[str, Callable[[], None]] = {
    "three-places": three_places,
    "flock-rank": lock_of_a_waiting_rank,
    "two-flocks": two_locks,
}


def main() -> None:
    how = os.environ["HOW"]
    if how == "restart-loop":
        restart_for_ever()
        return
    join()
    for _ in range(FAULT_AT):
        reduce_all()
    if how in TOGETHER:
        TOGETHER[how]()
    elif RANK == BAD:
        begin()
        WAYS[how]()
    reduce_all()


if __name__ == "__main__":
    main()
