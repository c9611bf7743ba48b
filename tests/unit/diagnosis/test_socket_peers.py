"""The process at the other end: required and forbidden matches across processes, namespaces and hosts."""

from __future__ import annotations

from dataclasses import replace

from loops import each

from distdiag.diagnosis.socket_peers import Endpoint, match

INSIDE = "net:[4026532001]"
OUTSIDE = "net:[4026531840]"
ADDRESSES = {
    ("n1", OUTSIDE): ("127.0.0.1", "::1", "10.0.0.1", "fd00::1"),
    ("n2", OUTSIDE): ("127.0.0.1", "::1", "10.0.0.2", "fd00::2"),
    ("n1", INSIDE): ("127.0.0.1", "172.17.0.2"),
    ("n2", INSIDE): ("127.0.0.1", "172.17.0.2"),
}


def end(host: str, pid: int, local: str, remote: str = "", **more: str) -> Endpoint:
    one = Endpoint(pid, pid * 10, "tcp", "ESTABLISHED" if remote else "LISTEN", local, remote, host, OUTSIDE)
    return replace(one, **more)  # type: ignore[arg-type]


def pids(*endpoints: Endpoint) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """Match, and give (host, pid) of who is at the other end of (host, pid)."""
    found = match(endpoints, ADDRESSES)
    assert found.keys() == {one.key for one in endpoints}
    return {(host, pid): [(other.host, other.pid) for other in others] for (host, pid, _), others in found.items()}


def test_two_hosts() -> None:
    worker, master = end("n2", 7, "10.0.0.2:40000", "10.0.0.1:29500"), end("n1", 3, "10.0.0.1:29500", "10.0.0.2:40000")
    assert pids(worker, master, end("n1", 3, "0.0.0.0:29500", inode=31)) == {  # type: ignore[arg-type]
        ("n2", 7): [("n1", 3)],
        ("n1", 3): [],  # the listener, which is the last of this pid
    }
    assert match([worker, master], ADDRESSES) == {worker.key: (master,), master.key: (worker,)}


def test_an_ipv6_socket_that_speaks_ipv4_matches_one_that_knows_no_other() -> None:
    worker = end("n2", 7, "10.0.0.2:40000", "10.0.0.1:29500")
    master = end("n1", 3, "10.0.0.1:29500", "10.0.0.2:40000", protocol="tcp6")
    assert pids(worker, master) == {("n2", 7): [("n1", 3)], ("n1", 3): [("n2", 7)]}


def test_ipv6() -> None:
    worker = end("n2", 7, "[fd00::2]:40000", "[fd00::1]:29500", protocol="tcp6")
    master = end("n1", 3, "[fd00::1]:29500", "[fd00::2]:40000", protocol="tcp6")
    assert pids(worker, master) == {("n2", 7): [("n1", 3)], ("n1", 3): [("n2", 7)]}


def test_tcp_and_udp_are_two_worlds() -> None:
    assert pids(
        end("n2", 7, "10.0.0.2:40000", "10.0.0.1:29500"),
        end("n1", 3, "10.0.0.1:29500", "10.0.0.2:40000", protocol="udp"),
        end("n1", 4, "0.0.0.0:29500", protocol="udp"),
    ) == {("n2", 7): [], ("n1", 3): [], ("n1", 4): []}


def test_the_other_end_is_not_among_them_or_its_address_was_translated() -> None:
    assert pids(
        end("n2", 7, "10.0.0.2:40000", "10.0.0.1:29500"),
        end("n1", 3, "10.0.0.1:29500", "192.168.9.9:40000"),
    ) == {("n2", 7): [], ("n1", 3): []}


def test_loopback_is_a_matter_of_one_namespace_of_one_host() -> None:
    def pair(host: str, first: int, network: str) -> tuple[Endpoint, Endpoint, Endpoint]:
        return (
            end(host, first, "127.0.0.1:29500", "127.0.0.1:40000", network=network),
            end(host, first + 1, "127.0.0.1:40000", "127.0.0.1:29500", network=network),
            end(host, first + 2, "127.0.0.1:29500", network=network),
        )

    found = pids(*pair("n1", 10, OUTSIDE), *pair("n1", 20, INSIDE), *pair("n2", 10, OUTSIDE))
    for host, first in (("n1", 10), ("n1", 20), ("n2", 10)):
        assert found[host, first] == [(host, first + 1)]
        assert found[host, first + 1] == [(host, first)]
        assert found[host, first + 2] == []


