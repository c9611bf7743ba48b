"""However distdiag ends, its processes are gone from all nodes seconds later, and partial results are printed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import Network, need_network
from cluster_reach import start_reaching
from cluster_ssh import SSHD, Hostile, Sshd, act_hostile, give_user_keys, key_pair, serve_ssh
from support import Running, need, wait_until
from support_warm import enough_of_torch

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from support import Result

NODES = 2
BOTH = "node[1-2]"
GONE_S = 15.0
"""With other tests beside it; alone it takes up to 3 s."""
END = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    with Network(NODES) as network:
        serve_ssh(network)
        yield network


@pytest.fixture
def net(network: Network) -> Iterator[Network]:
    """All nodes, once nothing of an earlier test is at work."""
    await_nothing(network, time.monotonic())
    yield network
    for node in network.nodes:
        node.heal()


def at_work(net: Network) -> list[str]:
    """List what runs on the nodes, without the servers' halves of connections that they take for alive."""
    return [f"{node.name}: {line}" for node in net.nodes for line in node.processes().values() if "sshd: " not in line]


def await_agents(net: Network, run: subprocess.Popen[str]) -> None:
    assert run.stdout is not None
    assert run.stdout.readline() == "up\n"
    assert len(at_work(net)) >= NODES


def await_nothing(net: Network, began: float, limit_s: float = GONE_S) -> None:
    wait_until(lambda: not at_work(net), began + limit_s - time.monotonic(), lambda: str(at_work(net)))


def end(run: subprocess.Popen[str]) -> None:
    run.kill()
    run.wait(10)
    assert run.stdout is not None
    run.stdout.close()


@pytest.mark.parametrize("way", ["ssh", "via"])
@pytest.mark.parametrize("number", END)
def test_agents_end_with_distdiag(net: Network, number: signal.Signals, way: str) -> None:
    run = start_reaching(net.client, net.hosts, via=net.via if way == "via" else "")
    try:
        await_agents(net, run)
        began = time.monotonic()
        run.send_signal(number)
        run.wait(GONE_S)
        await_nothing(net, began)
    finally:
        end(run)


def test_agents_end_when_nothing_is_heard_any_more(net: Network) -> None:
    run = start_reaching(net.client, net.hosts)
    try:
        await_agents(net, run)
        began = time.monotonic()
        run.send_signal(signal.SIGSTOP)
        await_nothing(net, began)
    finally:
        end(run)


def test_a_node_that_is_cut_off_ends_its_agent_and_the_other_stays(net: Network) -> None:
    run = start_reaching(net.client, net.hosts)
    try:
        await_agents(net, run)
        began = time.monotonic()
        net["node1"].vanish()
        wait_until(
            lambda: not any(line.startswith("node1:") for line in at_work(net)),
            began + GONE_S - time.monotonic(),
            lambda: str(at_work(net)),
        )
        assert {line.partition(":")[0] for line in at_work(net)} == {"node2"}
    finally:
        end(run)


@pytest.mark.parametrize(
    ("number", "way", "hosts"),
    [(signal.SIGINT, "via", BOTH), (signal.SIGTERM, "ssh", "node1"), (signal.SIGKILL, "ssh", "node2")],
)
def test_ranks_end_with_distdiag_and_ctrl_c_prints_what_is_known(
    net: Network, number: signal.Signals, way: str, hosts: str, tmp_path: Path
) -> None:
    (torch,) = (f"{name}={value}" for name, value in enough_of_torch(tmp_path).items())
    nproc = "1" if hosts == BOTH else "2"
    run = Running(
        "gpu-test", "--json", "--nproc", nproc, "--hosts", hosts, "--inject", "late:1@connect", "--env", torch,
        *(["--via", net.via] if way == "via" else []),
        env=net.client_env(), wrap=tuple(net.client.command()),
    )  # fmt: skip
    try:
        run.wait_for("connect: all ranks")
        assert sum("distdiag-rank" in line for line in at_work(net)) == 2
        began = time.monotonic()
        run.process.send_signal(number)
        run.process.wait(GONE_S)
        await_nothing(net, began)
    finally:
        result = run.finish()
    if number != signal.SIGKILL:
        assert result.code == 130
        assert len(result.statuses) == 2
        assert [row["state"] for row in result.report["data"]["hosts"]] == ["ok"] * (2 if hosts == BOTH else 1)


