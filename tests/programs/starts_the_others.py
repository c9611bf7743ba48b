"""Rank 0 starts the other two itself, as Lightning does: its own environment names no rank. It stays in load_batch.

HOW=lightning: the others are told LOCAL_RANK and NODE_RANK alone, as Lightning tells them. HOW=parent: all three ranks
are started, by a process that has the store and is none of them. They meet at PORT.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from job import die_with_parent, ready

sys.path.append(str(Path(__file__).parents[1]))
import fork_server

SIZE = 3


def load_batch() -> None:
    time.sleep(600)


def is_started(ranks: range) -> bool:
    """Start these ranks, by a fork that /proc shows as started with their variables; return whether this is one."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"], WORLD_SIZE=str(SIZE))
    for rank in ranks:
        place = {"LOCAL_RANK": str(rank), "RANK": str(rank)}
        if os.environ.get("HOW") == "lightning":
            place = {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        if os.fork() == 0:
            die_with_parent()
            os.environ.update(place)
            fork_server._show(sys.orig_argv, os.environ)
            return True
    return False


def main() -> None:
    is_parent = os.environ.get("HOW") == "parent"
    if not is_started(range(0 if is_parent else 1, SIZE)) and is_parent:
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
        time.sleep(600)
        del store
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(is_parent)
    rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(8))
    ready(rank)
    if rank == 0:
        load_batch()
    dist.all_reduce(torch.ones(8))


main()
