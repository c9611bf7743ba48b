"""distdiag on one node: reports facts, runs ranks as ordered, cleans up after itself.

Replies and orders (distdiag/agent/protocol.py) use stdout and stdin, or both one socket. When the orders end (the
parent finished, was killed, or lost the connection), or after a silence, the agent kills every process it started and
exits with status 0, whatever it found.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque

from distdiag.agent import boot, host_info, protocol
from distdiag.agent.wire import Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn, TypedDict

    from distdiag.agent.connectivity import Connectivity
    from distdiag.agent.protocol import Message
    from distdiag.agent.ranks import Ranks
    from distdiag.agent.tools import Tools

    class Config(TypedDict):
        """`collect`: the module with facts(ask) or facts(), and more(ask, report) for Collect orders.

        `ask`: the argument of facts. `env`: variables to set. `silence_s`: exit after this silence of the parent, None:
        never. `untrusted`: the parent is unauthenticated.
        """

        collect: str
        ask: object
        env: dict[str, str]
        silence_s: float | None
        untrusted: bool


_POLL_S = 0.03
"""Longest delay in noticing the end of a rank; its events wake us at once."""
_ALIVE_S = 1.0


def main(config: Config, connection: int | None = None) -> None:
    """Run the agent on stdin and stdout, or on a connected socket's descriptor, see `serve`."""
    wire = Writer.take_stdout() if connection is None else Writer(connection)
    os._exit(serve(config, connection or 0, wire))  # skip Python's own shutdown: a tenth of an agent's run time


def serve(config: Config, orders_fd: int, wire: Writer, lost: Callable[[], int] = lambda: 0) -> int:
    """Run the agent until it is ordered to leave, and return the status of that order.

    If the orders end earlier, the process exits with status lost().
    """
    os.environ.update(config["env"])
    inbox = MessageReader(orders_fd, wire, config["silence_s"], lost)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # It is a process of the launcher, which signals all of them; the parent then sends the exit status.
        signal.signal(number, signal.SIG_IGN if config["untrusted"] else _leave)
    dispatcher = Dispatcher(wire, config["collect"], untrusted=config["untrusted"])
    try:
        wire.send(host_info.hello())
        wire.send(protocol.Facts(facts=call(importlib.import_module(config["collect"]).facts, config["ask"])))
        return _obey(inbox, dispatcher)
    except (BrokenPipeError, ConnectionError):
        return lost()  # same as the end of the orders
    finally:
        dispatcher.end()


class MessageReader:
    """Reads orders on a separate thread, to notice end of input while the agent is busy."""

    def __init__(self, fd: int, wire: Writer, silence_s: float | None, lost: Callable[[], int]) -> None:
        self.orders: deque[Message] = deque()
        self.bell, self._push = os.pipe()
        self._fd = fd
        self._wire = wire
        self._silence_s = silence_s
        self._lost = lost
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        received_at = time.monotonic()
        rest = b""
        while True:
            # Taken before select: data that arrived while this process was paused arrived in time.
            polled_at = time.monotonic()
            ready, _, _ = select.select([self._fd], [], [], None if self._silence_s is None else _ALIVE_S / 2)
            if ready:
                received_at = time.monotonic()
                *lines, rest = (rest + self._read()).split(b"\n")
                if self._take(lines):
                    return  # the following end of input is expected
            if self._silence_s is not None:
                if polled_at - received_at > self._silence_s:
                    self._die()
                self._report_alive()

    def _read(self) -> bytes:
        try:
            data = os.read(self._fd, 65536)
        except ConnectionError:
            data = b""
        return data or self._die()

    def _take(self, lines: list[bytes]) -> bool:
        """Keep the orders of these lines; return whether the agent is to leave."""
        for line in filter(None, lines):  # an empty line is the parent's keep-alive
            try:
                order = protocol.read_order(line)
            except (ValueError, RecursionError):
                self._die()  # not the parent's protocol
            if order is not None:  # None: a kind of order added by a newer parent
                self.orders.append(order)
                os.write(self._push, b".")
            if isinstance(order, protocol.Leave):
                return True
        return False

    def _report_alive(self) -> None:
        try:
            self._wire.send_if_free(protocol.Alive())
        except (BrokenPipeError, ConnectionError):
            self._die()

    def _die(self) -> NoReturn:
        status = self._lost()
        from distdiag.facts import programs

        programs.kill_all()
        os._exit(status)


