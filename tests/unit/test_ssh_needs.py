"""Hosts that need OpenSSH's own client, with real keys and the socket of a real shared connection."""

from __future__ import annotations

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
        ("ProxyJump none", ""),
        ("ProxyJump gate", "ProxyJump"),
        ("ProxyCommand nc %h %p", "ProxyCommand"),
        ("CertificateFile /c.pub", "CertificateFile"),
        ("PKCS11Provider /usr/lib/p11.so", "PKCS11Provider"),
        ("PKCS11Provider none", ""),
        ("KnownHostsCommand /bin/echo %H", "KnownHostsCommand"),
        ("RevokedHostKeys /etc/ssh/revoked", "RevokedHostKeys"),
        ("BindInterface lo", "BindInterface"),
        ("BindAddress 127.0.0.1", "BindAddress"),
        ("IdentityAgent /run/agent", "IdentityAgent"),
        ("IdentityAgent none", ""),
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


def test_gssapi_counts_where_there_may_be_a_ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ticket").touch()
    for place, expected in ((f"{tmp_path}/ticket", True), (f"FILE:{tmp_path}/none", False), ("KCM:0", True)):
        monkeypatch.setenv("KRB5CCNAME", place)
        assert ("Kerberos" in settings(tmp_path, "GSSAPIAuthentication yes").needs_openssh) == expected, place


def test_keys_that_only_openssh_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(key: str, more: str = "") -> str:
        return settings(tmp_path, f"IdentityFile {key}\n{more}\n").needs_openssh

    only = "IdentitiesOnly yes"
    plain = make_key(tmp_path / "plain")
    assert (needs(plain), needs(plain, only)) == ("", "")
    assert "public key" in needs(f"{plain}.pub")
    assert settings(tmp_path, f"IdentityFile {plain}.pub").identity_files == ()
    signed = make_key(tmp_path / "signed")
    subprocess.run(["ssh-keygen", "-q", "-s", plain, "-I", "me", "-n", "me", f"{signed}.pub"], check=True)
    assert f"{signed}-cert.pub is a certificate" in needs(signed)
    (tmp_path / "token").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n-----END OPENSSH PRIVATE KEY-----\n")
    (tmp_path / "token.pub").write_text("sk-ssh-ed25519@openssh.com AAAA me\n")
    assert "security key" in needs(f"{tmp_path}/token")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    assert needs(plain) == ""
    assert "keys of the agent" in needs(plain, only)
    assert needs(plain, f"{only}\nIdentityAgent none") == ""
