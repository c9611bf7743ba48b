"""Two nodes without ssh between them: one serves, the other checks, and the server tests the path back.

A server only serves clients that prove that they know its token (agent/handshake.py). It only ever connects to the
address that a proven client came from, accepts no name or address from it, and ends on its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec  # noqa: TID253 - this module is only imported for serve and check

from distdiag.agent import handshake, port_scan, rendezvous
from distdiag.agent.probe_server import MOST_BULK_BYTES, ProbeServer
from distdiag.agent.tcp_probe import ProbeResult, Target, TcpProbe
from distdiag.cluster.records import Senseless, read_json
from distdiag.cluster.rendezvous_test import PORT, RANKS, NetworkPath
from distdiag.commands.ports import collect
from distdiag.commands.ports.types import USUAL_PORT, PortsFacts, address_of
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distdiag.commands.ports.types import Request
    from distdiag.output import Progress

_SHORTEST_TOKEN = 16
_LINE_BYTES = 64 * 2**10
_PROOF_S = 5.0
_SESSION_S = 15.0
_PROBE_S = 4.0
_MOST_PORTS = 64
_MOST_SESSIONS = 16
_MOST_UNPROVEN = 64
_HERE = "here"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How two nodes without ssh find each other: a token that both know, and for how long."""

    token_file: str = ""
    for_s: float = 600.0

    def token(self) -> str:
        """Return the token of --token-file, or of the environment; empty without one. Raises UsageError."""
        try:
            return handshake.given_token(self.token_file)
        except OSError as error:
            raise UsageError(
                f"--token-file {self.token_file}: {error.strerror}",
                hint="give a file with the token, or - for stdin",
            ) from error


def serve(request: Request, options: ServerOptions, progress: Progress) -> PortsFacts:
    """Listen until the time is over, or Ctrl-C.

    Raises:
        DistdiagError: cannot listen on the port.
    """
    port = request.ports[0] if request.ports else USUAL_PORT
    token = _usable(options.token()) or handshake.new_key()
    listener = _listen(port)
    here = collect.facts({"listeners": False})
    facts = PortsFacts(nodes={_HERE: here}, hosts={_HERE: here.host}, served=True)
    at = f"{address_of(here) or here.host}:{port}"
    progress.news(f"listening on port {port} for {options.for_s:g} s; run on the other node:")
    progress.news(f"    {handshake.TOKEN}={token} {request.program} ports check {at}")
    server = _Server(listener, token, progress, facts)
    try:
        server.run_for(options.for_s)
    except KeyboardInterrupt:
        facts.interrupted = not facts.paths
    finally:
        listener.close()
    return facts


def _listen(port: int) -> socket.socket:
    try:
        return rendezvous.listen(port)
    except OSError as error:
        holder = machine.port_holder(port)
        who = f": held by pid {holder.pid} ({holder.command})" if holder and holder.pid else ""
        raise DistdiagError(
            f"cannot listen on port {port}: {error.strerror}{who}", hint="use another port: --port PORT"
        ) from error


def _usable(token: str) -> str:
    if token and len(token) < _SHORTEST_TOKEN:
        raise UsageError(
            f"{handshake.TOKEN} is too short ({len(token)} characters): it could be guessed",
            hint="leave it unset: ports serve generates a token",
        )
    return token


