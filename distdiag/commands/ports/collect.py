"""Facts of one node: interfaces, listeners, firewall; and its probes of other hosts."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

from distdiag.agent import port_scan, rendezvous
from distdiag.agent.port_scan import PortResult  # noqa: TC001
from distdiag.facts import machine, programs
from distdiag.facts.network import interfaces as network
from distdiag.facts.network.interfaces import Network  # noqa: TC001 - these are decoded by their annotations
from distdiag.facts.network.listeners import Listener, listeners
from distdiag.facts.network.nics import IbPort, ib_ports, nics
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_VARIABLES = (
    *("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "NCCL_CONF_FILE"),
)
_FIREWALLS = {"firewalld": "firewall-cmd", "ufw": "ufw", "nftables": "nft", "iptables": "iptables"}
"""Service -> the program that changes its rules."""
_BATCH = 256


@record
class Ask:
    """Probe other hosts: (host, port); `timeout_s`: of each."""

    targets: Sequence[tuple[str, int]]
    timeout_s: float


@record
class NodePorts:
    """One node. `variables` include those set in nccl.conf; `master`: addresses of MASTER_ADDR here.

    `firewalls`: running services, as far as known without root.
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


@record
class ScanBatch:
    """Some probed ports."""

    results: tuple[PortResult, ...]


def facts() -> NodePorts:
    """Read this node's network."""
    look = network.look()
    firewalls = _firewalls()
    tools = [tool for name in firewalls if (tool := _FIREWALLS[name]) in look.firewall_tools]
    variables = {**_configured(), **{name: os.environ[name] for name in _VARIABLES if name in os.environ}}
    master = variables.get("MASTER_ADDR", "")
    return NodePorts(
        host=machine.host_name(),
        # With interfaces without addresses, and the active firewall's tool first.
        network=replace(look, interfaces=nics(), firewall_tools=tuple(dict.fromkeys([*tools, *look.firewall_tools]))),
        ib_ports=ib_ports(),
        variables=variables,
        master=network.resolve(master)[0] if master else (),
        listeners=listeners(),
        lowest_free=_lowest_free(),
        firewalls=firewalls,
        container="/.dockerenv" if os.path.exists("/.dockerenv") else "",
    )


def _configured() -> dict[str, str]:
    """Return the variables in NCCL's files: /etc/nccl.conf, overridden by ~/.nccl.conf or $NCCL_CONF_FILE."""
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    found = {}
    for path in ("/etc/nccl.conf", own):
        for line in machine.read_text(path).splitlines():
            name, is_set, value = line.partition("#")[0].strip().partition("=")
            if is_set and name in _VARIABLES:
                found[name] = value
    return found


def _lowest_free() -> int:
    """Return the first free port from torch's default on; 0 if all near it are taken."""
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


def more(ask: Ask, tell: Callable[[ScanBatch], None]) -> None:
    """Probe other hosts."""
    batch: list[PortResult] = []
    for result in port_scan.scan([(host, port) for host, port in ask.targets], timeout_s=ask.timeout_s):
        batch.append(result)
        if len(batch) >= _BATCH:
            tell(ScanBatch(tuple(batch)))
            batch = []
    tell(ScanBatch(tuple(batch)))
