"""Many hosts with few questions to ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from ssh_tools import config, set_up

from distdiag.cluster.hosts import Host
from distdiag.cluster.transports.ssh_config import SshSettings, resolve, resolve_all
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_up(monkeypatch, tmp_path)


ODD_HOSTS = [
    Host(name="n1"),
    Host(name="N2"),
    Host(name="n3", user="ada", port=2201),
    Host(name="fe80::6%lo"),
    Host(name="n7.lab.example"),
    Host(name="10.0.0.8"),
    Host(name="127.1"),
    Host(name="010.0.0.1"),
    Host(name="0x7f.1"),
    Host(name="::1"),
    Host(name="0:0::1"),
    Host(name="n_9."),
    Host(name="*"),
]
BY_CONFIG = [
    ("", True),
    ("Host *\n  User ada\nHost=*\n  Port=99\nMatch all\n  ConnectTimeout 3\nMatch final all\n", True),
    ("# Host n1\nUserKnownHostsFile {folder}/kh\n", True),
    ("Include {folder}/plain.conf\n", False),
    ("Include {folder}/blocks.conf\n", False),
    ("Include /etc/ssh/ssh_config.d/*.conf\n", True),
    ("Host n1\n  User ada\n", False),
    ("Host * !n3\n  User ada\n", False),
    ('"Host" n3\n  User ada\n', False),
    ("Match host n3\n  User ada\n", False),
    ("Match exec true\n  User ada\n", False),
    ("HostName fixed\n", False),
    ("Host *\n  HostName %h.example\n", False),
    ("UserKnownHostsFile {folder}/kh-%h\n", False),
    ("ControlPath {folder}/%C\n", False),
    ("HostKeyAlias alias-%h\n", False),
    ("ProxyJump n3\n", False),
    ("User=ada\n\tport = 77\n", True),
]


@pytest.mark.parametrize(("text", "once"), BY_CONFIG)
def test_many_hosts_are_resolved_as_one_by_one(text: str, once: bool, tmp_path: Path, counted: Path) -> None:
    (tmp_path / "plain.conf").write_text("User included\n")
    (tmp_path / "blocks.conf").write_text("Host n3\n  User blocked\n")
    path = config(tmp_path, text.format(folder=tmp_path))
    hosts = ODD_HOSTS if once else ODD_HOSTS[:4]  # asked one by one
    together = resolve_all(hosts, config_file=path)
    calls = len(counted.read_text().splitlines())
    for host, found in zip(hosts, together, strict=True):
        try:
            alone: SshSettings | str = resolve(host, config_file=path)
        except DistdiagError as error:
            alone = str(error)
        assert alone == (str(found) if isinstance(found, DistdiagError) else found), host
    assert (calls < len(hosts)) == once


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets one line for each time that ssh is run."""
    log = tmp_path / "calls"
    log.touch()
    folder = tmp_path / "counting"
    folder.mkdir()
    (folder / "ssh").write_text(f'#!/bin/sh\necho x >> {log}\nexec {shutil.which("ssh")} "$@"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def test_a_thousand_hosts_need_one_question(tmp_path: Path, counted: Path) -> None:
    hosts = [Host(name=f"n{number}") for number in range(1000)]
    found = resolve_all(hosts, config_file=config(tmp_path, "User ada\n"))
    assert counted.read_text() == "x\n"
    assert [one.hostname for one in found if isinstance(one, SshSettings)] == [host.name for host in hosts]


def test_the_users_own_configuration_is_read_as_ssh_does() -> None:
    hosts = [Host(name="n1"), Host(name="n2", port=99), Host(name="n3.example")]
    assert resolve_all(hosts) == [resolve(host) for host in hosts]


def test_one_bad_host_does_not_spoil_the_others(tmp_path: Path) -> None:
    path = config(tmp_path, "Host *\n  ProxyJump n2\n")
    good, bad = resolve_all([Host(name="n1"), Host(name="n2")], config_file=path)
    assert isinstance(good, SshSettings)
    assert isinstance(bad, DistdiagError)
    for text in ("Colour blue\n", "Host n1\nColour blue\n"):
        failed = resolve_all([Host(name="n1"), Host(name="n2")], config_file=config(tmp_path, text))
        assert all("Bad configuration option" in str(error) for error in failed)
    assert resolve_all([]) == []


def test_without_ssh_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (answer,) = resolve_all([Host(name="n1")])
    assert isinstance(answer, DistdiagError)
    assert (str(answer), answer.hint) == (
        "cannot run ssh: No such file or directory",
        "install the OpenSSH client (openssh-client)",
    )


def test_paramiko_is_not_loaded_for_it(tmp_path: Path) -> None:
    script = (
        "import sys; from distdiag.cluster.hosts import Host; from distdiag.cluster.transports import ssh_config;"
        "ssh_config.resolve(Host(name='n1')); assert 'paramiko' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20)
