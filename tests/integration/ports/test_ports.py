"""ports in networks that are broken on purpose: the state, the direction and the advice must be right."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import support_torch
from cluster import Names, Network, need_network
from support import wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support import Result

SOON = ("--connect-timeout", "1")  # no packet is lost by chance: who does not answer in a second never does
WEB = ("-c", "import http.server as h; h.HTTPServer(('', 29500), h.BaseHTTPRequestHandler).serve_forever()")


@pytest.fixture(scope="module")
def wide() -> Iterator[Network]:
    """Four nodes and a client; every test repairs its own damage."""
    need_network()
    with Network(4) as network:
        yield network


@pytest.fixture
def network(wide: Network) -> Iterator[Network]:
    yield wide
    for node in wide.nodes:
        node.heal()


def ports(network: Network, *arguments: str, env: dict[str, str] | None = None) -> Result:
    return distdiag(
        "ports", "--json", *arguments, wrap=tuple(network.client.command()), env={**network.client_env(), **(env or {})}
    )


def pairs(network: Network, *arguments: str, env: dict[str, str] | None = None) -> Result:
    return ports(network, "--hosts", network.hosts, "--via", network.via, *arguments, env=env)


def faults(result: Result) -> dict[str, dict[str, Any]]:
    """Give the findings that are faults, by id."""
    return {one["id"].removeprefix("ports."): one for one in result.report["findings"] if one["level"] == "fail"}


def states(result: Result) -> dict[int, str]:
    return {row["port"]: row["state"] for row in result.report["data"]["probes"]}


def test_nodes_that_reach_each_other_are_told_what_to_set(network: Network) -> None:
    result = pairs(network)
    assert (result.code, result.report["findings"]) == (0, []), result.out
    data = result.report["data"]
    assert {(row["source"], row["target"]) for row in data["pairs"]} == {
        (one.name, other.name) for one in network.nodes for other in network.nodes if one is not other
    }
    assert {row["probe"]["verdict"] for row in data["pairs"]} == {"ok"}
    assert all(
        row["probe"]["bulk_bytes"] / row["probe"]["bulk_s"]
        for row in data["pairs"]
        if row["purpose"] == "ranks" and row["probe"]["bulk_bytes"] and row["probe"]["bulk_s"]
    )
    assert data["exports"][""] == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": network.nodes[0].address,
    }


def test_one_node_that_drops_what_comes_in_is_named_with_the_direction(network: Network) -> None:
    network["node3"].at_switch("tcp flags & (syn | ack) == syn drop", "in")
    ((id_, finding),) = faults(pairs(network)).items()
    assert id_ == "path-filtered"
    assert finding["title"].startswith("node3 drops inbound packets on every tested port")
    assert "Its outbound connections work." in finding["detail"]


def test_one_node_that_drops_what_goes_out(network: Network) -> None:
    network["node2"].at_switch("tcp flags & (syn | ack) == syn drop", "out")
    (finding,) = faults(pairs(network)).values()
    assert finding["title"].startswith("node2 drops outbound packets")


def test_a_port_that_one_node_drops_one_refuses_and_one_rejects(network: Network) -> None:
    network["node2"].reject(29500, how="rst")
    network["node3"].reject(29500, how="admin-prohibited")
    network["node4"].drop(29500)
    found = faults(pairs(network))
    assert set(found) == {"port-refused", "port-rejected", "port-filtered"}
    assert found["port-refused"]["title"].startswith("node2 ")
    assert found["port-rejected"]["title"].startswith("node3 ")
    assert found["port-filtered"]["title"].startswith("node4 drops inbound packets on port 29500")
    assert "Ephemeral ports are open" in found["port-filtered"]["detail"]


def test_large_packets_vanish_on_one_side(network: Network) -> None:
    network["node3"].mtu_black_hole(1000)
    finding = faults(pairs(network))["mtu-black-hole"]
    assert "node3" in finding["title"]
    assert "node1" not in finding["title"]
    assert any(command.startswith("ping ") for command in finding["fix"]["commands"])


def test_a_node_that_drops_what_comes_in_and_one_of_which_only_the_rendezvous_port_is_open(network: Network) -> None:
    network["node3"].at_switch("tcp flags & (syn | ack) == syn drop", "in")
    network["node2"].drop_ephemeral(29500)
    found = faults(pairs(network))
    assert set(found) == {"path-filtered", "rank-ports-filtered"}
    assert found["path-filtered"]["title"].startswith("node3 drops inbound packets on every tested port")
    assert found["rank-ports-filtered"]["title"].startswith("node2 drops inbound packets on ephemeral ports")
    assert "allow TCP 32768-60999 into node2" in found["rank-ports-filtered"]["fix"]["text"]


def test_a_second_interface_that_leads_nowhere(network: Network) -> None:
    """NCCL takes every interface that it finds; one of them on a dead network is a hang."""
    for number, node in enumerate(network.nodes, 1):
        node.run("ip", "link", "add", "eth1", "type", "veth", "peer", "name", "nowhere")
        node.run("ip", "link", "set", "nowhere", "up")
        node.run("ip", "addr", "add", f"192.168.5.{number}/24", "dev", "eth1")
        node.run("ip", "link", "set", "eth1", "up")
    try:
        found = faults(pairs(network))
        wrong = faults(pairs(network, "--env", "NCCL_SOCKET_IFNAME=eth1"))
    finally:
        for node in network.nodes:
            node.run("ip", "link", "del", "eth1")
    finding = found["nccl-dead-interface"]
    assert "NCCL would also use eth1 on node[1-4]" in finding["title"]
    assert finding["fix"]["commands"] == ["export NCCL_SOCKET_IFNAME='=eth0'"]
    (all_closed,) = (one for id_, one in wrong.items() if id_.startswith("path-"))
    assert all_closed["title"].startswith("no node reaches another")
    assert "eth0" in all_closed["fix"]["commands"][0]


def test_packets_that_are_lost_are_put_down_to_a_node(network: Network) -> None:
    network["node3"].loss(20)
    found = pairs(network).findings
    assert "node3" in found["link-lossy"]["title"], found
    assert all("node3" in line for line in found["link-lossy"]["evidence"])


def test_a_master_address_that_is_nobody(network: Network) -> None:
    result = pairs(network, env={"MASTER_ADDR": "10.99.0.1"})
    assert "none of these nodes" in faults(result)["master-addr"]["title"]
    alone = distdiag("ports", "--json", env={"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "99999"})
    assert set(faults(alone)) == {"master-addr", "master-port"}


def test_a_port_that_is_taken_is_not_tried_there_and_an_mtu_that_differs_is_named(network: Network) -> None:
    node = network["node2"]
    node.start(sys.executable, *WEB)
    node.wait_for_port(29500)
    network["node4"].run("ip", "link", "set", "eth0", "mtu", "1400")
    try:
        result = pairs(network)
    finally:
        network["node4"].run("ip", "link", "set", "eth0", "mtu", "1500")
    found = {one["id"]: one for one in result.report["findings"]}
    taken, differ = found["ports.port-taken"], found["ports.nodes-differ"]
    assert taken["level"] == "warn"
    assert "node2" in taken["title"]
    assert "pid" in taken["evidence"][0]
    assert differ["where"]["hosts"] == ["node4"]
    assert differ["evidence"] == ["MTU: 1400 on node4; 1500 on node[1-3]"]
    assert result.code == 0


def test_a_master_address_that_leads_home(wide: Network) -> None:
    need_network()
    with Network(2, names={"node1": Names.DEBIAN, "node2": Names.GOOD}) as network:
        result = pairs(network, env={"MASTER_ADDR": "node1"})
        levels = {one["id"]: one["level"] for one in result.report["findings"]}
        assert levels["ports.name-loopback"] == "warn"
        assert levels["ports.gloo-ifname"] == "fail"
        (gloo,) = [one for one in result.report["findings"] if one["id"] == "ports.gloo-ifname"]
        assert gloo["where"]["hosts"] == ["node1"]
        assert gloo["fix"]["commands"] == ["export NCCL_SOCKET_IFNAME='=eth0' GLOO_SOCKET_IFNAME=eth0"]


# Ports of one host.

CASES = ("open", "closed", "dropped", "reset", "prohibited")


def prepare(network: Network, case: str) -> None:
    node = network["node1"]
    if case in ("open", "dropped", "reset", "prohibited") and not node.listens_on(6000):
        node.start(sys.executable, "-m", "http.server", "6000")
        node.wait_for_port(6000)
        # Its first answer is the slowest, and a port is not listened to for long.
        node.run(sys.executable, "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:6000').read()")
    if case == "dropped":
        node.drop(6000)
    if case in ("reset", "prohibited"):
        node.reject(6000, how="rst" if case == "reset" else "admin-prohibited")


@pytest.mark.parametrize(
    ("case", "state"),
    [
        ("closed", "closed"),
        ("open", "open"),
        ("dropped", "filtered"),
        ("reset", "closed"),
        ("prohibited", "rejected"),
    ],
)
def test_the_state_of_a_port(network: Network, case: str, state: str) -> None:
    address = network["node1"].address
    prepare(network, case)
    result = ports(network, f"{address}:6000", *SOON)
    assert states(result) == {6000: state}


def test_who_answers_is_told_by_what_it_says(network: Network) -> None:
    prepare(network, "open")
    result = ports(network, f"{network['node1'].address}:6000")
    (row,) = result.report["data"]["probes"]
    assert (row["by"], row["interface"]) == ("http", "eth0")
    assert row["said"].startswith("HTTP/1.0 200")
    assert "a web server or proxy answers" in result.report["findings"][0]["title"]


def test_closed_is_not_told_to_open_the_firewall(network: Network) -> None:
    result = ports(network, f"{network['node2'].address}:7777")
    (finding,) = result.report["findings"]
    assert (result.code, finding["level"]) == (1, "fail")
    assert "nothing listens" in finding["title"]
    assert "no firewall needs a change" in finding["detail"]
    assert (finding["evidence"], finding["fix"]["commands"]) == ([], [])
    assert "or correct MASTER_ADDR and MASTER_PORT" in finding["fix"]["text"]


def test_another_open_port_tells_a_firewall_from_a_dead_host(network: Network) -> None:
    prepare(network, "open")
    network["node1"].drop(7000)
    address = network["node1"].address
    result = ports(network, address, "--port", "6000,7000", *SOON)
    assert states(result) == {6000: "open", 7000: "filtered"}
    assert "it is up" in faults(result)["port-filtered"]["detail"]


def test_no_route_no_host_and_no_name(network: Network) -> None:
    result = ports(network, "198.51.100.7:80", "10.77.9.9:80", "nosuchhost.invalid:80")
    found = {row["host"]: row["state"] for row in result.report["data"]["probes"]}
    assert found == {"198.51.100.7": "no-route", "10.77.9.9": "rejected", "nosuchhost.invalid": "name"}
    assert result.code == 1


def test_ipv6_only(network: Network) -> None:
    for number, name in enumerate(("client", "node1"), 1):
        network[name].run("ip", "-6", "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
    node = network["node1"]
    server = "import socket as s; l=s.create_server(('fd77::2', 6066), family=s.AF_INET6)\nwhile 1: l.accept()"
    node.start(sys.executable, "-c", server)
    node.wait_for_port(6066)
    result = ports(network, "[fd77::2]:6066", f"{node.address}:6066")
    found = {row["host"]: (row["state"], row["by"]) for row in result.report["data"]["probes"]}
    assert found == {"fd77::2": ("open", "silent"), node.address: ("closed", "")}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("node1:0",), "invalid port"),
        (("node1:70000",), "invalid port"),
        (("node1", "--port", "9-2"), "invalid port"),
        (("no host",), "invalid host"),
        (tuple(f"10.0.{n // 250}.{n % 250}" for n in range(300)), "too many"),
        (("a", "b", "--port", "1-65535"), "too many"),
        (("--hosts", ""), "no host given"),
        (("--hosts", "a,b", "--data", "17MiB"), "limit: 16MiB"),
        (("--hosts", "a,b", "--port", "1-5000"), "too many ports to test between nodes"),
    ],
)
def test_wrong_input(arguments: tuple[str, ...], words: str) -> None:
    result = distdiag("ports", *arguments)
    assert (result.code, words in result.err) == (2, True), result.err


@pytest.mark.timed
def test_sixteen_nodes_and_one_block_in_seconds() -> None:
    need_network()
    with Network(16) as network:
        source = network["node7"].address
        network["node12"].at_switch(f"ip saddr {source} tcp flags & (syn | ack) == syn drop", "in")
        result = pairs(network)
        (finding,) = faults(result).values()
        address = network["node12"].address
        assert finding["title"].startswith(f"node7 gets no answer from node12 ({address}) on every tested port")
        assert "the reverse direction works" in finding["title"]
        assert finding["where"]["hosts"] == ["node7", "node12"]
        assert len(result.report["data"]["pairs"]) == 240 * 3
        assert result.ended_at - result.stderr_lines[0][0] < 15  # 3 to 5 on two quiet cores


def test_torchs_store_survives_being_tried(tmp_path: Path) -> None:
    """What we ask an open port is nonsense to torch's store, old and new; it must go on as if nothing was."""
    script, said, tried = (tmp_path / name for name in ("store.py", "said", "tried"))
    script.write_text(
        "import sys, datetime\n"
        "import torch.distributed as d\n"
        "soon = datetime.timedelta(seconds=20)\n"
        "def serve(libuv):\n"
        "    return d.TCPStore('127.0.0.1', 0, 2, True, timeout=soon, wait_for_workers=False, use_libuv=libuv)\n"
        "stores = [(libuv, serve(libuv)) for libuv in (True, False)]\n"
        "print(*(s.port for _, s in stores), flush=True); open(sys.argv[1]).read()\n"
        "for libuv, s in stores:\n"
        "    c = d.TCPStore('127.0.0.1', s.port, 2, False, timeout=soon, use_libuv=libuv)\n"
        "    c.set('a', 'b'); print(s.get('a').decode(), c.add('n', 3), flush=True)\n"
    )
    os.mkfifo(tried)
    with said.open("wb") as output:
        argv, env = [sys.executable, str(script), str(tried)], {**os.environ, "OMP_NUM_THREADS": "1"}
        store = support_torch.start(argv, env, output=output, errors=subprocess.DEVNULL)
    assert store is not None
    wait_until(lambda: "\n" in said.read_text(), 60, lambda: "no store")
    ports = said.read_text().split()
    for _ in range(3):
        result = distdiag("ports", "--json", *(f"127.0.0.1:{port}" for port in ports))
        assert states(result) == {int(port): "open" for port in ports}
    tried.write_text("")
    assert (store.wait(60), said.read_text().splitlines()[1:]) == (0, ["b 3"] * 2)
