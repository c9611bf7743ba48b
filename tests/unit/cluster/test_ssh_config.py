"""Ssh's configuration compared with the real ssh: the output of -G, and the keys it tries."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from ssh_tools import config, make_key, set_up, settings
from support import wait_until

from distdiag.cluster.hosts import Host
from distdiag.cluster.transports.ssh_config import resolve
from distdiag.errors import DistdiagError
from distdiag.facts import machine

if TYPE_CHECKING:
    from pathlib import Path

ME = pwd.getpwuid(os.getuid())
HOME = ME.pw_dir


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_up(monkeypatch, tmp_path)


def said(path: str, *arguments: str) -> dict[str, list[str]]:
    """What ssh -G says, read by the test itself."""
    done = subprocess.run(["ssh", "-G", "-F", path, *arguments], capture_output=True, text=True, check=True)
    answer: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        answer.setdefault(line.split(" ")[0], []).append(line.partition(" ")[2])
    return answer


CONFIG = """
Include {folder}/conf.d/*.conf
Match exec "test %n = by-command"
    Port 2205
    User commanded
Match originalhost *.lab !originalhost login.lab
    ProxyJump ada@gate-a:2201,gate-b,10.0.0.9
Host node*
    HostName %h.Cluster.Example
    IdentitiesOnly yes
    StrictHostKeyChecking accept-new
    ConnectTimeout 7
    AddressFamily inet6
    BindAddress 127.0.0.1
Host strict
    StrictHostKeyChecking yes
    UserKnownHostsFile {folder}/kh-%h "{folder}/with space/kh" {folder}/kh2
    GlobalKnownHostsFile none
    IdentityAgent {folder}/agent-%h
Host lax
    StrictHostKeyChecking no
    IdentityAgent none
    ProxyJump none
Host bare
    HostName bare.example
    IdentityAgent $THE_AGENT
    ProxyJump 10.0.0.9
Match host bare.example
    HostKeyAlias Old-Name
Host *
    User everyone
    IdentityAgent SSH_AUTH_SOCK
"""


@pytest.fixture
def full_config(tmp_path: Path) -> str:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "a.conf").write_text("Host included node7\n    Port 2206\n")
    (tmp_path / "with space").mkdir()
    (tmp_path / "with space" / "kh").touch()
    return config(tmp_path, CONFIG.format(folder=tmp_path))


NAMES = ["n1", "by-command", "c.lab", "login.lab", "bare", "node3", "node7", "strict", "lax", "included", "10.0.0.3"]


@pytest.mark.parametrize("name", [*NAMES, "UPPER", "::1", "127.1"])
def test_settings_are_what_ssh_says(name: str, full_config: str) -> None:
    found = resolve(Host(name=name), config_file=full_config)
    by_ssh = said(full_config, "--", name)
    assert [found.hostname] == by_ssh["hostname"]
    assert [str(found.port)] == by_ssh["port"]
    assert [found.user] == by_ssh["user"]
    assert found.proxied == ("proxyjump" in by_ssh)
    assert found.host_key_alias == by_ssh.get("hostkeyalias", [None])[0]
    assert " ".join(found.user_known_hosts) == by_ssh["userknownhostsfile"][0]
    assert found.address_family == by_ssh["addressfamily"][0]


def test_settings_in_our_words(full_config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_AGENT", "/run/the-agent")
    by_name = {name: resolve(Host(name=name), config_file=full_config) for name in NAMES}
    assert (by_name["by-command"].user, by_name["by-command"].port) == ("commanded", 2205)
    assert [by_name[name].proxied for name in ("c.lab", "login.lab", "lax")] == [True, False, False]
    assert by_name["bare"].known_as == ("old-name", 22)
    node = by_name["node7"]
    assert (node.hostname, node.port, node.known_as) == ("node7.cluster.example", 2206, ("node7.cluster.example", 2206))
    assert (node.needs_openssh, node.address_family) == ("BindAddress is set", "inet6")
    strict = by_name["strict"]
    assert strict.user_known_hosts == tuple(f"{tmp_path}/{file}" for file in ("kh-strict", "with space/kh", "kh2"))
    assert (strict.global_known_hosts, strict.needs_openssh) == ((), "IdentityAgent is set")
    n1 = by_name["n1"]
    assert (n1.uses_agent, by_name["lax"].uses_agent, n1.needs_openssh) == (True, False, "")
    assert n1.user_known_hosts == (f"{HOME}/.ssh/known_hosts", f"{HOME}/.ssh/known_hosts2")


def test_what_was_said_of_the_host_comes_before_the_configuration(tmp_path: Path) -> None:
    text = "Host *\n  User other\n  Port 99\n"
    host = Host(name="n1", user="ada", port=2201)
    found = resolve(host, config_file=config(tmp_path, text))
    assert (found.host, found.hostname, found.user, found.port) == ("n1", "n1", "ada", 2201)


def tried_by_ssh(path: str, name: str) -> tuple[str, ...]:
    """The key files that ssh has a look at, as it tells with -v, and that exist."""
    argv = ["ssh", "-v", "-F", path, "-o", "ProxyCommand=true", "-o", "BatchMode=yes", "-l", "ada", "-p", "2201"]
    done = subprocess.run([*argv, name, "true"], capture_output=True, text=True, check=False, timeout=20)
    found = re.findall(r"identity file (.*) type -?[0-9]+", done.stderr)
    return tuple(file for file in dict.fromkeys(found) if os.path.exists(file) and not file.endswith("-cert"))


def test_key_files_are_those_that_ssh_tries(tmp_path: Path) -> None:
    for name in ("first", "by-home"):
        make_key(tmp_path / name)
    lines = [
        f"IdentityFile {tmp_path}/first",
        f"IdentityFile ~/{os.path.relpath(tmp_path, HOME)}/by-home",
        "IdentityFile none",
        f"IdentityFile {tmp_path}/not-there",
        f"IdentityFile {tmp_path}",
    ]
    path = config(tmp_path, "\n".join(lines))
    found = resolve(Host(name="N1", user="ada", port=2201), config_file=path)
    expected = tried_by_ssh(path, "N1")
    assert {os.path.basename(file) for file in expected} >= {"first"} | ({"by-home"} if os.path.isdir(HOME) else set())
    assert found.identity_files == tuple(file for file in expected if os.path.isfile(file))
    assert found.needs_openssh == ""


def test_a_token_that_only_ssh_replaces_leaves_it_to_ssh(tmp_path: Path) -> None:
    for text in (
        "IdentityFile /keys/%C",
        "IdentityFile /keys/%r",
        "IdentityFile ${KEY_FOLDER}/id",
        "IdentityFile ~ada/id",
    ):
        assert "only ssh" in settings(tmp_path, text).needs_openssh


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Host n*\n\n  Colour blue\n", "line 3: Bad configuration option: colour"),
        ("Port many\n", "line 1: Bad port 'many'"),
        ("Host *\n  ProxyJump n1\n", "jumphost loop via n1"),
        ("Match nonsense\n", "line 1"),
        ("IdentityAgent ${NOT_SET_ANYWHERE}\n", "line 1: Invalid environment expansion"),
    ],
)
def test_a_configuration_that_ssh_refuses_is_told_in_its_words(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DistdiagError, match=re.escape(words)) as caught:
        settings(tmp_path, text)
    assert "n1" in str(caught.value)
    assert f"ssh -G -T -F {tmp_path}/config -- n1" in caught.value.hint


def test_a_name_is_never_an_option(tmp_path: Path) -> None:
    with pytest.raises(DistdiagError, match="invalid characters"):
        settings(tmp_path, "", name="-oProxyCommand=touch /tmp/x")


def test_a_command_that_hangs_ends_with_its_time(tmp_path: Path) -> None:
    path = config(tmp_path, f'Match exec "echo $$ > {tmp_path}/pid; exec sleep 60"\n  User nobody\n')
    began = time.monotonic()
    with pytest.raises(DistdiagError, match=r"within 3 s"):
        resolve(Host(name="n1"), config_file=path, timeout_s=3)
    assert time.monotonic() - began < 20
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: machine.process_state(pid).letter in ("", "Z"), 2, lambda: f"{pid} lives")
