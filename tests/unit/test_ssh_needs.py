"""What is left to OpenSSH's own client, by real keys and a real shared connection's socket."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest
from ssh_tools import make_key, set_up, settings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_up(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("ProxyCommand none", ""),
        ("ProxyJump gate", ""),
        ("ProxyCommand nc %h %p", "ProxyCommand"),
        ("CertificateFile /c.pub", "CertificateFile"),
        ("PKCS11Provider /usr/lib/p11.so", "PKCS11Provider"),
        ("PKCS11Provider none", ""),
        ("KnownHostsCommand /bin/echo %H", "KnownHostsCommand"),
        ("RevokedHostKeys /etc/ssh/revoked", "RevokedHostKeys"),
        ("BindInterface lo", "BindInterface"),
        ("HostbasedAuthentication yes", "HostbasedAuthentication"),
        ("VerifyHostKeyDNS yes", "VerifyHostKeyDNS"),
        ("VerifyHostKeyDNS ask", ""),
        ("PubkeyAuthentication no", "PubkeyAuthentication"),
        ("ControlMaster auto\nControlPath /nowhere/%C", ""),
        ("GSSAPIAuthentication yes", ""),
    ],
)
def test_what_only_openssh_can_do(text: str, reason: str, tmp_path: Path) -> None:
    found = settings(tmp_path, text).needs_openssh
    assert reason in found
    assert bool(reason) == bool(found)


def test_an_open_shared_connection_is_used_by_openssh(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "cm-n1"))
        text = f"ControlPath {tmp_path}/cm-%h\n"
        assert f"{tmp_path}/cm-n1" in settings(tmp_path, text).needs_openssh
        assert settings(tmp_path, text, name="n2").needs_openssh == ""


@pytest.fixture
def only_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with ssh and nothing else on it."""
    ssh = shutil.which("ssh")
    assert ssh is not None
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").symlink_to(ssh)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_gssapi_counts_where_there_is_a_ticket(tmp_path: Path, only_ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs() -> bool:
        return "Kerberos" in settings(tmp_path, "GSSAPIAuthentication yes").needs_openssh

    (tmp_path / "ticket").touch()
    for place, expected in ((f"{tmp_path}/ticket", True), (f"FILE:{tmp_path}/none", False), ("KCM:0", True)):
        monkeypatch.setenv("KRB5CCNAME", place)
        assert needs() == expected, place
    for status in (0, 1):  # klist knows: a ticket may be out of date, or be where no file is
        folder = tmp_path / f"klist-{status}"
        folder.mkdir()
        (folder / "klist").write_text(f'#!/bin/sh\n[ "$*" = -s ] && exit {status}\n')
        (folder / "klist").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{only_ssh}")
        assert needs() == (status == 0)


def test_keys_that_only_openssh_can_use(tmp_path: Path) -> None:
    def needs(key: str, more: str = "") -> str:
        return settings(tmp_path, f"IdentityFile {key}\n{more}\n").needs_openssh

    only = "IdentitiesOnly yes"
    plain = make_key(tmp_path / "plain")
    assert (needs(plain), needs(plain, only)) == ("", "")
    assert "public key" in needs(f"{plain}.pub")
    assert settings(tmp_path, f"IdentityFile {plain}.pub").identity_files == ()
    for name, options in (
        ("openssh", []),
        ("pem", ["-t", "rsa", "-m", "PEM"]),
        ("pkcs8", ["-t", "rsa", "-m", "PKCS8"]),
    ):
        locked = make_key(tmp_path / name, *options, passphrase="secret")
        assert needs(locked) == ""
        assert "only the agent" in needs(locked, only)
        assert needs(make_key(tmp_path / f"{name}-open", *options), only) == ""
    os.remove(tmp_path / "openssh")
    assert "only the agent" in needs(str(tmp_path / "openssh"), only)
    signed = make_key(tmp_path / "signed")
    subprocess.run(["ssh-keygen", "-q", "-s", plain, "-I", "me", "-n", "me", f"{signed}.pub"], check=True)
    assert f"{signed}-cert.pub is a certificate" in needs(signed)


def test_security_keys_are_known_by_either_half(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n-----END OPENSSH PRIVATE KEY-----\n")
    (tmp_path / "a.pub").write_text("sk-ssh-ed25519@openssh.com AAAA me\n")
    inside = b"openssh-key-v1\0\0\0\0\4none\0\0\0\4none\0\0\0\0\0\0\0\1\0\0\0\x4a\0\0\0\x1ask-ssh-ed25519@openssh.com"
    body = base64.b64encode(inside).decode()
    lines = ["-----BEGIN OPENSSH PRIVATE KEY-----", body[:70], body[70:], "-----END OPENSSH PRIVATE KEY-----"]
    (tmp_path / "b").write_text("\n".join(lines))
    for name in "ab":
        assert "security key" in settings(tmp_path, f"IdentityFile {tmp_path}/{name}").needs_openssh
