"""Each thread is blocked in a different call; prints {call: tid}, and further facts for the test.

A child has the other ends: of the connection and of the pipe, and the lock on the file. HOW=other-user: both run as
another user than they were started by.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import select
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(sys.argv[1])
FOLDER.chmod(0o777)
os.chdir(FOLDER)
if os.environ.get("HOW") == "other-user":
    os.setuid(65534)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.poll.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int]
forever = struct.pack("=qq", 2**62, 0)  # as std::this_thread::sleep_for(hours::max()) may
reads, writes = os.pipe()
lock_file = os.open("lock", os.O_RDWR | os.O_CREAT)
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]

child = os.fork()
if child == 0:
    os.close(reads)
    fcntl.flock(os.open("lock", os.O_RDWR), fcntl.LOCK_EX)
    with socket.socket() as client:
        client.connect(("127.0.0.1", port))
        libc.pause()

os.close(writes)
server.settimeout(20)
connection = server.accept()[0]  # the child has the lock by now
server.settimeout(None)
os.mkfifo("fifo")
epoll = select.epoll()
epoll.register(connection, select.EPOLLIN)
poll = select.poll()
for fd in (reads, connection.fileno(), server.fileno()):
    poll.register(fd, select.POLLIN)
lock = threading.Lock()
other_lock = threading.Lock()
for each in (lock, other_lock):
    each.acquire()
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
page = libc.mmap(None, mmap.PAGESIZE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
ctypes.memmove(page, struct.pack("=ihh", reads, select.POLLIN, 0), 8)
gone = Path("gone").open("w")  # noqa: SIM115 - it stays open
gone.write("hello")
gone.flush()
Path("gone").unlink()

WAYS: dict[str, Callable[[], object]] = {
    "recv": lambda: connection.recv(1),
    "pipe": lambda: os.read(reads, 1),
    "fifo": lambda: os.open("fifo", os.O_WRONLY),
    "flock": lambda: fcntl.flock(lock_file, fcntl.LOCK_EX),
    "poll": poll.poll,
    "select": lambda: select.select([reads], [], [connection]),
    "epoll": epoll.poll,
    "lock": lock.acquire,
    "same lock": lock.acquire,
    "timed lock": lambda: other_lock.acquire(timeout=600),
    "mutex": lambda: libc.pthread_mutex_lock(mutex),
    "sleep": lambda: time.sleep(600),
    "long sleep": lambda: libc.nanosleep(forever, None),
    "accept": server.accept,
    "unmapped": lambda: libc.poll(page, 1, -1),
}
tids = {"wait": os.getpid()}
for way, block in WAYS.items():
    thread = threading.Thread(target=block, daemon=True)
    thread.start()
    assert thread.native_id is not None
    tids[way] = thread.native_id
while "poll" not in Path(f"/proc/self/task/{tids['unmapped']}/wchan").read_text():
    time.sleep(0.005)
libc.munmap(page, mmap.PAGESIZE)  # only the kernel's copy is left now
fds = {"pipe": reads, "connection": connection.fileno(), "server": server.fileno(), "gone": gone.fileno()}
print(json.dumps({"tids": tids, "child": child, "port": port, "fds": fds}), flush=True)
os.waitpid(child, 0)
