"""A process that imports the modules needed by all ranks of a node, then becomes each of them by fork.

Importing torch costs one or two CPU seconds per rank; this pays them once. A fork is safe only before any use of a
device or a thread, so this is for CPU ranks, and only if the process still has one thread after the imports. On any
failure the remaining ranks are started as separate processes, each of which then shows the same error.

A rank is the server's grandchild; its parent exits at once, so the agent adopts it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import warnings

from distdiag.agent import boot
from distdiag.facts import programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn, TypedDict

    class Config(TypedDict):
        """`fd`: the socket to the agent. `modules`: to import before any fork."""

        fd: int
        modules: list[str]

    class Order(TypedDict):
        """A rank to fork: `main(config)` of the module `entry`, with these variables alone."""

        env: dict[str, str]
        entry: str
        config: Mapping[str, object]


_MESSAGE_BYTES = 2**17
_MOST_FDS = 4


class Forkserver:
    """The agent's end: started at once, usable when `ready`, finished when `failed`."""

    def __init__(self, sources: dict[str, str], modules: list[str], env: dict[str, str]) -> None:
        programs.adopt_orphans()
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config: Config = {"fd": its.fileno(), "modules": modules}
        payload = boot.pack(sources, __name__, config)
        argv = [sys.executable, "-c", boot.START, str(len(payload)), "distdiag-ranks"]
        with its:
            self.process = programs.start(
                argv, env=env, pipes=programs.Pipes(stderr_to_stdout=True, keep=(its.fileno(),))
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(payload)
        os.set_blocking(self.process.stdout.fileno(), False)
        self._socket = mine
        self.ready = False
        self.failed = False

    def descriptors(self) -> list[int]:
        """List the descriptors that signal a state change."""
        return [] if self.failed else [self._socket.fileno()]

    def poll(self) -> None:
        """Update `ready` and `failed`."""
        if self.ready or self.failed:
            return
        self._discard_output()
        if select.select([self._socket], [], [], 0)[0]:
            if self._receive().get("ready"):
                self.ready = True
            else:
                self.end()

    def fork(self, order: Order, fds: list[int]) -> int | None:
        """Fork a rank on these descriptors; return its pid, None if it failed.

        `fds`: its stdin, its stdout and stderr, its events, and rank 0's listening socket, if any.
        """
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            pid = self._receive().get("pid")
            if pid is not None:
                return pid
        self.end()
        return None

    def end(self) -> None:
        """End the server; its ranks keep running."""
        if not self.failed:
            self.failed = True
            self._socket.close()
            programs.end_group(self.process)

    def _receive(self) -> dict[str, int]:
        data = self._socket.recv(_MESSAGE_BYTES)
        return dict(json.loads(data)) if data else {}

    def _discard_output(self) -> None:
        # A full pipe would block the imports; a rank that starts alone prints the same again.
        assert self.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while os.read(self.process.stdout.fileno(), 65536):
                pass


def main(config: Config) -> None:
    """Import, report that, then fork on request."""
    programs.die_with_parent()
    programs.name_process("distdiag-ranks")
    agent = socket.socket(fileno=config["fd"])
    gc.disable()  # a tenth of the time of importing torch
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in config["modules"]:
                importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - each rank will hit and report the error
        return
    if len(os.listdir("/proc/self/task")) != 1:
        return
    gc.freeze()  # keeps these pages shared: the collector never touches them again
    gc.enable()
    agent.send(b'{"ready": true}')
    while True:
        data, fds, flags, _ = socket.recv_fds(agent, _MESSAGE_BYTES, _MOST_FDS)
        if not data or flags & socket.MSG_CTRUNC:
            return
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            _fork_again(json.loads(data), fds, agent, write_end)
        os.close(write_end)
        number = os.read(read_end, 32).decode()
        os.close(read_end)
        # The rank becomes the agent's child only after the exit of its parent.
        os.waitpid(child, 0)
        agent.send(json.dumps({"pid": int(number)}).encode() if number else b"{}")
        for fd in fds:
            os.close(fd)


def _fork_again(order: Order, fds: list[int], agent: socket.socket, report: int) -> NoReturn:
    middle = os.getpid()
    pid = os.fork()
    os.setpgid(pid, pid)  # on both sides, so that it leads its group before its pid is known
    if pid:
        os.write(report, str(pid).encode())
        os._exit(0)
    os.close(report)
    agent.close()
    while os.getppid() == middle:
        time.sleep(0.0005)
    # From now on the agent is the parent for programs.die_with_parent(); if it died already, stdin is at its end.
    _become(order, fds)


def _become(order: Order, fds: list[int]) -> NoReturn:
    stdin, output, events, *listener = fds
    for fd, place in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(fd, place)
    os.close(stdin)
    os.close(output)
    for name in os.environ.keys() - order["env"].keys():
        del os.environ[name]
    os.environ.update(order["env"])
    signal.set_wakeup_fd(-1)
    config = {**order["config"], "events_fd": events, "listener_fd": listener[0] if listener else None}
    status = 0
    try:
        importlib.import_module(order["entry"]).main(config)
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
