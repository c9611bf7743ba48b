"""Host keys: only known keys or keys accepted by --accept-new are trusted, and the fix is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cluster import Network, need_network
from cluster_reach import reach
from cluster_ssh import SSHD, Sshd, give_user_keys, key_pair, known_hosts_line, serve_ssh
from ssh_tools import keygen, make_key
from support import need
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IN = "no-python"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_network()
    need("ssh", "ssh-keygen", SSHD)
    with Network(2) as network:
        serve_ssh(network)
        yield network


@pytest.fixture
def net(network: Network) -> Network:
    """The keys of both nodes are known to the user; distdiag has accepted none."""
    give_user_keys(network.client, {"node1": "node1", "node2": "node2"})
    own_file(network).unlink(missing_ok=True)
    return network


def log_in(net: Network, hosts: str, *, accept_new: bool = False) -> dict[str, str]:
    """Give the states of the hosts; `IN`, where we are let in: no agent is started after that."""
    return reach(net.client, hosts, python="/nowhere", accept_new=accept_new).states


def user_file(net: Network) -> Path:
    return net.client.home / ".ssh" / "known_hosts"


def own_file(net: Network) -> Path:
    """The file that --accept-new writes."""
    return net.client.home / ".config" / "distdiag" / "known_hosts"


def fingerprint(owner: str, tmp_path: Path) -> str:
    """What ssh-keygen calls the key of a node."""
    (tmp_path / "key.pub").write_text(key_pair(owner).public)
    return keygen("-l", "-f", str(tmp_path / "key.pub")).split()[1]


def test_an_unknown_key_is_refused_and_pasting_the_line_makes_it_known(net: Network, tmp_path: Path) -> None:
    user_file(net).write_text(known_hosts_line("node1", "node1"))
    asked = ("gpu-test", "--json", "--hosts", "node[1-2]", "--python", "/nowhere")
    result = distdiag(*asked, env=net.client_env(), wrap=tuple(net.client.command()))
    assert result.code == 3
    assert [row["state"] for row in result.report["data"]["hosts"]] == [IN, "host-key-unknown"]
    finding = result.findings["host-key-unknown"]
    shown = fingerprint("node2", tmp_path)
    assert shown in finding["evidence"][0]
    (command,) = finding["fix"]["commands"]
    assert command.endswith(f"# {shown}")
    assert not own_file(net).exists()
    net.client.run("sh", "-c", command)
    assert log_in(net, "node[1-2]") == {"node1": IN, "node2": IN}


def test_many_unknown_keys_are_one_finding_with_a_line_for_each(net: Network) -> None:
    user_file(net).write_text("")
    finding = reach(net.client, "node[1-2]").finding("node1")
    assert finding["where"]["hosts"] == ["node1", "node2"]
    for command in finding["fix"]["commands"]:
        net.client.run("sh", "-c", command)
    assert log_in(net, "node[1-2]") == {"node1": IN, "node2": IN}


def test_a_changed_key_is_refused_with_file_and_line_and_a_command_that_forgets_it(net: Network) -> None:
    user_file(net).write_text("# ours\n" + known_hosts_line("node1", "somebody else"))
    for accept_new in (False, True):
        reached = reach(net.client, "node1", accept_new=accept_new)
        assert reached.states == {"node1": "host-key-changed"}
    finding = reached.finding("node1")
    assert finding["evidence"][0].endswith(f"see {user_file(net)}, line 2")
    net.client.run("sh", "-c", *finding["fix"]["commands"])
    assert reach(net.client, "node1").states == {"node1": "host-key-unknown"}


def test_a_revoked_key_is_refused_though_it_is_known(net: Network) -> None:
    known = known_hosts_line("node1", "node1")
    user_file(net).write_text(known + "@revoked *" + known.removeprefix("node1") + known_hosts_line("node2", "node2"))
    for accept_new in (False, True):
        states = log_in(net, "node[1-2]", accept_new=accept_new)
        assert states == {"node1": "host-key-revoked", "node2": IN}


def test_accept_new_remembers_unknown_keys_in_its_own_file_and_refuses_changed_ones_later(net: Network) -> None:
    user_file(net).write_text("")
    assert log_in(net, "node[1-2]") == {"node1": "host-key-unknown", "node2": "host-key-unknown"}
    assert not own_file(net).exists()
    assert log_in(net, "node[1-2]", accept_new=True) == {"node1": IN, "node2": IN}
    assert sorted(own_file(net).read_text().splitlines(True)) == [
        known_hosts_line("node1", "node1"),
        known_hosts_line("node2", "node2"),
    ]
    assert user_file(net).read_text() == ""
    assert log_in(net, "node[1-2]") == {"node1": IN, "node2": IN}, "they are known from now on"
    own_file(net).write_text(known_hosts_line("node1", "somebody else"))
    states = log_in(net, "node[1-2]", accept_new=True)
    assert states == {"node1": "host-key-changed", "node2": IN}


def test_a_host_known_by_a_key_of_another_type_is_asked_for_that_one(net: Network, tmp_path: Path) -> None:
    made = [make_key(tmp_path / kind, "-t", kind, "-b", bits) for kind, bits in (("ecdsa", "256"), ("rsa", "2048"))]
    Sshd(net["node1"], port=2222, options=[f"HostKey {path}" for path in made]).wait()
    lines = {path: " ".join((tmp_path / f"{path}.pub").read_text().split()[:2]) for path in made}
    for path in made:
        user_file(net).write_text(f"[node1]:2222 {lines[path]}\n")
        assert log_in(net, "ssh://node1:2222") == {"node1": IN}
    plain = Sshd(net["node1"], port=2223).wait()
    user_file(net).write_text(f"[node1]:{plain.port} {lines[made[0]]}\n")
    assert log_in(net, f"ssh://node1:{plain.port}") == {"node1": "host-key-unknown"}


@pytest.mark.parametrize("signer", ["ca", "stranger"])
def test_a_host_of_a_certificate_authority_goes_by_openssh_and_its_certificate_is_checked(
    net: Network, tmp_path: Path, signer: str
) -> None:
    for name in ("ca", "stranger"):
        make_key(tmp_path / name)
    public = tmp_path / "host_key.pub"
    public.write_text(key_pair("node1").public)
    keygen("-q", "-s", str(tmp_path / signer), "-h", "-I", "node1", "-n", "node1", str(public))
    port = 2224 if signer == "ca" else 2225
    Sshd(net["node1"], port=port, options=[f"HostCertificate {tmp_path / 'host_key-cert.pub'}"]).wait()
    authority = " ".join((tmp_path / "ca.pub").read_text().split()[:2])
    user_file(net).write_text(f"@cert-authority [node1]:{port} {authority}\n" + known_hosts_line("node2", "node2"))
    expected = IN if signer == "ca" else "host-key-unknown"
    assert log_in(net, f"ssh://node1:{port},node2") == {"node1": expected, "node2": IN}


def test_the_key_of_a_bastion_is_checked_too_and_it_is_named(net: Network) -> None:
    config = "StrictHostKeyChecking no\nHost node2\n  ProxyJump node1\n"
    give_user_keys(net.client, {"node2": "node2"}, config=config)
    finding = reach(net.client, "node2").finding("node2")
    assert finding["id"] == "hosts.host-key-unknown"
    assert "host key is known for node1" in finding["title"]
    give_user_keys(net.client, {"node1": "node1", "node2": "node2"}, config=config)
    assert log_in(net, "node2") == {"node2": IN}
