"""Rank 0 starts the other two itself, as Lightning does: its own environment names no rank. It stays in load_batch.

HOW=lightning: the others are told LOCAL_RANK and NODE_RANK alone, as Lightning tells them. HOW=parent: all three ranks
are started, by a process that has the store and is none of them. They meet at PORT.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from job import ready

SIZE = 3


def load_batch() -> None:
    time.sleep(600)


def start(ranks: range) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"], WORLD_SIZE=str(SIZE))
    for rank in ranks:
        place = {"LOCAL_RANK": str(rank), "RANK": str(rank)}
        if os.environ.get("HOW") == "lightning":
            place = {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        subprocess.Popen([sys.executable, __file__], env={**os.environ, **place})


def main() -> None:
    if "LOCAL_RANK" not in os.environ and os.environ.get("HOW") == "parent":
        start(range(SIZE))
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
        time.sleep(600)
        del store
    if "LOCAL_RANK" not in os.environ:
        start(range(1, SIZE))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(os.environ.get("HOW") == "parent")
    rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(8))
    ready(rank)
    if rank == 0:
        load_batch()
    dist.all_reduce(torch.ones(8))


main()
