"""The test clusters themselves: a broken cluster must not be taken for a broken product."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import Names, Network, need_network
from cluster_hosts import ManyHosts
from cluster_slurm import Slurm, need_slurm
from cluster_ssh import SSHD, Hostile, Sshd, act_hostile, give_user_keys, greet, serve_ssh
from loops import each
from support import need, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cluster_netns import Node

PORT, OTHER_PORT = 29500, 29501
PYTHON = (sys.executable, "-I", "-S", "-c")
# A server that sends this much to each client, and a client that prints the result.
SERVER = """
import socket, sys
listener = socket.create_server(("", int(sys.argv[1])), backlog=64)
while True:
    with listener.accept()[0] as peer:
        peer.sendall(b"x" * 4000)
"""
SILENCE = "TimeoutError None"
CALLER = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])) as peer:
        while peer.recv(65536):
            pass
    print("ok")
except OSError as error:
    print(type(error).__name__, error.errno)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    need_network()
    with Network(2) as network:
        yield network


@pytest.fixture
def ssh_network(network: Network) -> Network:
    need("ssh", "ssh-keygen", SSHD)
    return network


def serve(node: Node, *ports: int) -> None:
    for port in ports:
        node.start(*PYTHON, SERVER, str(port))
    for port in ports:
        node.wait_for_port(port)


def call(caller: Node, host: str, port: int = PORT, *, patience: float = 20) -> str:
    return caller.run(*PYTHON, CALLER, host, str(port), str(patience)).stdout.strip()


def patience_for(met: str) -> float:
    """Allow an expected answer its time, and wait only briefly for a forbidden one."""
    return 0.7 if met == SILENCE else 20


def unwanted_datagrams(node: Node) -> int:
    """Count datagrams sent to closed UDP ports."""
    names, values = [
        line.split() for line in Path(f"/proc/{node.pid}/net/snmp").read_text().splitlines() if "Udp:" in line
    ]
    return int(values[names.index("NoPorts")])


def running(pids: Iterable[str]) -> list[str]:
    return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


def ssh(network: Network, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = network.client.command("ssh", "-o", "BatchMode=yes", *words)
    return subprocess.run(command, capture_output=True, check=False, timeout=30)


def test_nodes_are_machines_of_their_own_and_reach_each_other_by_name(network: Network) -> None:
    first, second = network.nodes
    serve(first, PORT)
    for caller in (first, second, network.client):
        assert call(caller, "node1") == "ok"
    assert [node.run("hostname").stdout for node in network.nodes] == ["node1\n", "node2\n"]
    assert (
        second.run("sh", "-c", "ls -A ~ /dev/shm; echo $HOME").stdout == f"/dev/shm:\n\n{second.home}:\n{second.home}\n"
    )
    assert [SERVER in line for line in first.processes().values()] == [True]
    assert second.processes() == {}
    assert "socket" not in second.run("ps", "ax", "-o", "args").stdout, "it has process ids of its own"


FAULTS: dict[str, tuple[Callable[[Node], None], str, str]] = {
    # The damage to node1, the result of a call to it, and the result of a call to its other port.
    "drop": (lambda node: node.drop(PORT), SILENCE, "ok"),
    "rst": (lambda node: node.reject(PORT), "ConnectionRefusedError 111", "ok"),
    "prohibited": (lambda node: node.reject(PORT, how="admin-prohibited"), "OSError 113", "ok"),
    "ephemeral": (lambda node: node.drop_ephemeral(PORT), "ok", SILENCE),
    "mtu": (lambda node: node.mtu_black_hole(1000), SILENCE, SILENCE),
    "mtu-out": (lambda node: node.mtu_black_hole(1000, direction="out"), SILENCE, SILENCE),
    "mtu-in": (lambda node: node.mtu_black_hole(1000, direction="in"), "ok", "ok"),
    "vanish": (lambda node: node.vanish(), SILENCE, SILENCE),
    "unplug": (lambda node: node.unplug(), SILENCE, SILENCE),
}


@pytest.fixture
def served(network: Network) -> Network:
    serve(network.nodes[0], PORT, OTHER_PORT)
    return network


@each("name", FAULTS)
def test_a_fault_is_felt_from_outside_only_and_until_it_is_healed(served: Network, name: str) -> None:
    hurt, met, met_on_other_port = FAULTS[name]
    first, second = served.nodes
    assert call(second, "node1") == "ok"
    hurt(first)
    assert call(second, "node1", patience=patience_for(met)) == met
    patience = patience_for(met_on_other_port)
    assert call(second, "node1", OTHER_PORT, patience=patience) == met_on_other_port
    assert call(first, "node1") == "ok", "a node does not cut itself off"
    first.heal()
    assert call(second, "node1") == "ok"


def test_what_a_node_sends_can_be_dropped_too(network: Network) -> None:
    first, second = network.nodes
    serve(first, PORT)
    second.drop(PORT, direction="out")
    assert call(second, "node1", patience=0.7) == SILENCE
    assert call(network.client, "node1") == "ok"


def test_half_of_the_packets_are_lost(network: Network) -> None:
    first, second = network.nodes
    assert call(second, "node1") == "ConnectionRefusedError 111"  # and the two know each other's ARP now
    first.loss(50, direction="in")
    send = "import socket; [socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('node1', 9)) for _ in range(400)]"
    second.run(sys.executable, "-W", "ignore", "-c", send)
    wait_until(lambda: unwanted_datagrams(first) > 140, 5, lambda: str(unwanted_datagrams(first)))
    assert unwanted_datagrams(first) < 260  # six standard deviations from 200


NAMES = {
    # The addresses that a node finds for itself and for another one.
    Names.GOOD: ("10.77.0.1", "10.77.0.5"),
    Names.DEBIAN: ("127.0.1.1", "10.77.0.5"),
    Names.LOOPBACK: ("127.0.0.1", "10.77.0.5"),
    Names.UNKNOWN: ("", ""),
}


def test_names() -> None:
    need_network()
    chosen = {f"node{number}": names for number, names in enumerate(NAMES, 1)}
    with Network(5, names=chosen) as network:
        for name, names in chosen.items():
            asked = [network[name].run("getent", "ahostsv4", host, check=False).stdout for host in (name, "node5")]
            assert tuple(lines.split(" ")[0] for lines in asked) == NAMES[names], name
            known = network["node5"].run("getent", "hosts", name).stdout
            assert known.startswith(f"{network[name].address} "), name


def test_via_enters_a_node_as_a_session_of_its_own_and_knows_no_strangers(network: Network) -> None:
    words = network.via.format(host="node2").split()
    entered = subprocess.run([*words, "sh", "-c", "hostname; ps -o pid=,sid= $$"], capture_output=True, check=True)
    host, pid, session = entered.stdout.split()
    assert host == b"node2"
    assert pid == session
    stranger = subprocess.run([*network.via.format(host="node9").split(), "true"], capture_output=True, check=False)
    assert (stranger.returncode, stranger.stderr) == (255, b"enter: no such node: node9\n")


def test_signals_reach_a_program_on_the_client_and_on_a_node(network: Network) -> None:
    on_client = network.client.start("sleep", "100")
    wait_until(lambda: "sleep 100" in network.client.processes().values(), 5, lambda: "not started")
    os.kill(on_client.pid, signal.SIGINT)
    assert on_client.wait(5) == -signal.SIGINT
    on_node = network["node1"].start("sh", "-c", "echo $$ >~/pid; exec sleep 100")
    wait_until(lambda: "sleep 100" in network["node1"].processes().values(), 5, lambda: "not started")
    network["node1"].signal(int((network["node1"].home / "pid").read_text()), signal.SIGTERM)
    assert on_node.wait(5) == -signal.SIGTERM


def test_nothing_of_a_network_is_left() -> None:
    need_network()
    with Network(2) as network:
        serve(network["node1"], PORT)
        network.client.start("sh", "-c", "setsid sleep 100 & setsid sleep 100 & wait")
        wait_until(lambda: len(network.client.processes()) == 3, 5, lambda: str(network.client.processes()))
        pids = [*network["node1"].processes(), *network.client.processes()]
        pids += [node.pid for node in (*network.nodes, network.client)]
    assert len(pids) == 7
    assert running(map(str, pids)) == []
    assert not network.folder.exists()


def test_nothing_runs_on_after_a_killed_test(tmp_path: Path) -> None:
    need_network()
    program = """
