"""A process outside the job, at the far end of a rank's wait: far_ends.py HOW FOLDER.

Writes FOLDER/far-HOW, with its port or pid, once it serves.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HOW = sys.argv[1]
FOLDER = Path(sys.argv[2])


def serves(text: object) -> None:
    path = FOLDER / f"far-{HOW}"
    path.with_suffix(".new").write_text(str(text))
    path.with_suffix(".new").rename(path)


class Answers(BaseHTTPRequestHandler):
    """GET as HOW says; POST drains a body slowly."""

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        if HOW == "refuses":
            self.send_error(503)
        elif HOW == "generates":
            until = time.monotonic() + 20
            while time.monotonic() < until:
                sum(number * number for number in range(2000))
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"text")
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 30))
            self.end_headers()
            while True:
                self.wfile.write(b"x" * 4096)
                time.sleep(0.3)

    def do_POST(self) -> None:
        while self.rfile.read(8192):
            time.sleep(0.02)


def answer() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        serves(server.server_port)
        server.serve_forever()


def accept_and_be_mute() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        serves(server.getsockname()[1])
        far, _ = server.accept()
        threading.Event().wait()
        far.close()


def write_a_file_slowly() -> None:
    with (FOLDER / "shard").open("ab", buffering=0) as file:
        serves(os.getpid())
        while True:
            file.write(b"x" * 4096)
            time.sleep(0.5)


def read_a_fifo_slowly() -> None:
    os.mkfifo(FOLDER / "fifo")
    serves(os.getpid())
    with (FOLDER / "fifo").open("rb", buffering=0) as file:
        while file.read(8192):
            time.sleep(0.1)


def stop_with_a_fifo(mode: str) -> None:
    os.mkfifo(FOLDER / "fifo")
    serves(os.getpid())
    with (FOLDER / "fifo").open(mode, buffering=0):
        os.kill(os.getpid(), signal.SIGSTOP)


def hold_a_file_lock() -> None:
    with (FOLDER / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        serves(os.getpid())
        threading.Event().wait()


WAYS: dict[str, Callable[[], None]] = {
    "trickles": answer,
    "generates": answer,
    "drains-uploads": answer,
    "refuses": answer,
    "mute": accept_and_be_mute,
    "writes-slowly": write_a_file_slowly,
    "reads-slowly": read_a_fifo_slowly,
    "stops-writing": lambda: stop_with_a_fifo("wb"),
    "stops-reading": lambda: stop_with_a_fifo("rb"),
    "locks": hold_a_file_lock,
}

WAYS[HOW]()
