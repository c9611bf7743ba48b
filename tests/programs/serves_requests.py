"""An inference server: processes that are named by titles alone, as setproctitle writes them, and no RANK anywhere.

TREE: JSON, [[TITLE, [children of the same form]], ...], the processes to start. A title may end with a mark: "!"
sleeps in load_batch, "=" waits in all_reduce, and both meet at PORT; all others wait for a request.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from job import ready

STUCK, WAITS = "!", "="


def load_batch() -> None:
    time.sleep(600)


def wait_for_request() -> None:
    os.read(os.pipe()[0], 1)


def set_title(title: str) -> None:
    """Overwrite the command line in this process's own memory, where /proc reads it."""
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    ctypes.memset(first, 0, end - first)
    ctypes.memmove(first, title.encode(), min(len(title), end - first - 1))
    Path("/proc/self/comm").write_text(title)


def ranks_of(tree: list[Any]) -> list[str]:
    """List the titles of the ranks, in the order of their numbers."""
    own = [([title] if title[-1] in STUCK + WAITS else []) + ranks_of(below) for title, below in tree]
    return [title for titles in own for title in titles]


def start(tree: list[Any], ranks: list[str]) -> None:
    for title, below in tree:
        if os.fork() == 0:
            start(below, ranks)
            set_title(title.rstrip(STUCK + WAITS))
            if title in ranks:
                train(ranks.index(title), len(ranks), stuck=title.endswith(STUCK))
            ready(title)
            wait_for_request()


def train(rank: int, size: int, *, stuck: bool) -> None:
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.all_reduce(torch.ones(8))
    ready(rank)
    if stuck:
        load_batch()
    dist.all_reduce(torch.ones(8))


def main() -> None:
    tree = json.loads(os.environ["TREE"])
    start(tree, ranks_of(tree))
    ready("main")
    wait_for_request()


main()
