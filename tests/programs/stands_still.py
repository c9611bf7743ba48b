"""A rank without torch that sleeps in load_batch.

HOW=vfork: its only thread waits for a vfork child, in D state, like a thread waiting for a dead disk.
LATER=1: once the file "go" exists.
HOW=other-user: it runs as another user than it was started by.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from job import die_with_parent, ready


def load_batch() -> None:
    time.sleep(600)


def in_the_kernel() -> None:
    libc = ctypes.CDLL(None)
    if libc.vfork() == 0:  # the child of vfork borrows this memory: only the kernel is asked for anything
        libc.prctl(1, signal.SIGKILL)  # as die_with_parent
        libc.pause()


def train() -> None:
    if os.environ.get("HOW") == "other-user":
        os.setuid(65534)
        die_with_parent()  # a change of user undoes it
    ready()
    while os.environ.get("LATER") and not Path(os.environ["JOB_FOLDER"], "go").exists():
        time.sleep(0.1)
    if os.environ.get("HOW") == "vfork":
        in_the_kernel()
    load_batch()


train()
