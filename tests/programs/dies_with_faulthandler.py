"""Reads from an address that is not mapped; faulthandler prints the stacks, then raises the signal once more."""

import ctypes
import faulthandler


def read_sample() -> bytes:
    return ctypes.string_at(0xDEAD0)


faulthandler.enable()
print("ready", flush=True)
read_sample()
