"""Authentication of peers: the key is proved, never sent; replays, slow peers and full backlogs gain no access."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from loops import each

from distdiag.agent import handshake
from distdiag.agent.handshake import Acceptor, Handshake, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = handshake.new_key()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def address(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()
    return host, port


def exchange(client: Handshake, server: Handshake) -> tuple[bytes, bytes]:
    """Let two sides talk to the end; return all that each sent."""
    from_client, from_server = client.greeting, server.greeting
    sent = [b"", b""]
    while from_client or from_server:
        sent = [sent[0] + from_client, sent[1] + from_server]
        from_client, from_server = client.receive(from_server), server.receive(from_client)
    return sent[0], sent[1]


def test_both_ends_prove_the_key_and_never_send_it() -> None:
    client, server = Handshake(KEY, words=b"rank 3"), Handshake(KEY, is_server=True)
    sent = b"".join(exchange(client, server))
    assert (server.words, client.words) == (b"rank 3", b"")
    assert client.session_key == server.session_key
    assert KEY.encode() not in sent


def test_words_that_were_changed_on_the_way_are_refused() -> None:
    client, server = Handshake(KEY, words=b"rank 3"), Handshake(KEY, is_server=True)
    server.receive(client.greeting)
    proof = client.receive(server.greeting)
    with pytest.raises(Refused):
        server.receive(proof.replace(b"rank 3", b"rank 0"))


def test_a_recording_is_refused_by_the_next_connection() -> None:
    client, server = Handshake(KEY, words=b"rank 3"), Handshake(KEY, is_server=True)
    recorded, _ = exchange(client, server)
    with pytest.raises(Refused):
        Handshake(KEY, is_server=True).receive(recorded)


def test_who_sends_back_what_it_hears_is_refused() -> None:
    for is_server in (False, True):
        mine = Handshake(KEY, is_server=is_server)
        with pytest.raises(Refused):
            mine.receive(mine.greeting)


@each(
    "said", [b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00\x01\x02", b"a" * 20_000, b"distdiag-x"]
)
def test_a_stranger_is_refused_at_its_first_word(said: bytes) -> None:
    with pytest.raises(Refused) as refused:
        Handshake(KEY).receive(said)
    assert refused.value.said.isprintable()
    assert len(refused.value.said) <= 80


def test_no_key_is_no_key_that_everybody_knows() -> None:
    with pytest.raises(ValueError, match="key is empty"):
        Handshake("")


class Door(threading.Thread):
    """An acceptor at work, which notes who came."""

    def __init__(self, acceptor: Acceptor) -> None:
        super().__init__(daemon=True)
        self.acceptor, self.came, self._over = acceptor, list[bytes](), threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            for peer in self.acceptor.wait(0.05)[0]:
                self.came.append(peer.words)
                peer.connection.close()
        self.acceptor.close()

    def __enter__(self) -> Door:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(10)


def test_silent_strangers_do_not_keep_the_owner_out(listener: socket.socket) -> None:
    listener.listen(512)
    with Door(Acceptor([listener], KEY, most=8, patience_s=3600)) as door:
        strangers = [socket.create_connection(address(listener), timeout=60) for _ in range(200)]
        with socket.create_connection(address(listener), timeout=60) as owner:
            handshake.introduce(owner, KEY, b"owner", deadline=time.monotonic() + 60)
            # Its proof is read after that of the server was sent.
            while not door.came:
                time.sleep(0.01)
        for stranger in strangers:
            stranger.close()
    assert door.came == [b"owner"]


def test_a_byte_now_and_then_does_not_win_time(listener: socket.socket) -> None:
    """The deadline is for all of it: without it, each byte would start it again."""
    with Door(Acceptor([listener], KEY, patience_s=1.0)), socket.create_connection(address(listener)) as stranger:
        stranger.settimeout(60)
        assert stranger.recv(200).startswith(handshake.PROTOCOL.encode())
        dripping = threading.Event()

        def drip() -> None:
            while not dripping.wait(0.1):
                try:
                    stranger.sendall(b"\n")
                except OSError:
                    return

        threading.Thread(target=drip, daemon=True).start()
        try:
            while stranger.recv(200):
                pass
        except ConnectionResetError:
            pass
        dripping.set()


def test_the_client_waits_for_a_silent_server_until_its_deadline_only(listener: socket.socket) -> None:
    with socket.create_connection(address(listener)) as client, pytest.raises(TimeoutError):
        handshake.introduce(client, KEY, deadline=time.monotonic() + 0.2)


def test_another_key_is_refused_on_both_sides(listener: socket.socket) -> None:
    with (
        Door(Acceptor([listener], KEY)) as door,
        socket.create_connection(address(listener), timeout=60) as client,
        pytest.raises(Refused),
    ):
        handshake.introduce(client, handshake.new_key(), b"me", deadline=time.monotonic() + 60)
    assert door.came == []


def test_what_follows_the_proof_is_left_for_whoever_takes_the_connection(listener: socket.socket) -> None:
    """An agent sends further data at once, possibly in the same packet."""
    acceptor = Acceptor([listener], KEY)
    with socket.create_connection(address(listener), timeout=60) as client:
        mine = Handshake(KEY, words=b"me")
        peers, _ = acceptor.wait(60)
        while not (heard := client.recv(4096)).endswith(b"\n"):
            pass
        client.sendall(mine.greeting + mine.receive(heard) + b"in\nfirst\nsecond")
        while not peers:
            peers, _ = acceptor.wait(60)
        peers[0].connection.setblocking(True)
        client.shutdown(socket.SHUT_WR)
        with peers[0].connection.makefile("rb") as rest:
            assert rest.read() == b"in\nfirst\nsecond"
        peers[0].connection.close()
    acceptor.close()
