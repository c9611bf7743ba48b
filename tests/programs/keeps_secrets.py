"""A rank with secrets in the usual places: in its environment, in a local variable, and in its input."""

from __future__ import annotations

import os
import time

from job import ready


def load_batch(step: int) -> None:
    password = os.environ["HF_TOKEN"]
    reading, writing = os.pipe()
    os.write(writing, password.encode())
    os.read(reading, 100)
    ready()
    time.sleep(600)
    del password, step


load_batch(3)
