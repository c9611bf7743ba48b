"""Routes to hosts: bastions, many at once, two names of one machine, variables and commands set before the start."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import Names, Network, need_network
from cluster_hosts import ManyHosts
from cluster_reach import reach
from cluster_ssh import SSHD, Hostile, Sshd, act_hostile, give_user_keys, serve_ssh
from support import need, wait_until
from support_warm import WarmRunning, distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY = 20
"""More logins than sshd's default lets in at once (MaxStartups 10:30:100)."""
PATIENCE_S = 80
"""Of each host behind the bastion, which this machine serves all at once: 40 logins, and tests of others."""
MIXED = 40
FEW_FILES = ("sh", "-c", 'ulimit -n 64; exec "$@"', "-")
FEW = 16
"""More than that limit allows at once: 4."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    with Network(4) as network:
        serve_ssh(network)
        yield network


@pytest.fixture
def net(network: Network) -> Iterator[Network]:
    """All nodes are known to the user, without a configuration."""
    network.client.write_hosts(network.hosts_file(network.client, Names.GOOD))
    use_config(network, "")
    yield network
    for node in network.nodes:
        node.heal()


def use_config(net: Network, config: str) -> None:
    give_user_keys(net.client, {node.name: node.name for node in net.nodes}, config=config)


def test_all_hosts_behind_one_bastion_with_default_limits_are_reached() -> None:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    with ManyHosts(MANY, bastion=True, own_names=False) as many:
        # The shell there reports a missing Python: all but the cost of as many Pythons on this machine.
        reached = reach(many.client, f"h[0001-{MANY:04}]", python="/nowhere", host_timeout_s=PATIENCE_S)
        assert reached.count() == {"no-python": MANY}, reached.report
        assert reach(many.client, "h[0001-0002]", host_timeout_s=PATIENCE_S).count() == {"ok": 2}


def test_a_bastion_in_trouble_is_one_finding_for_all_behind_it(net: Network) -> None:
    give_user_keys(net.client, {}, config="Host node2 node3\n  ProxyJump node1:2222\n")
    finding = reach(net.client, "node[2-3]").finding("node3")
    assert finding["id"] == "hosts.refused"
    assert finding["where"]["hosts"] == ["node2", "node3"]
    assert "connect to host node1 port 2222: Connection refused" in finding["title"]


def test_hosts_that_the_bastion_cannot_reach_do_not_hold_up_the_others(net: Network) -> None:
    use_config(net, "Host node2 node3 node4\n  ProxyJump node1\n")
    net["node2"].reject(22)
    net["node3"].drop(22)
    reached = reach(net.client, "node[1-4]", python="/nowhere", host_timeout_s=10)
    silent = reached.states["node3"]
    assert reached.states == {"node1": "no-python", "node2": "refused", "node3": silent, "node4": "no-python"}
    assert silent in ("filtered", "timeout")
    assert "connect failed: Connection refused" in reached.rows["node2"]["message"]
    assert reached.rows["node3"]["seconds"] < 40, "the kernel of the bastion tries for 2 minutes"


def test_a_chain_of_bastions_leads_to_a_host(net: Network) -> None:
    use_config(net, "Host node3\n  ProxyJump node1,node2\n")
    net["node3"].at_switch(f"ip saddr != {net['node2'].address} tcp dport 22 drop", "in")
    assert reach(net.client, "node3", host_timeout_s=5).states == {"node3": "ok"}


def test_a_bastion_that_has_a_bastion_itself_is_left_to_openssh(net: Network) -> None:
    use_config(net, "Host node2\n  ProxyJump node1\nHost node3\n  ProxyJump node2\n")
    net["node2"].at_switch(f"ip saddr != {net['node1'].address} tcp dport 22 drop", "in")
    net["node3"].at_switch(f"ip saddr != {net['node2'].address} tcp dport 22 drop", "in")
    assert reach(net.client, "node3", host_timeout_s=5).states == {"node3": "ok"}


@pytest.mark.timed
def test_many_hosts_with_few_files_are_all_reached() -> None:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    with ManyHosts(FEW, own_names=False) as many:
        reached = reach(many.client, f"h[0001-{FEW:04}]", within=FEW_FILES, python="/nowhere")
        assert reached.count() == {"no-python": FEW}


@pytest.mark.timed
def test_among_many_each_has_its_own_trouble_and_nobody_a_false_one() -> None:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    with ManyHosts(MIXED, own_names=False) as many:
        names = many.names
        hostile = {
            "failed": "ForceCommand exit 3",
            "killed": act_hostile(Hostile.KILLED),
            "timeout": "ForceCommand sleep 99",
        }
        hostile["auth"] = "AuthorizedKeysFile none"
        for number, option in enumerate(hostile.values()):
            Sshd(many.farm, port=2200 + number, options=[option]).wait()
            many.divert([names[number]], 2200 + number)
        many.refuse(names[4:6])
        many.black_hole(names[6:26])
        many.know(unknown=names[26:27], changed=names[27:29])
        reached = reach(many.client, f"h[0001-{MIXED:04}]", python="/nowhere", host_timeout_s=6)
        assert reached.count() == {
            **dict.fromkeys(hostile, 1),
            "refused": 2,
            "filtered": 20,
            "host-key-unknown": 1,
            "host-key-changed": 2,
            "no-python": MIXED - 29,
        }
        assert list(reached.states)[:4] == names[:4]
        assert [reached.states[name] for name in names[:4]] == list(hostile)
        assert len(reached.report["findings"]) == len(reached.count())


def test_two_names_of_one_machine_are_told_and_a_host_named_twice_is_used_once(net: Network) -> None:
    addresses = "".join(f"{node.address} {node.name}\n" for node in net.nodes)
    net.client.write_hosts(addresses + f"{net['node1'].address} alias\n")
    give_user_keys(net.client, {"node1,alias": "node1", "node2": "node2"})
    # sshd has port 22, so no rank is started.
    asked = ("gpu-test", "--json", "--nproc", "1", "--hosts", "node1,alias,node1", "--master-port", "22")
    result = distdiag(*asked, env=net.client_env(), wrap=tuple(net.client.command()))
    found = {one["id"]: one for one in result.report["findings"]}
    assert "gpu-test.port-foreign" in found, result.err
    assert found["hosts.same-machine"]["where"]["hosts"] == ["alias", "node1"]
    assert found["hosts.duplicate"]["where"]["hosts"] == ["node1"]
    assert [row["host"] for row in result.report["data"]["hosts"]] == ["node1", "alias"]


@pytest.mark.parametrize("way", ["ssh", "via"])
def test_variables_arrive_intact_and_setup_is_run_first(net: Network, way: str) -> None:
    node = net["node1"]
    odd = "a,b c\"d'$x\n%h {host} \\n"
    (node.home / "env.sh").write_text("export FROM_SETUP='by env.sh'; echo ready for work\n")
    run = WarmRunning(
        "gpu-test", "--json", "--nproc", "1", "--hosts", "node1",
        *(["--via", net.via] if way == "via" else []),
        "--env", f"ODD={odd}", "--env", "EMPTY=", "--env", "TAKEN", "--setup", "source ~/env.sh",
        env={**net.client_env(), "TAKEN": "from here"}, wrap=tuple(net.client.command()),
    )  # fmt: skip

    def ranks() -> list[int]:
        return [pid for pid, line in node.processes().items() if "distdiag-rank" in line]

    # The first is the process that imports torch and then becomes the ranks.
    wait_until(lambda: bool(ranks()), 60, lambda: f"no rank: {node.processes()}; {run.stderr_lines}")
    rank = ranks()[0]
    environ = dict(
        entry.split("=", 1) for entry in Path(f"/proc/{rank}/environ").read_text().split("\0") if "=" in entry
    )
    assert {name: environ.get(name) for name in ("ODD", "EMPTY", "TAKEN", "FROM_SETUP")} == {
        "ODD": odd,
        "EMPTY": "",
        "TAKEN": "from here",
        "FROM_SETUP": "by env.sh",
    }
    run.process.send_signal(signal.SIGINT)
    assert run.finish().code == 130
    wait_until(lambda: not ranks(), 15, lambda: f"left behind: {node.processes()}")


def test_a_setup_that_fails_or_waits_is_told(net: Network) -> None:
    reached = reach(net.client, "node1", setup="source /nowhere/env.sh; exit 7")
    row = reached.rows["node1"]
    assert (row["state"], row["stage"]) == ("failed", "start")
    assert "status 7" in row["message"]
    assert "/nowhere/env.sh" in row["message"]
    assert reach(net.client, "node1", setup="read -r answer; cat").states == {"node1": "ok"}, "its stdin is empty"


def test_via_tells_a_host_that_its_command_does_not_know(net: Network) -> None:
    reached = reach(net.client, "node1,node9", via=net.via)
    assert reached.states == {"node1": "ok", "node9": "failed"}
    assert "no such node: node9" in reached.rows["node9"]["message"]
    missing = reach(net.client, "node1", via="no-such-tool {host}")
    assert missing.states == {"node1": "failed"}
    assert "no-such-tool" in missing.rows["node1"]["message"]


def test_via_leads_through_any_command_such_as_ssh(net: Network) -> None:
    ssh = shlex.join(["ssh", "-T", "-oBatchMode=yes", "{host}"])
    net["node3"].reject(22)
    assert reach(net.client, "node[1-3]", via=ssh).states == {"node1": "ok", "node2": "ok", "node3": "refused"}
