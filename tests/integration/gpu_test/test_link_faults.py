"""Three nodes and one whose connections do not last: the node is accused, and who saw it is a witness."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from cluster import Network, need_network
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster_netns import Node
    from support import Result

SERVE = """
import signal
from distdiag.agent import probe_server, rendezvous
probe_server.ProbeServer([rendezvous.listen(29500)], "key").start()
signal.pause()
"""
PROBE = """
import time
from distdiag.agent.tcp_probe import Target, TcpProbe
probe = TcpProbe(Target("", "10.77.0.1", 29500), "key", time.monotonic() + 3).run()
print(probe.verdict, probe.error, probe.retransmits)
"""
INPUT = "type filter hook input priority 0;"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_network()
    with Network(3) as network:
        yield network


@pytest.fixture
def third(network: Network) -> Iterator[Node]:
    yield network["node3"]
    network["node3"].heal()


def run(network: Network, command: str, *arguments: str) -> Result:
    where = ("--hosts", network.hosts, "--via", network.via, "--json")
    return distdiag(command, *where, *arguments, env=network.client_env(), wrap=tuple(network.client.command()))


def test_a_node_that_resets_connections_after_8_mb_is_accused_by_the_two_others(network: Network, third: Node) -> None:
    third.in_firewall("input", INPUT, "tcp dport != 29500 quota over 8 mbytes reject with tcp reset")
    result = run(network, "gpu-test", "--nproc", "1", "--size", "16MiB", "--stall", "60", "--master-port", "29500")
    assert result.code == 1
    (found,) = result.findings.values()
    assert found["id"] == "gpu-test.connections-cut"
    # The first node to lose node3 leaves, and the other may lose that node instead: both ends of the path are named.
    assert "node3" in found["where"]["hosts"], found
    assert len(found["where"]["hosts"]) < 3
    assert set(found["where"]["hosts"]) | set(found["witnesses"]["hosts"]) <= {"node1", "node2", "node3"}
    assert "[10.77.0.3]" in " ".join(found["evidence"])


@pytest.mark.parametrize(
    ("command", "route", "words"),
    [("gpu-test", "prohibit", "Permission denied"), ("ports", "blackhole", "Invalid argument")],
)
def test_a_route_that_a_node_itself_refuses_is_its_own(
    network: Network, third: Node, command: str, route: str, words: str
) -> None:
    third.run("ip", "route", "add", route, "10.77.0.1/32")
    try:
        result = run(network, command)
    finally:
        third.run("ip", "route", "del", route, "10.77.0.1/32")
    assert result.code == 1
    # On a busy machine some process may answer too late; that accuses no rank.
    (found,) = [finding for finding in result.findings.values() if finding["level"] != "unknown"]
    assert found["id"].endswith("-no-route")
    assert (found["where"]["hosts"], found["witnesses"]["hosts"]) == (["node3"], ["node1"])
    assert words in " ".join(found["evidence"])
    assert found["fix"]["commands"][0] == "ip route get 10.77.0.1"


@pytest.mark.parametrize(
    ("at", "rule", "verdicts"),
    [
        ("node3", "quota over 30000 bytes drop", {"cut-off"}),
        ("node1", "quota over 30000 bytes reject with tcp reset", {"broken"}),
        ("node1", "numgen random mod 100 < 25 drop", {"lossy", "ok"}),
    ],
)
def test_what_stops_after_some_data_is_told_from_what_loses_packets(
    network: Network, at: str, rule: str, verdicts: set[str]
) -> None:
    for node in network.nodes:  # else 64 KiB are two packets, not 45 as on a real card
        node.run("ip", "link", "set", "eth0", "gso_max_segs", "1")
    server = network["node1"].start(sys.executable, "-c", SERVE)
    network["node1"].wait_for_port(29500)
    network[at].in_firewall("input", INPUT, f"meta l4proto tcp {rule}")
    try:
        reported = network["node3"].run(sys.executable, "-c", PROBE).stdout.split(maxsplit=1)
    finally:
        network[at].heal()
        server.kill()
    assert reported[0] in verdicts, reported
