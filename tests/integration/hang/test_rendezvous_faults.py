"""Two nodes and one broken path between them: the cause, the nodes and the direction are named before a rank starts."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Names, Network, need_network
from cluster_ssh import SSHD, serve_ssh
from support import need
from support_warm import WarmRunning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster_netns import Node
    from support import Result

PORT = "29500"
SMALL = ("--nproc", "1", "--size", "1MiB", "--no-compute", "--json")
BOUND_S = 20.0
"""The paths are tried for at most 5 s; starting, and reaching two nodes, takes the rest, on a machine that is busy."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_network()
    with Network(2) as network:
        yield network


@pytest.fixture
def nodes(network: Network) -> Iterator[list[Node]]:
    yield network.nodes
    for node in network.nodes:
        node.heal()
        node.write_hosts(network.hosts_file(node, Names.GOOD))


def start(network: Network, *arguments: str) -> WarmRunning:
    where = ("--hosts", network.hosts, "--via", network.via)
    client = tuple(network.client.command())
    return WarmRunning("gpu-test", *where, *SMALL, "--stall", "20", *arguments, env=network.client_env(), wrap=client)


def run(network: Network, *arguments: str) -> Result:
    return start(network, *arguments).finish()


def test_two_nodes_without_a_fault_are_fine(network: Network, nodes: list[Node]) -> None:
    result = run(network)
    assert (result.code, result.findings) == (0, {}), result.out
    data = result.report["data"]
    assert [(rank["rank"], rank["host"], rank["status"]) for rank in data["ranks"]] == [
        (0, "node1", "ok"),
        (1, "node2", "ok"),
    ]
    assert data["rendezvous"]["address"] == "10.77.0.1"
    assert data["rendezvous"]["interfaces"] == {"node1": "eth0", "node2": "eth0"}
    assert [(row["host"], row["state"]) for row in data["hosts"]] == [("node1", "ok"), ("node2", "ok")]


@pytest.mark.parametrize(
    ("breaks", "id_", "words"),
    [
        (lambda one, two: one.reject(29500), "port-refused", "node2 is refused by node1 (10.77.0.1) on port 29500"),
        (
            lambda one, two: one.reject(29500, how="admin-prohibited"),
            "port-rejected",
            "node2 is rejected when connecting to node1 (10.77.0.1) on port 29500",
        ),
        (
            lambda one, two: one.drop_ephemeral(29500),
            "rank-ports-filtered",
            "node2 gets no answer from node1 (10.77.0.1) on ephemeral ports (used between ranks)",
        ),
        (
            lambda one, two: two.drop_ephemeral(29500),
            "rank-ports-filtered",
            "node1 gets no answer from node2 (10.77.0.2) on ephemeral ports (used between ranks)",
        ),
        (
            lambda one, two: one.mtu_black_hole(1000, direction="in"),
            "mtu-black-hole",
            "large packets from node2 to node1 are dropped",
        ),
        (
            lambda one, two: one.mtu_black_hole(1000, direction="out"),
            "mtu-black-hole",
            "large packets from node1",
        ),
    ],
)
def test_a_closed_path_is_named_before_ranks_start(
    network: Network, nodes: list[Node], breaks: Callable[[Node, Node], None], id_: str, words: str
) -> None:
    breaks(*nodes)
    assert_closed(network, id_, words)


def assert_closed(network: Network, id_: str, words: str) -> dict[str, Any]:
    """Run it: this is the only finding."""
    began = time.monotonic()
    result = run(network, "--master-port", PORT)
    assert time.monotonic() - began < BOUND_S
    assert result.code == 1
    assert list(result.findings) == [id_]
    found = result.findings[id_]
    assert words in found["title"]
    assert sorted(found["where"]["hosts"]) == ["node1", "node2"]
    assert found["fix"]["commands"]
    assert result.report["data"]["ranks"] == []
    return found


def test_only_the_port_is_blamed_when_others_are_open(network: Network, nodes: list[Node]) -> None:
    nodes[0].drop(29500)
    words = "node2 gets no answer from node1 (10.77.0.1) on port 29500"
    found = assert_closed(network, "port-filtered", words)
    assert "only this port is blocked" in found["detail"]
    assert found["fix"]["commands"][-1].endswith("--master-port 0")