def test_a_lonely_loopback_end_matches_nobody_in_another_namespace() -> None:
    alone = end("n1", 10, "127.0.0.1:40000", "127.0.0.1:29500")
    others = (
        end("n1", 20, "127.0.0.1:29500", "127.0.0.1:40000", network=INSIDE),
        end("n1", 21, "127.0.0.1:29500", network=INSIDE),
        end("n1", 22, "0.0.0.0:29500", network=INSIDE),
        end("n2", 30, "0.0.0.0:29500"),
    )
    assert pids(alone, *others)["n1", 10] == []


@each(
    "bound_to, remote, takes",
    [
        ("10.0.0.1:29500", "10.0.0.1:29500", True),
        ("0.0.0.0:29500", "10.0.0.1:29500", True),
        ("[::]:29500", "10.0.0.1:29500", True),
        ("[::]:29500", "[fd00::1]:29500", True),
        ("0.0.0.0:29500", "[fd00::1]:29500", False),
        ("0.0.0.0:29501", "10.0.0.1:29500", False),
        ("127.0.0.1:29500", "10.0.0.1:29500", False),
        ("0.0.0.0:29500", "10.0.0.3:29500", False),
    ],
)
def test_a_connection_in_the_backlog_matches_the_listener(bound_to: str, remote: str, takes: bool) -> None:
    local = "[fd00::2]:40000" if "fd00" in remote else "10.0.0.2:40000"
    for state in ("ESTABLISHED", "SYN_SENT"):
        worker, listener = end("n2", 7, local, remote, state=state), end("n1", 3, bound_to)
        assert pids(worker, listener) == {("n2", 7): [("n1", 3)] if takes else [], ("n1", 3): []}


def test_an_any_address_listener_of_another_host_is_not_meant() -> None:
    found = pids(
        end("n2", 7, "10.0.0.2:40000", "10.0.0.1:29500"),
        end("n1", 3, "0.0.0.0:29500"),
        end("n2", 4, "0.0.0.0:29500"),
        end("n1", 5, "0.0.0.0:29500", network=INSIDE),
    )
    assert found["n2", 7] == [("n1", 3)]


def test_on_loopback_an_any_address_listener_of_the_same_namespace_is_meant() -> None:
    found = pids(
        end("n1", 7, "127.0.0.1:40000", "127.0.0.1:29500"),
        end("n1", 3, "[::]:29500", protocol="tcp6"),
        end("n1", 4, "0.0.0.0:29500", network=INSIDE),
    )
    assert found["n1", 7] == [("n1", 3)]


def test_a_socket_that_was_inherited_belongs_to_all_who_have_it() -> None:
    worker = end("n2", 7, "10.0.0.2:40000", "10.0.0.1:29500")
    shared = [end("n1", pid, "10.0.0.1:29500", "10.0.0.2:40000") for pid in (3, 4)]
    assert pids(worker, *shared)["n2", 7] == [("n1", 3), ("n1", 4)]


def test_container_addresses_that_every_host_has_match_on_the_nearest() -> None:
    def pair(host: str) -> tuple[Endpoint, Endpoint]:
        client = end(host, 1, "172.17.0.2:40000", "172.17.0.3:29500", network=INSIDE)
        return client, end(host, 2, "172.17.0.3:29500", "172.17.0.2:40000", network="net:[4026532002]")

    found = pids(*pair("n1"), *pair("n2"))
    assert found == {
        ("n1", 1): [("n1", 2)],
        ("n1", 2): [("n1", 1)],
        ("n2", 1): [("n2", 2)],
        ("n2", 2): [("n2", 1)],
    }


def test_a_connection_to_an_own_address_stays_at_home() -> None:
    """172.17.0.2 in a container of n1 differs from 172.17.0.2 in a container of n2."""
    alone = end("n1", 1, "172.17.0.2:40000", "172.17.0.2:29500", network=INSIDE)
    elsewhere = end("n2", 2, "172.17.0.2:29500", "172.17.0.2:40000", network=INSIDE)
    assert pids(alone, elsewhere)["n1", 1] == []


def test_a_socket_connected_to_itself_is_its_own_other_end() -> None:
    itself = end("n1", 1, "127.0.0.1:29500", "127.0.0.1:29500")
    assert match([itself], {}) == {itself.key: (itself,)}


def test_a_connected_udp_socket_matches_the_bound_one() -> None:
    found = pids(
        end("n2", 7, "10.0.0.2:40000", "10.0.0.1:514", protocol="udp"),
        end("n1", 3, "0.0.0.0:514", protocol="udp", state="UNCONNECTED"),
    )
    assert found["n2", 7] == [("n1", 3)]


def test_nobody() -> None:
    assert match([], {}) == {}