import os, time
from cluster import Network
with Network(1) as network:
    for node in (network.nodes[0], network.client):
        node.start("sh", "-c", "setsid sleep 100 & wait")
        while len(node.processes()) < 2:
            time.sleep(0.01)
        print(node.pid, *node.processes(), flush=True)
    os.kill(os.getpid(), 9)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    pids = killed.stdout.split()
    assert len(pids) == 6, killed.stderr
    wait_until(lambda: not running(pids), 10, lambda: f"left: {running(pids)}")


def test_ssh_logs_in_with_strict_host_keys_and_default_configuration(ssh_network: Network) -> None:
    serve_ssh(ssh_network)
    assert ssh(ssh_network, "node1", "hostname; pwd").stdout == f"node1\n{ssh_network['node1'].home}\n".encode()
    assert ssh(ssh_network, "10.77.0.2", "hostname").stdout == b"node2\n"
    assert ssh_network["node1"].processes() == {}, "the sshd is part of the machine"
    give_user_keys(ssh_network.client, {"node1": "somebody else"})
    assert b"Host key for node1 has changed" in ssh(ssh_network, "node1", "hostname").stderr
    assert b"Host key verification failed" in ssh(ssh_network, "node2", "hostname").stderr


def test_a_hostile_node_is_hostile() -> None:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    ends = {Hostile.GARBAGE: (0, 200_000), Hostile.FLOOD: (0, 50_000_000), Hostile.NOT_FOUND: (127, 0)}
    with Network(len(ends)) as network:
        for node, how in zip(network.nodes, ends, strict=True):
            serve_ssh(network, [node], options=[act_hostile(how)])
            done = ssh(network, node.name, "echo hello")
            assert (done.returncode, len(done.stdout)) == ends[how], how


