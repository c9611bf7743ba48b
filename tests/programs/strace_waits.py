"""Reads a file, misses a library, says "ready"; then one thread asks without end while the main one waits."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading


def ask(reading: int) -> None:
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while True:
        poll.poll(0)


with open(sys.argv[1], "rb") as data:
    data.read(16)
with contextlib.suppress(OSError):
    os.open("/nowhere/libdistdiag_missing.so.1", os.O_RDONLY)
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
threading.Thread(target=ask, args=(os.pipe()[0],), daemon=True).start()
print("ready", flush=True)
server.recv(1)
