"""Keys and configurations of ssh, made for a test by the real tools."""

from __future__ import annotations

import base64
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support import need

from distdiag.cluster.hosts import Host
from distdiag.cluster.transports.ssh_config import SshSettings, resolve

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


@dataclass(frozen=True)
class Key:
    """A real key pair; `public` is its type and base64."""

    path: Path
    type_: str
    public: str

    @property
    def blob(self) -> bytes:
        """The public half, as it goes over the wire."""
        return base64.b64decode(self.public.split()[1])


def make_keys(folder: Path) -> dict[str, Key]:
    """One of each usual type, and a second of one."""
    need("ssh-keygen")
    made = {}
    for name in ("ed25519", "ecdsa", "rsa", "ed25519-other"):
        path = folder / name
        make_key(path, "-t", name.partition("-")[0])
        public = " ".join(path.with_suffix(".pub").read_text().split()[:2])
        made[name] = Key(path, public.split()[0], public)
    return made


def make_key(path: Path, *options: str, passphrase: str = "") -> str:
    """Make a key pair, of ed25519 if no other -t is given; its path."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, *options, "-f", str(path)]
    subprocess.run(argv, check=True, capture_output=True)
    return str(path)


def keygen(*arguments: str) -> str:
    """What ssh-keygen prints."""
    done = subprocess.run(["ssh-keygen", *arguments], capture_output=True, text=True, check=False, timeout=20)
    return done.stdout


def variants(key: Key, count: int) -> list[bytes]:
    """Give as many different keys; all that they can do is to be compared."""
    return [key.blob[:-4] + number.to_bytes(4, "big") for number in range(count)]


def set_up(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Hide the developer's own agent and ticket."""
    need("ssh", "ssh-keygen")
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{folder}/no-ticket")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


def config(tmp_path: Path, text: str) -> str:
    """Write a configuration; its path."""
    path = tmp_path / "config"
    path.write_text(text)
    return str(path)


def settings(tmp_path: Path, text: str, name: str = "n1") -> SshSettings:
    """The resolved configuration of a host."""
    return resolve(Host(name=name), config_file=config(tmp_path, text))
