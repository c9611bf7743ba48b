"""Tests paths between nodes before a rank needs them.

Each node listens on an ephemeral port, as ranks do, rank 0's node also on the rendezvous port; each connects to those
of the others.
"""

from __future__ import annotations

import threading
import time

from distdiag.agent import protocol, rendezvous
from distdiag.agent.probe_server import ProbeServer
from distdiag.agent.tcp_probe import Target, TcpProbe
from distdiag.facts.network import interfaces as network
from distdiag.facts.network import listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from distdiag.agent.wire import Writer


class Connectivity:
    """This node's part in the path test."""

    def __init__(self, wire: Writer) -> None:
        self._wire = wire
        self._listeners: list[socket.socket] = []
        self._server: ProbeServer | None = None

    def listen(self, order: protocol.ReachListen) -> None:
        """Listen on the ports and report them, with the reason for each that cannot be bound."""
        failed: dict[str, str] = {}
        own = [rendezvous.listen(0) for _ in range(1 + order.more)]
        self._listeners = list(own)
        for port in order.ports:
            try:
                self._listeners.append(rendezvous.listen(port))
            except OSError as error:
                failed[str(port)] = _why_not_listening(port, error)
        numbers = [listener.getsockname()[1] for listener in own]
        found = network.look()
        self._wire.send(protocol.ReachListening(port=numbers[0], samples=numbers, failed=failed, network=found))

    def serve(self, order: protocol.ReachServe, master: socket.socket | None) -> None:
        """Answer probes: on our own ports, and on the rendezvous port if it is here."""
        self._server = ProbeServer([*self._listeners, *([master] if master is not None else [])], order.key)
        self._server.start()
        self._wire.send(protocol.ReachServing())

    def probe(self, order: protocol.ReachTry) -> None:
        """Start probing all targets at once, without blocking; each result is sent when known."""
        deadline = time.monotonic() + order.timeout_s
        for key, address, port, *bulk in order.targets:
            probe = TcpProbe(Target(key, address, port, *bulk), order.key, deadline)
            threading.Thread(target=self._report, args=(probe,), daemon=True).start()
        for name in order.names:
            threading.Thread(target=self._look_up, args=(name,), daemon=True).start()

    def end(self) -> None:
        """Stop answering: rank 0 owns the rendezvous port from now on."""
        if self._server is not None:
            self._server.stop()
        for listener in self._listeners:
            listener.close()
        self._wire.send(protocol.ReachEnded())

    def _report(self, probe: TcpProbe) -> None:
        self._send(protocol.ReachProbe(probe=probe.run()))

    def _look_up(self, name: str) -> None:
        addresses, error = network.resolve(name)
        self._send(protocol.ReachName(name=name, addresses=addresses, error=error))

    def _send(self, message: protocol.Message) -> None:
        try:
            self._wire.send(message)
        except OSError:  # the inbox notices a lost parent too
            return


def _why_not_listening(port: int, error: OSError) -> str:
    holder = listeners.port_holder(port)
    if holder is None or not holder.pid:
        return error.strerror or str(error)
    return f"in use by pid {holder.pid} ({holder.command})"
