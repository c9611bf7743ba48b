"""Two nodes without ssh between them: one serves, the other checks, and the server tries the way back.

A server only speaks to those who prove that they know its token (node/handshake.py). It never connects to anybody but
the address that a proven client came from, takes no name or address from it, and ends on its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec  # noqa: TID253 - this module is only imported for serve and check

from distdiag.cluster.records import Senseless, read_json
from distdiag.commands.ports import collect
from distdiag.commands.ports.check import Seen
from distdiag.commands.ports.model import USUAL_PORT, Way
from distdiag.errors import DistdiagError, UsageError
from distdiag.node import handshake, machine, rendezvous, scan
from distdiag.node.door import Server
from distdiag.node.knock import Knock, Probe, Target
from distdiag.node.probing import MOST_BULK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.commands.ports.ask import Meeting
    from distdiag.commands.ports.model import Request
    from distdiag.deliver import Progress

_SHORTEST_TOKEN = 16
_LINE_BYTES = 64 * 2**10
_PROOF_S = 5.0
_SESSION_S = 15.0
_PROBE_S = 4.0
_MOST_PORTS = 64
_MOST_SESSIONS = 16
_MOST_UNPROVEN = 64
_HERE = "here"


def serve(request: Request, meeting: Meeting, progress: Progress) -> Seen:
    """Listen until the time is over, or Ctrl-C.

    Raises:
        DistdiagError: the port cannot be listened at.
    """
    port = request.ports[0] if request.ports else USUAL_PORT
    token = _usable(meeting.token) if meeting.token else handshake.new_key()
    listener = _listen(port)
    here = collect.facts({"listeners": False})
    seen = Seen(nodes={_HERE: here}, hosts={_HERE: here.host}, served=True)
    from distdiag.commands.ports.choice import address_of

    at = f"{address_of(here) or here.host}:{port}"
    progress.news(f"listening at port {port} for {meeting.for_s:g} s; on the other node:")
    progress.news(f"    {handshake.TOKEN}={token} {request.program} ports check {at}")
    door = _Door(listener, token, progress, seen)
    try:
        door.open_for(meeting.for_s)
    except KeyboardInterrupt:
        seen.interrupted = not seen.ways
    finally:
        listener.close()
    return seen


def _listen(port: int) -> socket.socket:
    try:
        return rendezvous.listen(port)
    except OSError as error:
        holder = machine.port_holder(port)
        who = f": pid {holder.pid} ({holder.command}) has it" if holder and holder.pid else ""
        raise DistdiagError(
            f"cannot listen at port {port}: {error.strerror}{who}", hint="take another one: --port PORT"
        ) from error


def _usable(token: str) -> str:
    if len(token) < _SHORTEST_TOKEN:
        raise UsageError(
            f"{handshake.TOKEN} has {len(token)} characters: too few, it could be guessed",
            hint="leave it unset: ports serve makes one",
        )
    return token


class _Door:
    """Lets clients in, each in a thread with a deadline."""

    def __init__(self, listener: socket.socket, token: str, progress: Progress, seen: Seen) -> None:
        self._acceptor = handshake.Acceptor([listener], token, most=_MOST_UNPROVEN, patience_s=_PROOF_S)
        self._progress, self._seen = progress, seen
        self._sessions = threading.Semaphore(_MOST_SESSIONS)

    def open_for(self, seconds: float) -> None:
        """Answer whoever comes in so many seconds and knows the token."""
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
                _Session(peer, self._tell).hold()
        finally:
            self._sessions.release()

    def _tell(self, peer: str, probes: list[Probe]) -> None:
        """Keep what was found on the way back."""
        name = f"client {peer}"
        self._seen.hosts.setdefault(name, peer)
        # The last visit counts: what was closed may have been opened meanwhile.
        self._seen.ways = [way for way in self._seen.ways if way.target != name]
        self._seen.ways += [Way(source=_HERE, target=name, purpose="ranks", probe=probe) for probe in probes]
        good = sum(probe.verdict in ("ok", "lossy") for probe in probes)
        self._progress.news(f"{peer} was here; {good} of {len(probes)} ways back to it are open")


@dataclass(frozen=True)
class _Sample:
    """How many of our ports a client wants to try."""

    sample: int


@dataclass(frozen=True)
class _Ports:
    """Ports to try, and how many bytes to send."""

    ports: Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=65535)]], msgspec.Meta(min_length=1)]
    bytes: int = 0


class _Session:
    """One proven client: opens a sample of ephemeral ports for it, and tries its ports."""

    def __init__(self, peer: handshake.Peer, tell: Any) -> None:  # noqa: ANN401
        self._line = _Line(peer.connection, time.monotonic() + _SESSION_S)
        self._peer, self._secret, self._tell = peer.address, peer.session_key, tell

    def hold(self) -> None:
        secret = self._secret
        with _listening(read_json(self._line.read(), _Sample).sample, secret) as ports:
            self._line.send(json.dumps({"ports": ports}).encode())
            wanted = read_json(self._line.read(), _Ports)
            probes = _try(self._peer, wanted.ports, secret, min(wanted.bytes, MOST_BULK_BYTES))
            self._line.send(json.dumps([dataclasses.asdict(probe) for probe in probes]).encode())
            self._tell(self._peer, probes)
            self._line.read()  # the client is done with our ports when it hangs up


@contextlib.contextmanager
def _listening(count: int, secret: str) -> Iterator[list[int]]:
    """Answer knocks at so many ephemeral ports."""
    listeners = [rendezvous.listen(0) for _ in range(max(1, min(count, _MOST_PORTS)))]
    server = Server(listeners, secret)
    server.start()
    try:
        yield [listener.getsockname()[1] for listener in listeners]
    finally:
        server.stop()
        for listener in listeners:
            listener.close()


def _try(address: str, ports: list[int], secret: str, size: int) -> list[Probe]:
    """Knock at all ports at the same time; the first gets the data."""
    deadline = time.monotonic() + _PROBE_S
    targets = [
        Target(f"ranks {port}", address, port, 0 if number else size) for number, port in enumerate(ports[:_MOST_PORTS])
    ]
    found: list[Probe | None] = [None] * len(targets)

    def knock(number: int) -> None:
        found[number] = Knock(targets[number], secret, deadline).go()

    threads = [threading.Thread(target=knock, args=(number,), daemon=True) for number in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PROBE_S + 2)
    return [probe for probe in found if probe is not None]


class _Line:
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


@dataclass(frozen=True)
class _Server:
    """Whom to check."""

    host: str
    port: int


def check(request: Request, meeting: Meeting, progress: Progress) -> Seen:
    """Check servers, each in both directions.

    Raises:
        UsageError: no token was given.
        DistdiagError: what answers does not know the token.
    """
    if not meeting.token:
        raise UsageError(
            "ports check needs the token that ports serve printed",
            hint=f"{handshake.TOKEN}=... {request.program} ports check HOST:PORT",
        )
    here = collect.facts({"listeners": False})
    seen = Seen(nodes={_HERE: here}, hosts={_HERE: here.host}, checks=True)
    for host, port in request.targets:
        progress.news(f"checking {host} port {port}, both ways")
        _check_one(_Server(host, port), request, meeting.token, seen)
    return seen


def _check_one(server: _Server, request: Request, token: str, seen: Seen) -> None:
    (tried,) = scan.scan([(server.host, server.port)], timeout_s=request.timeout_s)
    seen.tried.setdefault(_HERE, []).append(tried)
    name = f"{server.host}:{server.port}"
    seen.hosts[name] = server.host
    if tried.state != "open":
        return
    if not tried.said.startswith(handshake.PROTOCOL):
        seen.unserved[name] = "busy" if tried.hung_up else "stranger"
        return
    try:
        _talk(server, name, tried, request, token, seen)
    except (OSError, ValueError, Senseless):
        seen.unserved[name] = "midway"


def _talk(server: _Server, name: str, tried: scan.Tried, request: Request, token: str, seen: Seen) -> None:
    """Hold one session with a server: its ports from here, ours from there.

    Raises:
        DistdiagError: it does not know the token.
        OSError, ValueError, Senseless: it went away, or says what makes no sense.
    """
    with socket.create_connection((tried.address, server.port), timeout=request.timeout_s) as connection:
        began = time.monotonic()
        try:
            exchange = handshake.introduce(connection, token, deadline=began + _PROOF_S)
        except handshake.Refused:
            raise DistdiagError(
                f"the distdiag that serves at {name} does not know this token", hint="take the one that it printed"
            ) from None
        took, secret = time.monotonic() - began, exchange.session_key
        line = _Line(connection, time.monotonic() + _SESSION_S, exchange.rest)
        line.send(json.dumps({"sample": request.sample}).encode())
        ports = read_json(line.read(_PROOF_S), _Ports).ports
        with _listening(request.sample, secret) as own:
            forth = _try(tried.address, ports, secret, request.bulk_bytes)
            line.send(json.dumps({"ports": own, "bytes": request.bulk_bytes}).encode())
            back = read_json(line.read(), list[Probe])
    if not back:
        raise ValueError("nothing was tried on the way back")
    seen.ways.append(_control(name, tried, took))
    seen.ways += [Way(source=_HERE, target=name, purpose="ranks", probe=probe) for probe in forth]
    seen.ways += [Way(source=name, target=_HERE, purpose="ranks", probe=probe) for probe in back]


def _control(name: str, tried: scan.Tried, latency_s: float) -> Way:
    """Make a way of the connection that we talk over."""
    probe = Probe(
        key=f"port {name}",
        address=tried.address,
        port=tried.port,
        verdict="ok",
        error="",
        resolved=(tried.address,),
        local_address=tried.local_address,
        interface=tried.interface,
        said="",
        latency_s=latency_s,
        knocks=1,
        retransmits=0,
    )
    return Way(source=_HERE, target=name, purpose="port", probe=probe)
