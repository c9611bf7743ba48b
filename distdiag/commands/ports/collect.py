"""Facts of one node: its interfaces, who listens, its firewall; and what it finds when it tries others."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from distdiag.node import machine, network, rendezvous, run, scan
from distdiag.node.listeners import Listener, listeners
from distdiag.node.network import Names  # noqa: TC001 - these are decoded by their annotations
from distdiag.node.nics import IbPort, Nic, ib_ports, nics
from distdiag.node.scan import Tried  # noqa: TC001

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_VARIABLES = (
    *("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "NCCL_CONF_FILE"),
)
_SERVICES = ("firewalld", "ufw", "nftables", "iptables")
_BATCH = 256


@dataclass(frozen=True)
class Firewall:
    """What can be known of the firewall without root.

    `active`: services that run; `tools`: programs that change rules; `tables`: those that the kernel has loaded.
    """

    active: tuple[str, ...]
    tools: tuple[str, ...]
    tables: tuple[str, ...]


@dataclass(frozen=True)
class Ports:
    """One node. `variables` include what nccl.conf sets; `master`: what MASTER_ADDR resolves to here."""

    host: str
    root: bool
    nics: tuple[Nic, ...]
    ib_ports: tuple[IbPort, ...]
    names: Names
    variables: dict[str, str]
    master: tuple[str, ...]
    listeners: tuple[Listener, ...]
    ephemeral_ports: tuple[int, int] | None
    lowest_free: int
    firewall: Firewall
    container: str


@dataclass(frozen=True)
class Found:
    """Some of what was tried."""

    tried: tuple[Tried, ...]


def facts(ask: dict[str, Any]) -> Ports:
    """Look at this node's network. {"listeners": whether they are wanted}"""
    look = network.look()
    variables = {**_configured(), **{name: os.environ[name] for name in _VARIABLES if name in os.environ}}
    master = variables.get("MASTER_ADDR", "")
    return Ports(
        host=machine.host_name(),
        root=os.geteuid() == 0,
        nics=nics(),
        ib_ports=ib_ports(),
        names=look.names,
        variables=variables,
        master=network.resolve(master)[0] if master else (),
        listeners=listeners() if ask["listeners"] else (),
        ephemeral_ports=look.ephemeral_ports,
        lowest_free=_lowest_free(),
        firewall=_firewall(),
        container="/.dockerenv" if os.path.exists("/.dockerenv") else "",
    )


def _configured() -> dict[str, str]:
    """Read NCCL's own files, the weaker first: /etc/nccl.conf, then ~/.nccl.conf or $NCCL_CONF_FILE."""
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    found = {}
    for path in ("/etc/nccl.conf", own):
        for line in machine.read_text(path).splitlines():
            name, is_set, value = line.partition("#")[0].strip().partition("=")
            if is_set and name in _VARIABLES:
                found[name] = value
    return found


def _lowest_free() -> int:
    """Give a port from torch's usual one on that can be listened at; 0 if there is none near."""
    for port in range(29500, 29600):
        try:
            rendezvous.listen(port).close()
        except OSError:
            continue
        return port
    return 0


def _firewall() -> Firewall:
    active = []
    if shutil.which("systemctl"):
        done = run.run(["systemctl", "is-active", *_SERVICES], timeout_s=2.0)
        words = done.stdout.decode("ascii", "replace").split()
        active = [name for name, word in zip(_SERVICES, words) if word == "active"]
    if "ENABLED=yes" in machine.read_text("/etc/ufw/ufw.conf") and "ufw" not in active:
        active.append("ufw")
    tables = machine.read_text("/proc/net/ip_tables_names").split()
    tools = ("firewall-cmd", "ufw", "nft", "iptables")
    return Firewall(tuple(active), tuple(one for one in tools if shutil.which(one)), tuple(tables))


def more(ask: dict[str, Any], tell: Callable[[Found], None]) -> None:
    """Try others. {"targets": [[host, port]...], "timeout_s": longest time for an answer}"""
    batch: list[Tried] = []
    for one in scan.scan([(host, port) for host, port in ask["targets"]], timeout_s=ask["timeout_s"]):
        batch.append(one)
        if len(batch) >= _BATCH:
            tell(Found(tuple(batch)))
            batch = []
    tell(Found(tuple(batch)))
