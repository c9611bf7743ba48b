"""Reads a page of a mapped file that another hand has made shorter, as a full or emptied /dev/shm does."""

import mmap
import os
from pathlib import Path


def read_shard(samples: mmap.mmap) -> int:
    return samples[5 * mmap.PAGESIZE]


def train() -> None:
    path = Path("samples.bin").resolve()
    path.write_bytes(bytes(8 * mmap.PAGESIZE))
    with path.open("r+b") as file:
        samples = mmap.mmap(file.fileno(), 0)
    os.truncate(path, mmap.PAGESIZE)
    read_shard(samples)


print("ready", flush=True)
train()
