"""Writes to a mapped file with holes in the folder that it is given, until its file system has no room."""

import mmap
import os
import sys
from pathlib import Path

with Path(sys.argv[1], "samples.bin").open("w+b") as file:
    os.truncate(file.fileno(), 1 << 20)
    samples = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
for page in range(0, 1 << 20, mmap.PAGESIZE):
    samples[page] = 1
