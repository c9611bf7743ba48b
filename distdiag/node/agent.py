"""distdiag on one node: tells the facts, runs the ranks it is told to run, and leaves nothing behind.

Records go out, orders come in as JSON lines: on stdout and stdin, or both on one socket. When the orders end (the
parent finished, was killed, or the connection was cut), or nothing at all was heard for a while, everything that was
started here is killed and the agent ends, with status 0 whatever it found.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections import deque

from distdiag.node import boot, hello
from distdiag.node.wire import Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

    from distdiag.node.connectivity import Connectivity
    from distdiag.node.ranks import Ranks
    from distdiag.node.tools import Tools

_POLL_S = 0.03
"""How late the end of a rank may be noticed; its events wake us at once."""
_ALIVE_S = 1.0


def main(config: dict[str, Any]) -> None:
    """Run the agent on stdin and stdout, see `serve`."""
    leave(serve(config, 0, Writer.take_stdout()))


def leave(status: int) -> NoReturn:
    """End this process: taking Python apart first would cost each agent a tenth of its time."""
    os._exit(status)


def serve(config: dict[str, Any], orders_fd: int, wire: Writer, lost: Callable[[], int] = lambda: 0) -> int:
    """Run the agent until it is told to leave; the exit status it is told. Else it ends this process with lost().

    {"collect": module with a facts(ask) that gives a dataclass or what it would be as a dictionary, and a
    more(ask, tell) if it is asked again; "ask": what it is asked, "env":
    variables to set, "silence_s": end after so many seconds without a word from the parent, None: never, "guest": the
    parent may be a stranger}
    """
    os.environ.update(config["env"])
    inbox = _Inbox(orders_fd, wire, config["silence_s"], lost)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # A guest is one of the launcher's processes: all got the signal, and the parent will say how we end.
        signal.signal(number, signal.SIG_IGN if config["guest"] else _leave)
    hands = _Hands(wire, config["collect"], guest=config["guest"])
    try:
        wire.send("hello", **hello.who_is_here())
        facts = importlib.import_module(config["collect"]).facts(config["ask"])
        wire.send("facts", facts=_as_told(facts))
        return _obey_all(inbox, hands)
    except (BrokenPipeError, ConnectionError):
        return lost()  # the parent is gone: the same as the end of the orders
    finally:
        hands.end()


class _Inbox:
    """Takes orders on a thread of its own, so that the end of them is seen whatever else is being done."""

    def __init__(self, fd: int, wire: Writer, silence_s: float | None, lost: Callable[[], int]) -> None:
        self.orders: deque[dict[str, Any]] = deque()
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
            # Before the look: what came while we ourselves were held up has been said in time.
            looked_at = time.monotonic()
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
                    self.orders.append(order)
                    os.write(self._push, b".")
                    if order["do"] == "leave":
                        return  # the end that comes after it is no loss
            if self._silence_s is not None:
                if looked_at - heard > self._silence_s:
                    self._die()
                self._tell_that_we_live()

    def _tell_that_we_live(self) -> None:
        try:
            self._wire.send_if_free("alive")
        except (BrokenPipeError, ConnectionError):
            self._die()

    def _die(self) -> NoReturn:
        status = self._lost()
        from distdiag.node import run

        run.kill_all()
        os._exit(status)


def _obey_all(inbox: _Inbox, hands: _Hands) -> int:
    while True:
        watched = [inbox.bell, *hands.descriptors()]
        ready, _, _ = select.select(watched, [], [], _POLL_S if hands.busy else None)
        if inbox.bell in ready:
            os.read(inbox.bell, 1)
            order = inbox.orders.popleft()
            if order["do"] == "leave":
                return int(order["status"])
            hands.do(order)
        hands.poll()


class _Hands:
    """Who does what is ordered. Imported when it is first wanted: most agents only tell their facts."""

    def __init__(self, wire: Writer, collect: str, *, guest: bool) -> None:
        self._wire = wire
        self._collect = collect
        self._guest = guest
        self._ranks: Ranks | None = None
        self._reach: Connectivity | None = None
        self._tools: Tools | None = None

    @property
    def busy(self) -> bool:
        """Whether there are ranks to look after."""
        return self._ranks is not None and self._ranks.busy

    def descriptors(self) -> list[int]:
        """List what becomes readable when a rank has something to tell."""
        return [] if self._ranks is None else self._ranks.descriptors()

    def poll(self) -> None:
        """Pass on what the ranks tell."""
        if self._ranks is not None:
            self._ranks.poll()

    def end(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.end()

    def do(self, order: dict[str, Any]) -> None:
        """Obey one order; what a newer parent may say is passed over."""
        kind = order["do"]
        if kind in ("listen", "keep-logs", "start", "mark", "inspect"):
            self._about_ranks(order)
        elif kind.startswith("reach-"):
            self._about_reach(order)
        elif kind == "collect":
            self._tell_more(order["ask"])
        elif kind == "tool" and not self._guest:
            from distdiag.node.tools import Tools

            self._tools = self._tools or Tools(self._wire)
            self._tools.take(order)

    def _tell_more(self, ask: dict[str, Any]) -> None:
        module = importlib.import_module(self._collect)
        module.more(ask, lambda facts: self._wire.send("more", facts=_as_told(facts)))
        self._wire.send("more-end")

    def _about_ranks(self, order: dict[str, Any]) -> None:
        # By its name: it travels with commands that start ranks, see distdiag.cluster.access.Agent.
        module = importlib.import_module("distdiag.node.ranks")
        ranks: Ranks = self._ranks or module.Ranks(self._wire, boot.carried, guest=self._guest)
        self._ranks = ranks
        if order["do"] == "listen":
            ranks.listen(order)
        elif order["do"] == "keep-logs":
            ranks.keep_logs()
        elif order["do"] == "start":
            ranks.start(order)
        elif order["do"] == "mark":
            ranks.mark()
        else:
            ranks.inspect(order)

    def _about_reach(self, order: dict[str, Any]) -> None:
        from distdiag.node.connectivity import Connectivity

        reach = self._reach = self._reach or Connectivity(self._wire)
        if order["do"] == "reach-listen":
            reach.listen(order)
        elif order["do"] == "reach-serve":
            reach.serve(order, None if self._ranks is None else self._ranks.listener)
        elif order["do"] == "reach-probe":
            reach.probe(order)
        elif order["do"] == "reach-end":
            reach.end(order)


def _as_told(facts: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass, or a dictionary as of one
    if isinstance(facts, dict):
        return facts
    import dataclasses

    return dataclasses.asdict(facts)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