def test_a_node_logs_in_with_a_shell_that_greets() -> None:
    need_network()
    shells = ("bash", "fish", "zsh", "tcsh")
    need("ssh", "ssh-keygen", SSHD, *shells)
    with Network(len(shells)) as network:
        for node, shell in zip(network.nodes, shells, strict=True):
            node.log_in_with(node.run("sh", "-c", f"command -v {shell}").stdout.strip())
            greet(node, "Welcome")
        serve_ssh(network)
        for node, shell in zip(network.nodes, shells, strict=True):
            assert ssh(network, node.name, "echo hello").stdout == b"Welcome\nhello\n", shell


def test_open_mpi_spans_two_nodes_over_this_ssh(ssh_network: Network) -> None:
    need("mpirun.openmpi")
    serve_ssh(ssh_network)
    mpirun = (
        "mpirun.openmpi",
        "--allow-run-as-root",
        "--host",
        "node1:1,node2:1",
        "--mca",
        "oob_tcp_if_include",
        "eth0",
    )
    assert sorted(ssh_network.client.run(*mpirun, "hostname").stdout.split()) == ["node1", "node2"]


def test_many_hosts_answer_each_by_its_name_and_fail_each_in_its_way() -> None:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    with ManyHosts(300) as many:
        assert [ssh(many.network, name, "hostname").stdout for name in ("h0001", "h0300")] == [b"h0001\n", b"h0300\n"]
        Sshd(many.farm, port=2022, options=[act_hostile(Hostile.NOT_FOUND)]).wait()
        many.divert(["h0002"], 2022)
        many.refuse(["h0003"])
        many.black_hole(["h0004"])
        many.know(unknown=["h0005"], changed=["h0006"])
        # It bounds the greeting and the exchange of keys too, which may take long on a machine that is busy.
        patience = {name: 1 if name == "h0004" else 20 for name in many.names[1:7]}
        said = {
            name: ssh(many.network, f"-oConnectTimeout={seconds}", name, "hostname").stderr
            for name, seconds in patience.items()
        }
        assert b"command not found" in said["h0002"]
        assert b"Connection refused" in said["h0003"]
        assert b"timed out" in said["h0004"]
        assert b"Host key verification failed" in said["h0005"]
        assert b"has changed" in said["h0006"]
        assert said["h0007"] == b""


def test_hosts_behind_a_bastion_are_reached_through_it_only() -> None:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    with ManyHosts(200, bastion=True) as many:
        assert ssh(many.network, "h0200", "hostname").stdout == b"h0200\n"
        past_it = ssh(many.network, "-oProxyJump=none", many.address("h0200"), "hostname")
        assert b"Network is unreachable" in past_it.stderr


def test_slurm_runs_on_all_nodes_and_names_a_killed_daemon() -> None:
    need_slurm()
    with Slurm(4) as slurm:
        hosts = slurm.run("srun", "--nodes=4", "hostname").stdout.split()
        assert sorted(hosts) == ["mn1", "mn2", "mn3", "mn4"]
        job = slurm.allocate(4)
        slurm.start_step(job, "sleep", "1000", options=("--ntasks=8",))
        assert slurm.steps(job) == {f"{job}.0"}
        attach = ("srun", "--overlap", f"--jobid={job}", "--nodes=4", "--ntasks=4", "--input=none", "hostname")
        assert sorted(slurm.run(*attach).stdout.split()) == sorted(hosts)
        slurm.kill_slurmd("mn3")
        failed = slurm.run(*attach, check=False)
        assert failed.returncode != 0
        assert "failed on node mn3: Communication connection failure" in failed.stderr
        slurm.start_slurmd("mn3")
        wait_until(lambda: slurm.network["mn3"].listens_on(6818), 10, lambda: "slurmd does not start")
        assert sorted(slurm.run(*attach).stdout.split()) == sorted(hosts)
        slurm.cancel(job)
        slurm.wait_for_idle(4)
