"""distdiag on one node: tells the facts, runs the ranks it is told to run, and leaves nothing behind.

Records go out, orders come in as JSON lines: on stdout and stdin, or both on one socket. When the orders end (the
parent finished, was killed, or the connection was cut), or nothing at all was heard for a while, everything that was
started here is killed and the agent ends, with status 0 whatever it found.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import queue
import select
import signal
import sys
import threading
import time

from distdiag.node import boot, hello, reach, run, tools
from distdiag.node.ranks import Ranks
from distdiag.node.wire import Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

_POLL_S = 0.03
"""How late the end of a rank may be noticed; its events wake us at once."""
_ALIVE_S = 1.0


def main(config: dict[str, Any]) -> None:
    """Run the agent on stdin and stdout, see `serve`."""
    serve(config, 0, Writer.take_stdout())


def serve(config: dict[str, Any], orders_fd: int, wire: Writer, lost: Callable[[], int] = lambda: 0) -> int:
    """Run the agent until it is told to leave; the exit status it is told. Else it ends this process with lost().

    {"collect": module with a facts(ask), "ask": what it is asked, "env": variables to set, "silence_s": end after so
    many seconds without a word from the parent, None: never, "guest": the parent may be a stranger}
    """
    run.name_process("distdiag-agent")
    os.environ.update(config["env"])
    inbox = _Inbox(orders_fd, wire, config["silence_s"], lost)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # A guest is one of the launcher's processes: all got the signal, and the parent will say how we end.
        signal.signal(number, signal.SIG_IGN if config["guest"] else _leave)
    ranks = Ranks(wire, boot.carried, guest=config["guest"])
    try:
        wire.send("hello", **hello.who_is_here())
        facts = importlib.import_module(config["collect"]).facts(config["ask"])
        wire.send("facts", facts=dataclasses.asdict(facts))
        return _obey_all(inbox, ranks, reach.Reach(wire), tools.Tools(wire), guest=config["guest"])
    except (BrokenPipeError, ConnectionError):
        return lost()  # the parent is gone: the same as the end of the orders
    finally:
        ranks.end()


class _Inbox:
    """Takes orders on a thread of its own, so that the end of them is seen whatever else is being done."""

    def __init__(self, fd: int, wire: Writer, silence_s: float | None, lost: Callable[[], int]) -> None:
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.bell, self._push = os.pipe()
        self._fd = fd
        self._wire = wire
        self._silence_s = silence_s
        self._lost = lost
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        heard = time.monotonic()
        rest = b""
        while True:
            ready, _, _ = select.select([self._fd], [], [], None if self._silence_s is None else _ALIVE_S / 2)
            if ready:
                try:
                    data = os.read(self._fd, 65536)
                except ConnectionError:
                    data = b""
                if not data:
                    self._die()
                heard = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                for line in filter(None, lines):  # an empty line only says that the parent is there
                    order = json.loads(line)
                    self.orders.put(order)
                    os.write(self._push, b".")
                    if order["do"] == "leave":
                        return  # the end that comes after it is no loss
            if self._silence_s is not None:
                if time.monotonic() - heard > self._silence_s:
                    self._die()
                self._tell_that_we_live()

    def _tell_that_we_live(self) -> None:
        try:
            self._wire.send_if_free("alive")
        except (BrokenPipeError, ConnectionError):
            self._die()

    def _die(self) -> NoReturn:
        status = self._lost()
        run.kill_all()
        os._exit(status)


def _obey_all(inbox: _Inbox, ranks: Ranks, reachable: reach.Reach, toolbox: tools.Tools, *, guest: bool) -> int:
    do: dict[str, Callable[[dict[str, Any]], None]] = {
        "listen": ranks.listen,
        "keep-logs": lambda order: ranks.keep_logs(),
        "start": ranks.start,
        "inspect": ranks.inspect,
        "reach-listen": reachable.listen,
        "reach-serve": lambda order: reachable.serve(order, ranks.listener),
        "reach-probe": reachable.probe,
        "reach-end": reachable.end,
    }
    if not guest:
        do["tool"] = toolbox.take
    while True:
        watched = [inbox.bell, *ranks.descriptors()]
        ready, _, _ = select.select(watched, [], [], _POLL_S if ranks.running else None)
        if inbox.bell in ready:
            os.read(inbox.bell, 1)
            order = inbox.orders.get()
            if order["do"] == "leave":
                return int(order["status"])
            act = do.get(order["do"])
            if act is not None:  # a guest has fewer
                act(order)
        ranks.poll()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
