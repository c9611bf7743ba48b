"""Calls a library that spins, yields or sleeps: LIBRARY FUNCTION HOW [thread name]; says "ready" before the call."""

from __future__ import annotations

import ctypes
import sys
import threading

path, function, how = sys.argv[1:4]


def call() -> None:
    print("ready", flush=True)
    if path == "python":  # a loop of its own
        while True:
            pass
    ctypes.CDLL(path)[function](int(how))


def named() -> None:
    ctypes.CDLL(None).prctl(15, sys.argv[4].encode(), 0, 0, 0)  # PR_SET_NAME
    call()


if len(sys.argv) > 4:
    thread = threading.Thread(target=named)
    thread.start()
    thread.join()
else:
    call()
