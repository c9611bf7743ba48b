"""Facts of one node: its interfaces, who listens, its firewall; and what it finds when it tries others."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace

from distdiag.agent import port_scan, rendezvous
from distdiag.agent.port_scan import PortResult  # noqa: TC001
from distdiag.facts import machine, network, programs
from distdiag.facts.listeners import Listener, listeners
from distdiag.facts.network import Network  # noqa: TC001 - these are decoded by their annotations
from distdiag.facts.nics import IbPort, ib_ports, nics

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_VARIABLES = (
    *("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "NCCL_CONF_FILE"),
)
_FIREWALLS = {"firewalld": "firewall-cmd", "ufw": "ufw", "nftables": "nft", "iptables": "iptables"}
"""Service -> the program that changes its rules."""
_BATCH = 256


@dataclass(frozen=True)
class NodePorts:
    """One node. `variables` include what nccl.conf sets; `master`: what MASTER_ADDR resolves to here.

    `firewalls`: services that run, as far as that can be known without root.
    """

    host: str
    network: Network
    ib_ports: tuple[IbPort, ...]
    variables: dict[str, str]
    master: tuple[str, ...]
    listeners: tuple[Listener, ...]
    lowest_free: int
    firewalls: tuple[str, ...]
    container: str


@dataclass(frozen=True)
class ScanBatch:
    """Some of the ports that were tried."""

    results: tuple[PortResult, ...]


def facts(ask: dict[str, Any]) -> NodePorts:
    """Look at this node's network. {"listeners": whether they are wanted}"""
    look = network.look()
    firewalls = _firewalls()
    tools = [tool for name in firewalls if (tool := _FIREWALLS[name]) in look.firewall_tools]
    variables = {**_configured(), **{name: os.environ[name] for name in _VARIABLES if name in os.environ}}
    master = variables.get("MASTER_ADDR", "")
    return NodePorts(
        host=machine.host_name(),
        # The interfaces without an address too; and of the tools, that of the active firewall first.
        network=replace(look, interfaces=nics(), firewall_tools=tuple(dict.fromkeys([*tools, *look.firewall_tools]))),
        ib_ports=ib_ports(),
        variables=variables,
        master=network.resolve(master)[0] if master else (),
        listeners=listeners() if ask["listeners"] else (),
        lowest_free=_lowest_free(),
        firewalls=firewalls,
        container="/.dockerenv" if os.path.exists("/.dockerenv") else "",
    )


def _configured() -> dict[str, str]:
    """Return what NCCL's own files set, the weaker first: /etc/nccl.conf, then ~/.nccl.conf or $NCCL_CONF_FILE."""
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    found = {}
    for path in ("/etc/nccl.conf", own):
        for line in machine.read_text(path).splitlines():
            name, is_set, value = line.partition("#")[0].strip().partition("=")
            if is_set and name in _VARIABLES:
                found[name] = value
    return found


def _lowest_free() -> int:
    """Return a port from torch's usual one on that can be listened at; 0 if there is none near."""
    for port in range(29500, 29600):
        try:
            rendezvous.listen(port).close()
        except OSError:
            continue
        return port
    return 0


def _firewalls() -> tuple[str, ...]:
    active = []
    if shutil.which("systemctl"):
        done = programs.run(["systemctl", "is-active", *_FIREWALLS], timeout_s=2.0)
        states = done.stdout.decode("ascii", "replace").split()
        active = [name for name, state in zip(_FIREWALLS, states) if state == "active"]
    if "ENABLED=yes" in machine.read_text("/etc/ufw/ufw.conf") and "ufw" not in active:
        active.append("ufw")
    return tuple(active)


def more(ask: dict[str, Any], tell: Callable[[ScanBatch], None]) -> None:
    """Try others. {"targets": [[host, port]...], "timeout_s": longest time for an answer}"""
    batch: list[PortResult] = []
    for result in port_scan.scan([(host, port) for host, port in ask["targets"]], timeout_s=ask["timeout_s"]):
        batch.append(result)
        if len(batch) >= _BATCH:
            tell(ScanBatch(tuple(batch)))
            batch = []
    tell(ScanBatch(tuple(batch)))
