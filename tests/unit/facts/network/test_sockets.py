"""Sockets from the kernel's tables; the recordings are described in recorded/proc_net/README.md."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from distdiag.facts.network import sockets
from distdiag.facts.network.sockets import Socket

RECORDED = Path(__file__).parents[3] / "recorded" / "proc_net"


def read(table: str) -> str:
    return (RECORDED / table).read_text()


def by_port(table: str) -> dict[int, Socket]:
    found = sockets.parse_inet(read(table), table)
    assert all(one.inode == inode and one.protocol == table for inode, one in found.items())
    return {int(one.local.rpartition(":")[2]): one for one in found.values() if not one.local.endswith(":29500")}


def test_a_listener_has_a_backlog_and_no_queues() -> None:
    found = sockets.parse_inet(read("tcp"), "tcp")
    assert found[7788845] == Socket(7788845, "tcp", "LISTEN", "0.0.0.0:29500", backlog=1, retransmits=0)
    assert found[7788854] == Socket(7788854, "tcp", "LISTEN", "127.0.0.1:29600", backlog=1, retransmits=0)


def test_states_queues_and_timers_of_tcp() -> None:
    found = by_port("tcp")
    idle = Socket(7788846, "tcp", "ESTABLISHED", "10.0.0.2:40001", "10.0.0.2:29500", 0, 0, retransmits=0)
    assert found[40001] == idle
    closed, full, mute = found[40003], found[40004], found[40006]
    assert (closed.state, closed.receive_queue_bytes) == ("CLOSE_WAIT", 1)  # the end of the stream is counted
    assert (full.send_queue_bytes, full.timer) == (3_782_144, "zero-window-probe")
    assert (mute.state, mute.retransmits, mute.timer) == ("SYN_SENT", 3, "retransmit")
    assert (mute.local, mute.remote) == ("127.0.0.1:40006", "127.0.0.1:29600")


def test_what_was_received_and_not_read() -> None:
    found = sockets.parse_inet(read("tcp"), "tcp").values()
    waiting = {one.remote: one.receive_queue_bytes for one in found if one.receive_queue_bytes}
    assert waiting == {"10.0.0.2:40001": 5, "127.0.0.1:40004": 128_512, "127.0.0.1:29500": 1}


def test_sockets_that_no_process_has_any_more_are_left_out() -> None:
    assert 0 not in sockets.parse_inet(read("tcp"), "tcp")
    assert "FIN_WAIT2" not in {one.state for one in sockets.parse_inet(read("tcp"), "tcp").values()}


def test_ipv6_and_ipv4_inside_of_it() -> None:
    ends = {(one.local, one.remote) for one in sockets.parse_inet(read("tcp6"), "tcp6").values()}
    assert ends == {
        ("[::]:29501", ""),
        ("10.0.0.2:29501", "10.0.0.2:40010"),
        ("[::1]:29501", "[::1]:40009"),
        ("[::1]:40009", "[::1]:29501"),
        ("[fd00::2]:29501", "[fd00::2]:40011"),
        ("[fd00::2]:40011", "[fd00::2]:29501"),
    }


def test_udp_has_states_of_its_own() -> None:
    found = by_port("udp")
    assert found[30000] == Socket(7788866, "udp", "UNCONNECTED", "0.0.0.0:30000", "", 0, 832)
    assert found[30001] == Socket(7788867, "udp", "ESTABLISHED", "127.0.0.1:30001", "127.0.0.1:30000", 0, 0)
    assert by_port("udp6")[30002].local == "[::1]:30002"


def test_unix_sockets() -> None:
    found = sockets.parse_unix(read("unix"))
    assert found[7788869] == Socket(7788869, "unix", "LISTEN", "/tmp/example dir/a socket")
    assert found[7788871] == Socket(7788871, "unix", "ESTABLISHED", "/tmp/example dir/a socket")
    assert found[7788872] == Socket(7788872, "unix", "LISTEN", "@an-abstract-one")
    assert found[7788873] == Socket(7788873, "unix", "UNCONNECTED")
    assert len(found) == 7


def test_a_unix_path_may_be_anything() -> None:
    forged = "0002: so that it looks like a line\n"
    table = (
        "Num RefCount ...\n0000: 00000002 00000000 00010000 0001 01 5 /tmp/a\nb: c d e f\n"
        f"{forged}0001: 00 00 00 0001 03 6\n"
    )
    assert set(sockets.parse_unix(table)) == {5, 6}


def test_a_state_of_a_kernel_to_come_is_told_by_its_number() -> None:
    row = "0: 0100007F:73A0 00000000:0000 1F 00000000:00000001 09:00000000 00000000 0 0 77 2"
    one = sockets.parse_inet(f"head\n{row}\n", "tcp")[77]
    assert (one.state, one.timer) == ("31", "9")


def test_nothing_to_read() -> None:
    assert sockets.parse_inet("", "tcp") == {}
    assert sockets.parse_unix("") == {}
    assert sockets.parse_addresses("", "") == ()


def test_the_addresses_of_a_namespace() -> None:
    found = sockets.parse_addresses(read("fib_trie"), read("if_inet6"))
    assert found == ("10.0.0.2", "127.0.0.1", "::1", "fd00::2")


def test_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = sockets.Tables().of(os.getpid())
        inode = os.fstat(server.fileno()).st_ino
        assert one.sockets[inode].local == f"127.0.0.1:{server.getsockname()[1]}"
        assert "127.0.0.1" in one.addresses


def test_a_namespace_is_read_once() -> None:
    tables = sockets.Tables()
    assert tables.of(os.getpid()) is tables.of(os.getpid())


def test_no_such_process() -> None:
    assert sockets.Tables().of(2**22 + 1) == sockets.Namespace({}, ())


def test_unix_sockets_know_their_other_ends() -> None:
    here, there = socket.socketpair()
    with here, there:
        inodes = [os.fstat(one.fileno()).st_ino for one in (here, there)]
        peers = sockets.unix_peers()
    assert [peers[inode] for inode in inodes] == inodes[::-1]
