"""A TCPStore's members, read from torch's own stores, and from servers that are none."""

from __future__ import annotations

import base64
import pickle
import socket
import struct
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from loops import each

from distdiag.facts.network import tcp_store
from distdiag.facts.network.tcp_store import Rendezvous, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import TCPStore

HOST = "127.0.0.1"


@pytest.fixture(params=[True, False], ids=["libuv", "plain"])
def store(request: pytest.FixtureRequest) -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, use_libuv=request.param)


def read(port: int) -> Store | None:
    return tcp_store.read(HOST, port, timeout_s=5.0)


def test_the_members_of_each_kind_of_start_are_read_and_nothing_is_changed(store: TCPStore) -> None:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

    assert read(store.port) == Store()
    TCPStore(HOST, store.port, world_size=3, is_master=False)
    state = _RendezvousState()
    nodes = [_NodeDesc("node1", 13, 0), _NodeDesc("node2.cluster", 13, 0)]
    state.participants = dict.fromkeys(nodes, 0)
    state.wait_list = {_NodeDesc("node3", 13, 0)}
    state.last_heartbeats = dict.fromkeys(nodes, datetime.now(UTC))
    store.set("torch.rendezvous.7", base64.b64encode(pickle.dumps(state)).decode())
    state.complete = True
    store.set("torch.rendezvous.8", base64.b64encode(pickle.dumps(state)).decode())
    PrefixStore("none", store).set("torchelastic/role_info/1", "{}")
    address = (struct.pack("<Q", 5) + b"node3" + bytes(40)).decode()
    PrefixStore("default_pg/0//cpu/", store).set("0/2", address)
    before = sorted(store.list_keys())
    assert read(store.port) == Store(
        connected=1,
        rendezvous=(
            Rendezvous("7", ("node1", "node2.cluster"), is_complete=False),
            Rendezvous("8", ("node1", "node2.cluster"), is_complete=True),
        ),
        node_ranks=(("none", 1),),
        ranks=((2, "node3"),),
    )
    assert sorted(store.list_keys()) == before


@contextmanager
def _server(answer: bytes) -> Iterator[int]:
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)
                connection.recv(1)
                time.sleep(0.2)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


_PING = struct.pack("<I", 0x64647374)
_ONE_KEY = _PING + struct.pack("<Q", 1)


@each(
    "answer",
    [
        *(b"", b"HTTP/1.0 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", _PING),
        *(_PING + struct.pack("<Q", 1 << 60), _ONE_KEY + struct.pack("<Q", 1 << 40), _ONE_KEY + struct.pack("<Q", 9)),
    ],
)
def test_a_server_that_is_no_store_or_lies_is_left_in_bounded_time(answer: bytes) -> None:
    with _server(answer) as port:
        began = time.monotonic()
        assert tcp_store.read(HOST, port, timeout_s=0.5) is None
        assert time.monotonic() - began < timedelta(seconds=30).total_seconds()


def test_a_pickle_that_would_run_code_is_only_parsed() -> None:
    hostile = base64.b64encode(pickle.dumps([print, ("participants", "addr", "n1"), "x" * 100]))
    for value in (hostile, b"!", b"\x80", base64.b64encode(b"\x80\x05h\x07."), base64.b64encode(pickle.dumps({}))):
        assert tcp_store._rendezvous("7", value).is_complete is False


def test_names_from_a_store_are_printable_and_short() -> None:
    value = base64.b64encode(pickle.dumps({"participants": {"addr": "\x1b[31mn1\n" + "x" * 1000}}))
    found = tcp_store._rendezvous("\x1b]0;a" * 100, value)
    assert all(text.isprintable() and len(text) <= 255 * 4 for text in (found.run_id, *found.hosts))


def test_no_listener_is_no_store() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    assert read(port) is None