def _obey(inbox: MessageReader, dispatcher: Dispatcher) -> int:
    while True:
        watched = [inbox.bell, *dispatcher.descriptors()]
        ready, _, _ = select.select(watched, [], [], _POLL_S if dispatcher.busy else None)
        if inbox.bell in ready:
            os.read(inbox.bell, 1)
            order = inbox.orders.popleft()
            if isinstance(order, protocol.Leave):
                return int(order.status)
            dispatcher.do(order)
        dispatcher.poll()


class Dispatcher:
    """Carries out orders. Handlers are imported on demand: most agents only report facts."""

    def __init__(self, wire: Writer, collect: str, *, untrusted: bool) -> None:
        self._wire = wire
        self._collect = collect
        self._untrusted = untrusted
        self._ranks: Ranks | None = None
        self._reach: Connectivity | None = None
        self._tools: Tools | None = None
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            protocol.Collect: self._collect_more,
            protocol.KeepLogs: lambda order: self._the_ranks().keep_logs(),
            protocol.Listen: lambda order: self._the_ranks().listen(order),
            protocol.StartRank: lambda order: self._the_ranks().start(order),
            protocol.Mark: lambda order: self._the_ranks().mark(),
            protocol.Inspect: lambda order: self._the_ranks().inspect(order),
            protocol.SendTool: self._take_tool,
            protocol.ReachListen: lambda order: self._the_reach().listen(order),
            protocol.ReachServe: self._serve_reach,
            protocol.ReachTry: lambda order: self._the_reach().probe(order),
            protocol.ReachEnd: lambda order: self._the_reach().end(),
        }

    @property
    def busy(self) -> bool:
        """Whether ranks are running or starting."""
        return self._ranks is not None and self._ranks.busy

    def descriptors(self) -> list[int]:
        """List the descriptors that signal news of a rank."""
        return [] if self._ranks is None else self._ranks.descriptors()

    def poll(self) -> None:
        """Forward the ranks' reports."""
        if self._ranks is not None:
            self._ranks.poll()

    def end(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.end()

    def do(self, order: Message) -> None:
        """Carry out an order."""
        self._handlers[type(order)](order)

    def _collect_more(self, order: protocol.Collect) -> None:
        module = importlib.import_module(self._collect)
        call(module.more, order.ask, lambda facts: self._wire.send(protocol.More(facts=facts)))
        self._wire.send(protocol.MoreEnd())

    def _take_tool(self, order: protocol.SendTool) -> None:
        if self._untrusted:
            return
        from distdiag.agent.tools import Tools

        self._tools = self._tools or Tools(self._wire)
        self._tools.take(order)

    def _the_ranks(self) -> Ranks:
        if self._ranks is None:
            # Imported by name: only commands that start ranks send it, see distdiag.cluster.start_fleet.Agent.
            module = importlib.import_module("distdiag.agent.ranks")
            self._ranks = module.Ranks(self._wire, boot.carried, untrusted=self._untrusted)
        ranks: Ranks = self._ranks
        return ranks

    def _the_reach(self) -> Connectivity:
        from distdiag.agent.connectivity import Connectivity

        self._reach = self._reach or Connectivity(self._wire)
        return self._reach

    def _serve_reach(self, order: protocol.ReachServe) -> None:
        self._the_reach().serve(order, None if self._ranks is None else self._ranks.listener)


def call(function: Callable[..., Any], ask: Any, *more: object) -> Any:  # noqa: ANN401 - of any collect module
    """Call a function with `ask` as the type that its annotation names; without such an argument, with the others."""
    kind = function.__annotations__.get("ask")
    return function(*more) if kind is None else function(_as_type(kind, ask, function.__module__), *more)


def _as_type(name: str, value: Any, module: str) -> Any:  # noqa: ANN401 - of any type
    """Return a JSON object as the class that a module knows by this name, its fields likewise; else the value."""
    kind = getattr(sys.modules[module], name, None)
    if not (isinstance(kind, type) and isinstance(value, dict)):
        return value
    notes = kind.__annotations__
    return kind(**{field: _as_type(notes[field], own, kind.__module__) for field, own in value.items()})


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
