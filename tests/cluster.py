"""Clusters of network namespaces on one machine."""

from __future__ import annotations

import contextlib
import enum
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from cluster_faults import Cable
from cluster_netns import Node, end_holder, line_of, start_holder
from support import need

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CLIENT = "client"
_MADE_WITH = ("ip", "nft", "unshare", "nsenter", "mount", "setsid")

_ENTER = r"""#!/bin/sh
# enter HOST [--] COMMAND...: run a command on a node, as `docker exec` or `kubectl exec` would.
host=$1; shift
if [ "$1" = -- ]; then shift; fi
if [ ! -e "FOLDER/$host/enter" ]; then echo "enter: no such node: $host" >&2; exit 255; fi
exec nsenter $(cat "FOLDER/$host/enter") setsid "$@"
"""


class Names(enum.Enum):
    """A node's /etc/hosts entries for itself and for the others."""

    GOOD = "every node by its address"
    DEBIAN = "itself as 127.0.1.1, the others by their addresses"
    LOOPBACK = "itself as 127.0.0.1, the others by their addresses"
    UNKNOWN = "localhost only"


def need_network() -> None:
    """Skip where a node cannot be made; fail where it is promised."""
    need(*_MADE_WITH)
    tried = subprocess.run(["unshare", "-nmup", "--fork", "true"], capture_output=True, check=False, timeout=10)
    reason = tried.stderr.decode().strip() if os.geteuid() == 0 else "not root"
    if tried.returncode == 0 and os.geteuid() == 0:
        return
    if os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
        pytest.fail(f"required here: network namespaces: {reason}")
    pytest.skip(f"no right to make network namespaces: {reason}")


class Network:
    """Nodes on one switch, and a client beside them from which distdiag is run.

    The client shares the test's process ids, so that signals to a program started there reach it.
    """

    def __init__(self, nodes: int | Sequence[str] = 2, *, names: Names | Mapping[str, Names] = Names.GOOD) -> None:
        self._node_names = [f"node{i + 1}" for i in range(nodes)] if isinstance(nodes, int) else list(nodes)
        self._names = names
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self.folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="distdiag-net-")))
            self.folder.chmod(0o755)  # other users look in too
            self._switch = start_holder(["unshare", "-n", "sh", "-c", "echo up; exec cat >/dev/null"])
            undo.callback(end_holder, self._switch)
            assert line_of(self._switch) == "up"
            self.nodes = [
                self._add(undo, name, f"10.77.{i // 250}.{i % 250 + 1}") for i, name in enumerate(self._node_names)
            ]
            self.client = self._add(undo, CLIENT, "10.77.254.1", own_pids=False)
            self._connect()
            self._write_enter()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def __getitem__(self, name: str) -> Node:
        """Find a node by its name."""
        return next(node for node in (*self.nodes, self.client) if node.name == name)

    @property
    def via(self) -> str:
        """A template for distdiag's --via."""
        return f"{self.folder / 'enter'} {{host}} --"

    @property
    def hosts(self) -> str:
        """All nodes, as distdiag's --hosts takes them."""
        return ",".join(node.name for node in self.nodes)

    def client_env(self) -> dict[str, str]:
        """Give what differs in the environment of a user on the client."""
        return {"HOME": str(self.client.home), "SSH_AUTH_SOCK": ""}

    def hosts_file(self, node: Node, names: Names) -> str:
        """Give an /etc/hosts for this node."""
        lines = ["127.0.0.1 localhost"]
        if names is not Names.UNKNOWN:
            own = {Names.DEBIAN: "127.0.1.1", Names.LOOPBACK: "127.0.0.1"}.get(names, node.address)
            everybody = (*self.nodes, self.client)
            lines += [f"{own if one is node else one.address} {one.name}" for one in everybody]
        return "\n".join([*lines, ""])

    def _add(self, undo: contextlib.ExitStack, name: str, address: str, *, own_pids: bool = True) -> Node:
        cable = Cable(switch_pid=self._switch.pid, port=f"p{address.removeprefix('10.77.')}")
        node = Node(self.folder, name, address, cable, own_pids=own_pids)
        undo.callback(node.close)
        return node

    def _connect(self) -> None:
        lines = ["link add br0 type bridge", "link set br0 up"]
        for node in (*self.nodes, self.client):
            lines.append(f"link add {node.cable.port} type veth peer name eth0 netns {node.pid}")
            lines.append(f"link set {node.cable.port} master br0 up")
            names = self._names if isinstance(self._names, Names) else self._names.get(node.name, Names.GOOD)
            node.write_hosts(self.hosts_file(node, names))
        command = ["nsenter", "-t", str(self._switch.pid), "-n", "ip", "-batch", "-"]
        subprocess.run(command, input="\n".join(lines), text=True, check=True, timeout=60)
        for node in (*self.nodes, self.client):
            node.join()

    def _write_enter(self) -> None:
        for node in (*self.nodes, self.client):
            (node.folder / "enter").write_text(" ".join(node.enter_options()))
        script = self.folder / "enter"
        script.write_text(_ENTER.replace("FOLDER", str(self.folder)))
        script.chmod(0o755)
