"""This machine's network: interfaces, addresses, the default route, and addresses of its own name."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket

from distdiag.facts import machine
from distdiag.facts.network import nics
from distdiag.facts.network.nics import Nic  # noqa: TC001 - what is sent is decoded by its annotations
from distdiag.record import record


@record
class Names:
    """The addresses of this machine's own names, as resolved here, or an error text."""

    host_name: str
    host_addresses: tuple[str, ...]
    host_error: str
    fqdn: str


@record
class Network:
    """The network; `wanted_...`: values of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, empty if unset.

    `firewall_tools`: programs that manage firewall rules, the active one first if known.
    """

    interfaces: tuple[Nic, ...]
    names: Names
    ephemeral_ports: tuple[int, int] | None
    wanted_gloo: str
    wanted_nccl: str
    firewall_tools: tuple[str, ...]
    is_root: bool = False


def look() -> Network:
    """Read the network of this machine. Resolves our own name, which may be slow."""
    low_high = machine.read_text("/proc/sys/net/ipv4/ip_local_port_range").split()
    return Network(
        interfaces=interfaces(),
        names=_names(),
        ephemeral_ports=(int(low_high[0]), int(low_high[1])) if len(low_high) == 2 else None,
        wanted_gloo=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        wanted_nccl=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        firewall_tools=tuple(tool for tool in ("firewall-cmd", "ufw", "nft", "iptables") if shutil.which(tool)),
        is_root=os.geteuid() == 0,
    )


def interfaces() -> tuple[Nic, ...]:
    """List the interfaces with an address, in the kernel's order."""
    return tuple(nic for nic in nics.nics() if nic.addresses)


def resolve(name: str) -> tuple[tuple[str, ...], str]:
    """Resolve a name on this machine: the addresses in the resolver's order, or the error."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found)), ""


def route_to(address: str) -> str:
    """Return the kernel's route to an address, by `ip route get`; empty without that tool."""
    from distdiag.facts import programs

    try:
        done = programs.run(["ip", "route", "get", address], timeout_s=2.0)
    except programs.CannotRun:
        return ""
    said = (done.stdout or done.stderr).decode("utf-8", "replace").strip()
    return " ".join(said.split())[:200]


def is_address(text: str) -> bool:
    """Return whether a text is an IP address rather than a name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def network_of(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the network of "address/prefix"; None if it is neither, as from a damaged answer of another node."""
    try:
        return ipaddress.ip_interface(entry).network
    except ValueError:
        return None


def is_loopback(address: str) -> bool:
    """Return whether an address is in 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address."""
    plain = address.partition("%")[0]
    found = nics.addresses().items()
    return next((name for name, own in found if any(entry.partition("/")[0] == plain for entry in own)), None)


def _names() -> Names:
    name = socket.gethostname()
    addresses, error = resolve(name)
    return Names(name, addresses, error, socket.getfqdn())