class _Server:
    """Lets clients in, each in a thread with a deadline."""

    def __init__(self, listener: socket.socket, token: str, progress: Progress, facts: PortsFacts) -> None:
        self._acceptor = handshake.Acceptor([listener], token, most=_MOST_UNPROVEN, patience_s=_PROOF_S)
        self._progress, self._facts = progress, facts
        self._sessions = threading.Semaphore(_MOST_SESSIONS)

    def run_for(self, seconds: float) -> None:
        """Serve clients that know the token, for so many seconds."""
        until = time.monotonic() + seconds
        try:
            while (left := until - time.monotonic()) > 0:
                for peer in self._acceptor.wait(min(left, 1.0))[0]:
                    if self._sessions.acquire(blocking=False):
                        threading.Thread(target=self._receive, args=(peer,), daemon=True).start()
                    else:
                        peer.connection.close()
        finally:
            self._acceptor.close()

    def _receive(self, peer: handshake.Peer) -> None:
        try:
            with peer.connection, contextlib.suppress(OSError, ValueError, Senseless):
                _Session(peer, self._keep).hold()
        finally:
            self._sessions.release()

    def _keep(self, peer: str, probes: list[ProbeResult]) -> None:
        """Keep the results of the path back."""
        name = f"client {peer}"
        self._facts.hosts.setdefault(name, peer)
        # The last check counts: what was closed may have been opened meanwhile.
        self._facts.paths = [path for path in self._facts.paths if path.target != name]
        self._facts.paths += _paths(_HERE, name, probes)
        good = sum(probe.is_open for probe in probes)
        self._progress.news(f"client {peer}: {good} of {len(probes)} paths back to it are open")


@dataclass(frozen=True)
class _Sample:
    """How many of our ports a client asks to test."""

    sample: int


@dataclass(frozen=True)
class _Ports:
    """Ports to test, and how many bytes to send."""

    ports: Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=65535)]], msgspec.Meta(min_length=1)]
    bytes: int = 0


class _Session:
    """One proven client: opens a sample of ephemeral ports for it, and tests its ports."""

    def __init__(self, peer: handshake.Peer, keep: Callable[[str, list[ProbeResult]], None]) -> None:
        self._lines = _Lines(peer.connection, time.monotonic() + _SESSION_S)
        self._peer, self._secret, self._keep = peer.address, peer.session_key, keep

    def hold(self) -> None:
        secret = self._secret
        with _listening(read_json(self._lines.read(), _Sample).sample, secret) as ports:
            self._lines.send(json.dumps({"ports": ports}).encode())
            request = read_json(self._lines.read(), _Ports)
            probes = _try(self._peer, request.ports, secret, min(request.bytes, MOST_BULK_BYTES))
            self._lines.send(json.dumps([dataclasses.asdict(probe) for probe in probes]).encode())
            self._keep(self._peer, probes)
            self._lines.read()  # the client is done with our ports when it hangs up


@contextlib.contextmanager
def _listening(count: int, secret: str) -> Iterator[list[int]]:
    """Answer probes at so many ephemeral ports."""
    listeners = [rendezvous.listen(0) for _ in range(max(1, min(count, _MOST_PORTS)))]
    server = ProbeServer(listeners, secret)
    server.start()
    try:
        yield [listener.getsockname()[1] for listener in listeners]
    finally:
        server.stop()
        for listener in listeners:
            listener.close()


def _try(address: str, ports: list[int], secret: str, size: int) -> list[ProbeResult]:
    """Test all ports at the same time; the first gets the data."""
    deadline = time.monotonic() + _PROBE_S
    targets = [
        Target(f"ranks {port}", address, port, 0 if number else size) for number, port in enumerate(ports[:_MOST_PORTS])
    ]
    found: list[ProbeResult | None] = [None] * len(targets)

    def probe(number: int) -> None:
        found[number] = TcpProbe(targets[number], secret, deadline).run()

    threads = [threading.Thread(target=probe, args=(number,), daemon=True) for number in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PROBE_S + 2)
    return [result for result in found if result is not None]


