"""Rank 0 waits in recv() for rank 1, which does what HOW says; no torch: a rank is who has RANK in its environment.

HOW: sleep, fifo (reads a FIFO without a writer), flock (waits for a third process's lock), recv (waits for rank
0 in turn), turns (sleeps 0.05 s again and again), pin (rank 0's main thread waits for a thread that receives). Each
reports readiness when it is about to be blocked.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from pathlib import Path

from job import RANK, die_with_parent, ready

HOW = os.environ["HOW"]
FOLDER = Path(os.environ["JOB_FOLDER"])


def rank_0() -> None:
    with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)) as server:
        (FOLDER / "listens").touch()
        connection = server.accept()[0]
    ready()
    if HOW == "pin":
        reader = threading.Thread(target=connection.recv, args=(1,))
        reader.start()
        reader.join()
    connection.recv(1)


def rank_1() -> None:
    while not (FOLDER / "listens").exists():
        time.sleep(0.01)
    connection = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1))
    if HOW == "flock":
        lock = hold_lock()
    ready()
    if HOW in ("sleep", "pin"):
        time.sleep(600)
    elif HOW == "fifo":
        os.mkfifo(FOLDER / "fifo")
        os.read(os.open(FOLDER / "fifo", os.O_RDWR), 1)
    elif HOW == "flock":
        fcntl.flock(lock, fcntl.LOCK_EX)
    elif HOW == "recv":
        connection.recv(1)
    while True:
        time.sleep(0.05)


def hold_lock() -> int:
    """Let a child that is no rank take the lock."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        die_with_parent()
        fcntl.flock(os.open(FOLDER / "lock", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
        os.write(writes, b".")
        time.sleep(600)
    os.read(reads, 1)
    return os.open(FOLDER / "lock", os.O_RDWR)


rank_0() if RANK == 0 else rank_1()
