"""Mutual authentication: both ends of a connection prove that they know the run's key.

    both    distdiag-peer/1 NONCE
    client  PROOF WORDS
    server  PROOF

NONCE is 128 fresh random bits of that side; PROOF is the HMAC-SHA-256 (RFC 2104) of the side, both nonces and WORDS
under the key. The key is never sent, and a recorded exchange proves nothing on another connection. WORDS is a line that
names the client or its request.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import selectors
import socket
import time

from distdiag.facts.text import first_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

PROTOCOL = "distdiag-peer/1"
PATIENCE_S = 30.0
"""Time for a whole handshake. An honest peer needs one round trip, but its host may be busy."""
MOST_UNPROVEN = 4096
"""Limit of pending handshakes: above it the oldest is closed. All ranks of a job may connect at once."""
_MAX_LINE_BYTES = 8192
_PIECE_BYTES = 4096
_NO_ROOM_S = 0.05


def new_key() -> str:
    """Return a new key of 128 random bits, in hexadecimal."""
    return os.urandom(16).hex()


class Refused(Exception):
    """The peer does not know the key.

    `said`: its first line, printable; empty if it sent nothing. `hung_up`: it closed the connection before it could
    have proved anything.
    """

    def __init__(self, said: str = "", *, hung_up: bool = False) -> None:
        super().__init__(said)
        self.said, self.hung_up = said, hung_up


class Handshake:
    """One side of the exchange, without the connection: bytes in, bytes out."""

    def __init__(self, key: str, *, is_server: bool = False, words: bytes = b"") -> None:
        if not key:
            raise ValueError("the key is empty")
        self._key, self._is_server, self._words = key.encode(), is_server, words
        self._nonce, self._peer_nonce = os.urandom(16).hex().encode(), b""
        self._first = b""
        self._received = b""
        self.greeting = PROTOCOL.encode() + b" " + self._nonce + b"\n"
        self.words: bytes | None = None
        """The peer's own words; None until it is authenticated."""

    @property
    def said(self) -> str:
        """The first line of the peer, printable."""
        return first_line(self._first or self._received)

    @property
    def rest(self) -> bytes:
        """Data received after the peer's proof."""
        return self._received

    @property
    def session_key(self) -> str:
        """A key known only to the two ends of this connection."""
        return self._digest("session", b"")

    def receive(self, data: bytes) -> bytes:
        """Process received bytes and return the bytes to send.

        Raises:
            Refused: the peer does not know the key.
        """
        self._received += data
        to_send = b""
        while self.words is None and b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            if not line:
                continue
            if self._peer_nonce:
                self._check(line)
            else:
                to_send += self._take_greeting(line)
        if self.words is None and (len(self._received) > _MAX_LINE_BYTES or self._is_stranger()):
            raise Refused(self.said)
        return to_send

    def _is_stranger(self) -> bool:
        """Whether an incomplete first line cannot become a greeting."""
        begun = self._received[: len(PROTOCOL)]
        return not self._peer_nonce and not PROTOCOL.encode().startswith(begun)

    def _take_greeting(self, line: bytes) -> bytes:
        self._first = line
        match = re.fullmatch(PROTOCOL.encode() + rb" ([0-9a-f]{32})", line)
        if match is None or match[1] == self._nonce:
            raise Refused(self.said)
        self._peer_nonce = match[1]
        words = b"" if self._is_server else self._words
        return self._proof(is_server=self._is_server, words=words) + b" " + words + b"\n"

    def _check(self, line: bytes) -> None:
        proof, _, words = line.partition(b" ")
        if not hmac.compare_digest(proof, self._proof(is_server=not self._is_server, words=words)):
            raise Refused(self.said)
        self.words = words

    def _proof(self, *, is_server: bool, words: bytes) -> bytes:
        return self._digest("server" if is_server else "client", words).encode()

    def _digest(self, purpose: str, words: bytes) -> str:
        nonces = (self._nonce, self._peer_nonce) if self._is_server else (self._peer_nonce, self._nonce)
        return hmac.new(self._key, b" ".join((purpose.encode(), *nonces, words)), "sha256").hexdigest()


