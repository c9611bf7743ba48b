"""Reads from an address that is not mapped, in read_sample, which load_batch called for train."""

import ctypes


def read_sample() -> bytes:
    return ctypes.string_at(0xDEAD000)


def load_batch() -> bytes:
    return read_sample()


def train() -> None:
    load_batch()


print("ready", flush=True)
train()