def test_ctrl_c_while_hosts_are_reached_prints_the_rows_so_far_at_once() -> None:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    names = ["good", "refused", "hole", "hanging"]
    with Network(names) as net:
        servers = [Sshd(net["good"]), Sshd(net["hanging"], options=[act_hostile(Hostile.HANGING)])]
        give_user_keys(net.client, {name: name for name in names})
        for server in servers:
            server.wait()
        net["hole"].vanish()
        states = {row["host"]: row["state"] for row in interrupted(net, "--json").report["data"]["hosts"]}
        assert states.pop("good") in ("ok", "cancelled"), "its facts may just be under way"
        assert states == {"refused": "refused", "hole": "cancelled", "hanging": "cancelled"}
        wait_until(lambda: not net["good"].processes(), GONE_S, lambda: str(net["good"].processes()))
        lines = [line.split()[:4] for line in interrupted(net).out.splitlines()]
        assert ["refused", "1", "refused", "connect"] in lines
        assert ["hole", "1", "cancelled", "connect"] in lines
        wait_until(lambda: not net["good"].processes(), GONE_S, lambda: str(net["good"].processes()))


def logins(net: Network) -> int:
    return str(net["hanging"].processes()).count("sleep 1000")


def interrupted(net: Network, *more: str) -> Result:
    """Interrupt gpu-test once it has reached all hosts that answer."""
    hanging = logins(net)
    run = Running(
        "gpu-test", "--hosts", net.hosts, "--host-timeout", "60", *more,
        env=net.client_env(), wrap=tuple(net.client.command()),
    )  # fmt: skip
    wait_until(lambda: "distdiag-agent" in str(at_work(net)) and logins(net) > hanging, 20, lambda: str(at_work(net)))
    began = time.monotonic()
    os.kill(run.process.pid, signal.SIGINT)
    result = run.finish()
    assert result.ended_at - began < 10
    assert result.code == 130
    return result


def user_whose_login_hangs(net: Network, home: Path) -> None:
    """Let a user other than root log in on node1, with a ~/.bashrc that waits."""
    home.chmod(0o755)
    (home / "keys").write_text(key_pair("user").public)
    (home / ".bashrc").write_text("sleep 1000\n")
    passwd = net["node1"].folder / "passwd"
    lines = [line for line in passwd.read_text().splitlines() if not line.startswith("nobody:")]
    passwd.write_text("\n".join([*lines, f"nobody:x:65534:65534::{home}:/bin/bash", ""]))
    with (net["node1"].folder / "shadow").open("a") as shadow:
        shadow.write("nobody:*:19000:0:99999:7:::\n")
    serve_ssh(net, options=[f"AuthorizedKeysFile {home}/keys"])


def test_a_login_that_never_came_to_us_ends_with_our_patience() -> None:
    need_network()
    need("ssh", "ssh-keygen", SSHD, "bash")
    with Network(1) as net, tempfile.TemporaryDirectory() as home:
        user_whose_login_hangs(net, Path(home))
        run = start_reaching(net.client, "nobody@node1", host_timeout_s=3.0)
        try:
            wait_until(lambda: "sleep 1000" in str(at_work(net)), 20, lambda: "no login")
            assert run.stdout is not None
            assert run.stdout.readline() == "up\n", "given up"
            await_nothing(net, time.monotonic(), GONE_S)
        finally:
            end(run)


@pytest.mark.parametrize("way", ["ssh", "via"])
def test_a_setup_that_waits_ends_with_our_patience(net: Network, way: str) -> None:
    via = net.via if way == "via" else ""
    run = start_reaching(net.client, BOTH, via=via, setup="sleep 1000", host_timeout_s=2.0)
    try:
        wait_until(lambda: str(at_work(net)).count("sleep 1000") == 2, 20, lambda: str(at_work(net)))
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n", "given up"
        await_nothing(net, time.monotonic(), GONE_S)
    finally:
        end(run)
