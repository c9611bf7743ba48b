"""Aborts in the function that it is given: load_batch or save_weights."""

import os
import sys


def load_batch() -> None:
    os.abort()


def save_weights() -> None:
    os.abort()


print("ready", flush=True)
globals()[sys.argv[1]]()