def introduce(connection: socket.socket, key: str, words: bytes = b"", *, deadline: float | None = None) -> Handshake:
    """As the client, exchange proofs over a blocking connection, until `deadline` (time.monotonic) at the latest.

    Raises:
        Refused: the peer does not know the key, or hung up.
        TimeoutError: the peer was too slow.
        OSError: the connection broke.
    """
    exchange = Handshake(key, words=words)
    # The empty line makes most foreign servers answer at once, which identifies them.
    to_send = exchange.greeting + b"\n"
    while exchange.words is None:
        try:
            connection.sendall(to_send)
            _limit(connection, deadline)
            data = connection.recv(_PIECE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise Refused(exchange.said, hung_up=True)
        to_send = exchange.receive(data)
    connection.sendall(to_send)
    return exchange


def _limit(connection: socket.socket, deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    connection.settimeout(left)


class Peer:
    """An authenticated client: its connection (non-blocking), address and words.

    Data sent after its proof is still unread on the connection.
    """

    def __init__(self, connection: socket.socket, address: str, exchange: Handshake) -> None:
        self.connection, self.address = connection, address
        self.words, self.session_key = exchange.words or b"", exchange.session_key

    @property
    def number(self) -> int | None:
        """The client's words, if they are a number of a few digits."""
        return int(self.words) if self.words.isdigit() and len(self.words) < 12 else None


class _Unproven:
    def __init__(self, connection: socket.socket, address: str, key: str, until: float) -> None:
        self.connection, self.address, self.until = connection, address, until
        self.exchange = Handshake(key, is_server=True)


class Acceptor:
    """Accepts authenticated clients; a connection that fails or stalls holds up no other.

    A connection has `patience_s` in all to prove itself, however slowly it sends. Above `most` pending connections the
    oldest is closed, so silent connections cannot shut others out.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        key: str,
        *,
        most: int = MOST_UNPROVEN,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._key, self._most, self._patience_s = key, most, patience_s
        self._listeners = list(listeners)
        self._unproven: dict[socket.socket, _Unproven] = {}
        """In order of age, the oldest first."""
        self.selector = selectors.DefaultSelector()
        """Callers may register further descriptors, each with its data."""
        for listener in self._listeners:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ)

    def wait(self, timeout_s: float | None = None) -> tuple[list[Peer], list[Any]]:
        """Wait for events; return newly authenticated clients, and the data of the caller's ready descriptors."""
        peers: list[Peer] = []
        others = []
        for key, _ in self.selector.select(self._until_next_expiry(timeout_s)):
            if key.data is not None:
                others.append(key.data)
            elif key.fileobj in self._unproven:
                peer = self._read(self._unproven[key.fileobj])
                if peer is not None:
                    peers.append(peer)
            elif key.fileobj in self._listeners:
                self._accept(key.fileobj)
        now = time.monotonic()
        for late in [unproven for unproven in self._unproven.values() if unproven.until <= now]:
            self._drop(late)
        return peers, others

    def close(self) -> None:
        """Close pending connections; the listeners stay open and are blocking again."""
        for unproven in list(self._unproven.values()):
            self._drop(unproven)
        self.selector.close()
        for listener in self._listeners:
            listener.setblocking(True)

    def _until_next_expiry(self, timeout_s: float | None) -> float | None:
        oldest = next(iter(self._unproven.values()), None)
        if oldest is None:
            return timeout_s
        left = max(0.0, oldest.until - time.monotonic())
        return left if timeout_s is None else min(left, timeout_s)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_oldest():
                time.sleep(_NO_ROOM_S)  # honest peers use all descriptors; the listener stays ready meanwhile
            return
        if len(self._unproven) >= self._most:
            self._drop_oldest()
        connection.setblocking(False)
        peer = str(address[0]).removeprefix("::ffff:")
        unproven = _Unproven(connection, peer, self._key, time.monotonic() + self._patience_s)
        self._unproven[connection] = unproven
        self.selector.register(connection, selectors.EVENT_READ)
        self._send(unproven, unproven.exchange.greeting)

    def _read(self, unproven: _Unproven) -> Peer | None:
        try:
            # Line by line: data after the proof belongs to the connection's next owner.
            ahead = unproven.connection.recv(_PIECE_BYTES, socket.MSG_PEEK)
            data = unproven.connection.recv(ahead.find(b"\n") + 1 or len(ahead)) if ahead else b""
            to_send = unproven.exchange.receive(data)
        except BlockingIOError:
            return None
        except (OSError, Refused):
            data = b""
        if not data:
            self._drop(unproven)
            return None
        if to_send and not self._send(unproven, to_send):
            return None
        if unproven.exchange.words is None:
            return None
        del self._unproven[unproven.connection]
        self.selector.unregister(unproven.connection)
        return Peer(unproven.connection, unproven.address, unproven.exchange)

    def _send(self, unproven: _Unproven, data: bytes) -> bool:
        """Send a line; a new connection has room for it. False: the connection was closed."""
        try:
            is_sent = unproven.connection.send(data) == len(data)
        except OSError:
            is_sent = False
        if not is_sent:
            self._drop(unproven)
        return is_sent

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._unproven.values()), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, unproven: _Unproven) -> None:
        del self._unproven[unproven.connection]
        self.selector.unregister(unproven.connection)
        unproven.connection.close()