def test_a_stranger_on_the_given_address_is_quoted(network: Network, nodes: list[Node]) -> None:
    # node1 listens on the port; at the client's address another program does.
    server = (
        "import socket\ns = socket.create_server(('', 29500))\nprint('up', flush=True)\nwhile True:\n"
        " c = s.accept()[0]\n c.sendall(b'220 mail ready\\r\\n')\n"
    )
    stranger = network.client.start("python3", "-c", server)
    network.client.wait_for_port(29500)
    result = run(network, "--master-port", PORT, "--master-addr", network.client.address)
    stranger.kill()
    assert list(result.findings) == ["port-foreign"]
    assert "220 mail ready" in result.findings["port-foreign"]["title"]


@pytest.mark.parametrize(
    ("names", "address", "id_", "words"),
    [
        ({"node2": "127.0.0.1 head\n"}, "head", "address-loopback", "on node2, head resolves to node2 itself"),
        ({"node2": "127.0.0.1 localhost\n"}, "head", "address-unresolved", "node2 cannot resolve head"),
    ],
)
def test_a_rendezvous_name_that_leads_elsewhere(
    network: Network, nodes: list[Node], names: dict[str, str], address: str, id_: str, words: str
) -> None:
    for name, text in names.items():
        network[name].write_hosts(text)
    result = run(network, "--master-addr", address)
    # That node1's own name is unknown on node2 as well is told beside it.
    assert [name for name, one in result.findings.items() if one["level"] == "fail"] == [id_]
    assert words in result.findings[id_]["title"]


def test_lost_packets_and_own_names_on_loopback_are_warnings_and_the_ranks_still_talk(
    network: Network, nodes: list[Node]
) -> None:
    for node in nodes:
        node.write_hosts(network.hosts_file(node, Names.DEBIAN))
        # Else 64 KiB are two packets, not 45 as on a real card.
        node.run("ip", "link", "set", "eth0", "gso_max_segs", "1")
    # Never a packet twice in a row: after three times the probe's deadline has passed, and the link fails.
    nodes[1].at_switch("meta protocol ip numgen inc mod 12 == 0 drop", "both")
    result = run(network, "--size", "64KiB", "--stall", "60")
    assert result.statuses == ["ok", "ok"], result.out
    assert (result.code, result.report["verdict"]) == (0, "warn"), result.out
    assert sorted(result.findings["link-lossy"]["where"]["hosts"]) == ["node1", "node2"]
    found = result.findings["name-loopback"]
    assert "127.0.1.1" in found["title"]
    assert any("--local-addr=10.77.0.1" in command for command in found["fix"]["commands"])


def test_a_node_that_goes_away_during_the_test_is_named(network: Network, nodes: list[Node]) -> None:
    # Over --via nothing of ours goes through the network, so the node is cut off by ending what leads to it.
    running = start(network, "--inject", "late:0@memory")
    running.wait_for("memory: all ranks")
    for pid, command in nodes[1].processes().items():
        if "distdiag-agent" in command:
            os.kill(pid, signal.SIGKILL)
    result = running.finish()
    assert result.code == 1
    assert list(result.findings) == ["node-lost"]
    assert result.findings["node-lost"]["where"]["hosts"] == ["node2"]
    assert result.statuses == ["waiting", "lost"]
    assert nodes[1].processes() == {}


def test_a_node_whose_network_dies_during_the_test_is_named_and_cleans_up_by_itself() -> None:
    need_network()
    need("ssh", SSHD)
    with Network(2) as own:
        serve_ssh(own)
        late = ("--stall", "30", "--inject", "late:0@memory")
        client = tuple(own.client.command())
        running = WarmRunning("gpu-test", "--hosts", own.hosts, *SMALL, *late, env=own.client_env(), wrap=client)
        running.wait_for("memory: all ranks")
        own.nodes[1].vanish()
        began = time.monotonic()
        result = running.finish()
        assert time.monotonic() - began < 25  # without that, the stall's 30 s
        assert result.code == 1
        assert list(result.findings) == ["node-lost"]
        assert "lost contact with node2 during the test: no message for" in result.findings["node-lost"]["title"]
        # sshd itself cannot know yet that the peer is gone.
        left = [command for command in own.nodes[1].processes().values() if not command.startswith("sshd:")]
        assert left == []


def test_a_stopped_rank_on_the_other_node_is_named_with_its_host(network: Network, nodes: list[Node]) -> None:
    result = run(network, "--stall", "15", "--inject", "stop:1")
    assert result.code == 1
    assert result.findings["rank-missing"]["where"]["hosts"] == ["node2"]
    assert result.findings["rank-missing"]["where"]["ranks"] == [1]
    assert "do_signal_stop" in " ".join(result.findings["rank-missing"]["evidence"])
