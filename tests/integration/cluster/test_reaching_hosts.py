"""One host in trouble: its row says which, in time, and the others are reached all the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import Network, need_network
from cluster_reach import Reached, reach
from cluster_ssh import SSHD, Hostile, Sshd, act_hostile, give_user_keys, greet, key_pair, serve_ssh
from support import need
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster_netns import Node

HOST_TIMEOUT_S = 10.0
"""A good host answers in it with other tests on the machine."""
MUTE_SSHD = Path(__file__).parents[2] / "programs" / "mute_sshd.py"
# Accepts connections and sends only the first argument, regardless of its input.
TALKER = """
import socket, sys
listener, taken = socket.create_server(("", 22)), []
while True:
    taken.append(listener.accept()[0])
    taken[-1].sendall(sys.argv[1].encode())
"""


@dataclass(frozen=True)
class Case:
    """The state of a host, and the expected row and finding."""

    make: Callable[[Node], Sshd | None]
    state: str
    stage: str
    says: str = ""
    fix: str = ""


def talker(node: Node, words: str) -> None:
    node.start(sys.executable, "-c", TALKER, words)
    node.wait_for_port(22)


def mute(node: Node) -> None:
    """An ssh server that lets us in and does nothing."""
    key = node.home / "host_key"
    key.touch(mode=0o600)
    key.write_text(key_pair(node.name).private)
    node.start(sys.executable, str(MUTE_SSHD), str(key))
    node.wait_for_port(22)


def web_server(node: Node) -> None:
    node.start(sys.executable, "-m", "http.server", "22", "--directory", str(node.home))
    node.wait_for_port(22)


def hostile(how: Hostile) -> Callable[[Node], Sshd]:
    return lambda node: Sshd(node, options=[act_hostile(how)])


def with_shell(shell: str) -> Callable[[Node], Sshd]:
    def make(node: Node) -> Sshd:
        node.log_in_with(node.run("sh", "-c", f"command -v {shell} || echo /bin/sh").stdout.strip())
        greet(node, "Welcome, this is no JSON {")
        return Sshd(node)

    return make


def closed_account(node: Node) -> Sshd:
    node.log_in_with("/usr/sbin/nologin")
    return Sshd(node)


CASES = {
    "good": Case(Sshd, "ok", "facts"),
    "hole": Case(lambda node: node.vanish(), "filtered", "connect", "no answer on port 22 within 10 s", "firewall"),
    "closed": Case(lambda node: None, "refused", "connect", "nothing listens on port 22", "start sshd"),
    "prohibited": Case(lambda node: node.reject(22, how="admin-prohibited"), "no-route", "connect", "no route to host"),
    "unplugged": Case(lambda node: node.unplug(), "no-route", "connect", "no route to host", "route"),
    "http": Case(web_server, "not-ssh", "banner", 'port 22 is not ssh, it answers "<!DOCTYPE', "ssh://host:port"),
    "smtp": Case(lambda node: talker(node, "220 mail\r\n"), "not-ssh", "banner", 'is not ssh, it answers "220 mail"'),
    "halfline": Case(lambda node: talker(node, "who?"), "not-ssh", "banner", 'is not ssh, it answers "who?"'),
    "silent": Case(lambda node: talker(node, ""), "timeout", "banner", "sends nothing for 10 s", "--host-timeout"),
    "greets": Case(lambda node: talker(node, "SSH-2.0-x\r\n"), "timeout", "handshake", "within 10 s"),
    "mute": Case(mute, "timeout", "session", "does not run the command: no answer within 10 s"),
    "auth": Case(
        lambda node: Sshd(node, options=["AuthorizedKeysFile none"]), "auth", "login", "user root with /", "by hand"
    ),
    "csh": Case(with_shell("tcsh"), "ok", "facts"),
    "fish": Case(with_shell("fish"), "ok", "facts"),
    "bash": Case(with_shell("bash"), "ok", "facts"),
    "garbage": Case(hostile(Hostile.GARBAGE), "protocol-error", "start", "before the handshake"),
    "garbage-first": Case(hostile(Hostile.GARBAGE_FIRST), "ok", "facts"),
    "no-program": Case(
        hostile(Hostile.NOT_FOUND), "failed", "start", 'command not found: "python3: command not found"'
    ),
    "hanging": Case(hostile(Hostile.HANGING), "timeout", "start", "no Python started within 10 s", "wait"),
    "killed": Case(hostile(Hostile.KILLED), "killed", "start", "killed by a signal", "what kills processes"),
    "nologin": Case(closed_account, "failed", "start", 'status 1 before the handshake: "This account'),
    "forced": Case(
        lambda node: Sshd(node, options=["ForceCommand echo backup only"]),
        "protocol-error",
        "start",
        '"backup only"',
        "forced",
    ),
}


@pytest.fixture(scope="module")
def troubled() -> Iterator[Reached]:
    """All cases at once."""
    need_network()
    need("ssh", "ssh-keygen", SSHD, "tcsh", "fish", "bash")
    with Network(list(CASES)) as network:
        servers = [case.make(network[name]) for name, case in CASES.items()]
        give_user_keys(network.client, {name: name for name in CASES})
        for server in servers:
            if server is not None:
                server.wait()
        yield reach(network.client, network.hosts + ",nosuch", host_timeout_s=HOST_TIMEOUT_S)


@pytest.mark.parametrize("name", CASES)
def test_each_host_has_its_own_row_and_finding(troubled: Reached, name: str) -> None:
    case, row = CASES[name], troubled.rows[name]
    assert (row["state"], row["stage"]) == (case.state, case.stage), row["message"]
    assert case.says in row["message"]
    if case.state == "ok":
        assert not any(name in finding["where"]["hosts"] for finding in troubled.report["findings"])
        return
    finding = troubled.finding(name)
    assert finding["id"] == f"hosts.{case.state}"
    assert finding["level"] == "unknown"
    assert case.fix in finding["fix"]["text"]


def test_an_unknown_name_is_told(troubled: Reached) -> None:
    row = troubled.rows["nosuch"]
    assert (row["state"], row["stage"], row["message"]) == ("unknown-name", "resolve", "name or service not known")


def test_rows_stand_in_the_order_of_the_list_and_none_is_missing(troubled: Reached) -> None:
    assert list(troubled.rows) == [*CASES, "nosuch"]


def test_no_host_costs_more_than_its_own_stages(troubled: Reached) -> None:
    slowest = max(row["seconds"] for row in troubled.rows.values())
    assert slowest < 2.5 * HOST_TIMEOUT_S, "one that is connected to late and then hangs"
    assert troubled.report["seconds"] < slowest + HOST_TIMEOUT_S / 2, (
        "two that hang, one after the other, take twice as long"
    )


def test_the_same_trouble_of_several_hosts_is_one_finding(troubled: Reached) -> None:
    finding = troubled.finding("unplugged")
    assert finding["where"]["hosts"] == ["prohibited", "unplugged"]
    assert finding["title"] == "2 hosts, prohibited,unplugged: each is unreachable: no route to host"
    assert finding["evidence"] == [
        "prohibited: 10.77.0.4 port 22: no route to host",
        "unplugged: 10.77.0.5 port 22: no route to host",
    ]


@pytest.fixture
def pair() -> Iterator[Network]:
    """Two nodes; a test starts the services it needs."""
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    with Network(2) as network:
        yield network


@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_a_flood_costs_little_memory_and_time_and_the_other_host_is_reached(pair: Network, where: str) -> None:
    flood = Hostile.FLOOD.value if where == "stdout" else f"exec >&2; {Hostile.FLOOD.value}"
    servers = [Sshd(pair["node1"], options=[f"ForceCommand {flood}"]), Sshd(pair["node2"])]
    give_user_keys(pair.client, {"node1": "node1", "node2": "node2"})
    for server in servers:
        server.wait()
    reached = reach(pair.client, "node[1-2]", host_timeout_s=30)
    assert reached.states == {"node1": "protocol-error", "node2": "ok"}
    assert reached.rows["node1"]["stage"] == "start"
    assert reached.report["grown_mib"] < 45, "up to 26 MiB with a flood that is dropped"
    assert len(reached.finding("node1")["title"]) < 300


def test_waiting_for_the_rest_of_a_greeting_burns_no_processor(pair: Network) -> None:
    talker(pair["node1"], "who?")
    reached = reach(pair.client, "node1", host_timeout_s=3)
    assert reached.rows["node1"]["seconds"] > 2.9
    assert reached.report["cpu_s"] < 2


def test_a_python_that_is_not_there_is_one_finding_for_all(pair: Network) -> None:
    serve_ssh(pair)
    reached = reach(pair.client, "node[1-2]", python="/nowhere/python")
    assert reached.count() == {"no-python": 2}
    finding = reached.finding("node1")
    assert finding["title"] == "2 hosts, node[1-2]: each has no usable Python: no /nowhere/python"
    assert "--python" in finding["fix"]["text"]


def test_a_host_that_is_reached_by_its_second_address_only_is_reached(pair: Network) -> None:
    serve_ssh(pair)
    both = f"{pair['node2'].address} many\n{pair['node1'].address} many\n"
    pair["node2"].vanish()
    pair.client.write_hosts(both)
    key = " ".join(key_pair("node1").public.split()[:2])
    (pair.client.home / ".ssh" / "known_hosts").write_text(f"many {key}\n")
    assert reach(pair.client, "many", host_timeout_s=8).states == {"many": "ok"}


def test_the_program_prints_table_and_finding_and_leaves_with_3(pair: Network) -> None:
    serve_ssh(pair, [pair["node1"]])
    client = tuple(pair.client.command())
    plain = distdiag(
        "gpu-test", "--hosts", "node[1-2],nosuch", "--python", "/nowhere", env=pair.client_env(), wrap=client
    )
    assert plain.code == 3
    lines = [line.split() for line in plain.out.splitlines()]
    assert ["node1", "1", "no-python", "start"] in [line[:4] for line in lines]
    assert ["node2", "1", "refused", "connect"] in [line[:4] for line in lines]
    assert ["nosuch", "1", "unknown-name", "resolve"] in [line[:4] for line in lines]
    assert "start sshd, or give its port" in plain.out


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("node1,no de;2", "contains white space"),
        ("node1,$(reboot)", "contains '$'"),
        ("node1,-oProxyCommand=x", "contains '='"),
        ("no\tde`1`", "contains white space"),
    ],
)
def test_names_with_odd_characters_are_refused_by_name(hosts: str, says: str) -> None:
    result = distdiag("gpu-test", "--hosts", hosts)
    assert result.code == 2
    assert says in result.err
    assert "Traceback" not in result.err