class _Lines:
    """Lines over a connection, with a deadline for all of it."""

    def __init__(self, connection: socket.socket, deadline: float, rest: bytes = b"") -> None:
        self._connection, self._deadline = connection, deadline
        self._rest = rest

    def send(self, line: bytes) -> None:
        self._connection.settimeout(max(0.1, self._deadline - time.monotonic()))
        self._connection.sendall(line + b"\n")

    def read(self, patience_s: float = _SESSION_S) -> bytes:
        """Read one line; empty at the end.

        Raises:
            OSError: it took too long, or the connection broke.
            ValueError: the line is too long.
        """
        until = min(self._deadline, time.monotonic() + patience_s)
        while b"\n" not in self._rest:
            self._connection.settimeout(max(0.01, until - time.monotonic()))
            data = self._connection.recv(4096)
            if not data:
                return b""
            self._rest += data
            if len(self._rest) > _LINE_BYTES:
                raise ValueError("the line is too long")
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def check(request: Request, options: ServerOptions, progress: Progress) -> PortsFacts:
    """Check servers, each in both directions.

    Raises:
        UsageError: no token was given.
        DistdiagError: the server does not accept the token.
    """
    token = options.token()
    if not token:
        raise UsageError(
            "ports check needs the token that ports serve printed",
            hint=f"{handshake.TOKEN}=... {request.program} ports check HOST:PORT",
        )
    here = collect.facts({"listeners": False})
    facts = PortsFacts(nodes={_HERE: here}, hosts={_HERE: here.host}, checks=True)
    for host, port in request.targets:
        progress.news(f"checking {host} port {port} in both directions")
        _check_server(host, port, request, token, facts)
    return facts


def _check_server(host: str, port: int, request: Request, token: str, facts: PortsFacts) -> None:
    (scanned,) = port_scan.scan([(host, port)], timeout_s=request.timeout_s)
    facts.scanned.setdefault(_HERE, []).append(scanned)
    name = f"{host}:{port}"
    facts.hosts[name] = host
    if scanned.state != "open":
        return
    if not scanned.said.startswith(handshake.PROTOCOL):
        facts.unserved[name] = "busy" if scanned.hung_up else "stranger"
        return
    try:
        facts.paths += _talk(name, scanned, request, token)
    except (OSError, ValueError, Senseless):
        facts.unserved[name] = "midway"


def _talk(name: str, server: port_scan.PortResult, request: Request, token: str) -> list[NetworkPath]:
    """Hold one session with a server: its ports from here, ours from there.

    Raises:
        DistdiagError: it does not accept the token.
        OSError, ValueError, Senseless: contact was lost, or a reply is invalid.
    """
    with socket.create_connection((server.address, server.port), timeout=request.timeout_s) as connection:
        began = time.monotonic()
        try:
            exchange = handshake.introduce(connection, token, deadline=began + _PROOF_S)
        except handshake.Refused:
            raise DistdiagError(
                f"wrong token for `distdiag ports serve` at {name}", hint="use the token printed by `ports serve`"
            ) from None
        took, secret = time.monotonic() - began, exchange.session_key
        lines = _Lines(connection, time.monotonic() + _SESSION_S, exchange.rest)
        lines.send(json.dumps({"sample": request.sample}).encode())
        ports = read_json(lines.read(_PROOF_S), _Ports).ports
        with _listening(request.sample, secret) as own:
            forth = _try(server.address, ports, secret, request.bulk_bytes)
            lines.send(json.dumps({"ports": own, "bytes": request.bulk_bytes}).encode())
            back = read_json(lines.read(), list[ProbeResult])
    if not back:
        raise ValueError("no path back was tested")
    return [_control(name, server, took), *_paths(_HERE, name, forth), *_paths(name, _HERE, back)]


def _paths(source: str, target: str, probes: list[ProbeResult]) -> list[NetworkPath]:
    return [NetworkPath(source=source, target=target, purpose=RANKS, probe=probe) for probe in probes]


def _control(name: str, server: port_scan.PortResult, latency_s: float) -> NetworkPath:
    """Make a path of the connection that we talk over."""
    probe = ProbeResult(
        key=f"{PORT} {name}",
        address=server.address,
        port=server.port,
        verdict="ok",
        error="",
        resolved=(server.address,),
        local_address=server.local_address,
        interface=server.interface,
        said="",
        latency_s=latency_s,
        attempts=1,
        retransmits=0,
    )
    return NetworkPath(source=_HERE, target=name, purpose=PORT, probe=probe)
