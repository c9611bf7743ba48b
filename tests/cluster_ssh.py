"""Throwaway ssh servers on the nodes of a test cluster, and a user on its client who may log in."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster import Network
    from cluster_netns import Node

SSHD = "/usr/sbin/sshd"  # it wants to be started by its full path
# All of sshd's key exchanges but one, which costs each login through OpenSSH 0.05 s of processor time on each side.
_SERVER = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
AcceptEnv DISTDIAG_*
KexAlgorithms -sntrup761*
"""
_NO_LIMITS = "MaxStartups 2000\nMaxSessions 2000\n"


class Hostile(enum.Enum):
    """What a node does instead of the command that it is sent."""

    GARBAGE = "exec head -c 200000 /dev/urandom"
    GARBAGE_FIRST = 'head -c 4096 /dev/urandom; exec sh -c "$SSH_ORIGINAL_COMMAND"'
    FLOOD = "tr '\\0' x </dev/zero | head -c 50000000"
    NOT_FOUND = 'echo "python3: command not found" >&2; exit 127'
    HANGING = "exec sleep 1000"
    KILLED = "kill -9 $$"


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """An ed25519 key as ssh-keygen writes it."""

    private: str
    public: str


@functools.cache
def key_pair(name: str) -> KeyPair:
    """Make a key once in a session; every name has its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=20)
        return KeyPair(private=path.read_text(), public=path.with_suffix(".pub").read_text())


class Sshd:
    """An ssh server on a node, until the node ends; `log` is its own."""

    def __init__(
        self, node: Node, *, port: int = 22, options: Sequence[str] = (), default_limits: bool = False
    ) -> None:
        self.node = node
        self.port = port
        folder = node.folder / f"sshd-{port}"
        folder.mkdir()
        self.log = folder / "log"
        _write_private(folder / "host_key", key_pair(node.name).private)
        (folder / "authorized_keys").write_text(key_pair("user").public)
        # sshd takes the first value that it reads, so the options of a test come before ours.
        limits = "" if default_limits else _NO_LIMITS
        config = folder / "sshd_config"
        config.write_text("\n".join([*options, _SERVER.format(port=port, folder=folder), limits]))
        self._config = str(config)
        self.process = node.start(SSHD, "-D", "-f", self._config, "-E", str(self.log))

    def wait(self) -> Sshd:
        """Wait until it listens."""
        wait_until(self._listens, 20, lambda: self.log.read_text() if self.log.exists() else "sshd does not start")
        self.node.overlook(self._config)
        return self

    def _listens(self) -> bool:
        assert self.process.poll() is None, f"sshd ended: {self.log.read_text()}"
        return self.node.listens_on(self.port)


def serve_ssh(
    network: Network, nodes: Iterable[Node] | None = None, *, options: Sequence[str] = (), default_limits: bool = False
) -> list[Sshd]:
    """Start ssh on the nodes (all, unless told) and let the client's user in, with the right host keys known."""
    chosen = network.nodes if nodes is None else list(nodes)
    servers = [Sshd(node, options=options, default_limits=default_limits) for node in chosen]
    give_user_keys(network.client, {f"{node.name},{node.address}": node.name for node in chosen})
    return [server.wait() for server in servers]


def give_user_keys(client: Node, known: dict[str, str], *, config: str = "") -> Path:
    """Write the user's ~/.ssh; `known` has the first word of each known_hosts line and whose key is told there."""
    folder = client.home / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    _write_private(folder / "id_ed25519", key_pair("user").private)
    (folder / "id_ed25519.pub").write_text(key_pair("user").public)
    (folder / "known_hosts").write_text("".join(known_hosts_line(*one) for one in known.items()))
    (folder / "config").write_text(config)
    return folder


def known_hosts_line(names: str, owner: str) -> str:
    """Give these hosts the key of `key_pair(owner)`."""
    kind, key = key_pair(owner).public.split()[:2]
    return f"{names} {kind} {key}\n"


def act_hostile(how: Hostile) -> str:
    """Give the sshd option for it."""
    return f"ForceCommand {how.value}"


def greet(node: Node, text: str) -> None:
    """Let the start-up files of every shell print this on each login, as they should not."""
    line = f"echo '{text}'\n"
    for name in (".bashrc", ".cshrc", ".zshenv", ".config/fish/config.fish"):
        path = node.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line)


def _write_private(path: Path, text: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(text)
