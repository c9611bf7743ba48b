"""Reads from an address that is not mapped, in read_sample, which load_batch called for train.

An argument that is a number: it holds that many MB of samples.
"""

import ctypes
import sys


def read_sample() -> bytes:
    return ctypes.string_at(0xDEAD0)  # below all programs: the heap of one may reach any address above its own


def load_batch() -> bytes:
    return read_sample()


def train() -> None:
    load_batch()


samples = b"x" * (int(sys.argv[-1]) << 20) if sys.argv[-1].isdigit() else b""
print("ready", flush=True)
train()
