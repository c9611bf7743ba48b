"""This machine's network as facts: interfaces, addresses, the default route, and what its own name resolves to."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import shutil
import socket
import struct
from dataclasses import dataclass

from distdiag.node import machine

# include/uapi/linux/sockios.h and if.h
_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFNETMASK, _SIOCGIFMTU, _SIOCGIFHWADDR = 0x8912, 0x8913, 0x891B, 0x8921, 0x8927
_UP, _LOOPBACK = 0x1, 0x8
_ENTRY_BYTES = 40
"""sizeof(struct ifreq) on 64-bit Linux."""
_ROUTE_UP = 0x1


@dataclass(frozen=True)
class Interface:
    """One network interface with its addresses, such as "10.0.0.1/16"; `virtual`: made by a container or VM host."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    loopback: bool
    virtual: bool
    mtu: int | None
    default_route: bool


@dataclass(frozen=True)
class Names:
    """What this machine's own names resolve to here; an error text instead where they do not."""

    host_name: str
    host_addresses: tuple[str, ...]
    host_error: str
    fqdn: str


@dataclass(frozen=True)
class Network:
    """All of it; `wanted_...` is what GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name, empty if unset."""

    interfaces: tuple[Interface, ...]
    names: Names
    ephemeral_ports: tuple[int, int] | None
    wanted_gloo: str
    wanted_nccl: str
    firewall_tools: tuple[str, ...]


def look() -> Network:
    """Read the network of this machine. Asks the resolver for our own name, which may take its time."""
    low_high = machine.read_text("/proc/sys/net/ipv4/ip_local_port_range").split()
    return Network(
        interfaces=interfaces(),
        names=_names(),
        ephemeral_ports=(int(low_high[0]), int(low_high[1])) if len(low_high) == 2 else None,
        wanted_gloo=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        wanted_nccl=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        firewall_tools=tuple(tool for tool in ("firewall-cmd", "ufw", "nft", "iptables") if shutil.which(tool)),
    )


def interfaces() -> tuple[Interface, ...]:
    """List the interfaces that have an address, in the kernel's order."""
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    default = _default_route_interface()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name, address, mask in _ipv4_addresses(control):
            addresses.setdefault(name, []).append(f"{address}/{mask}")
        for name, address in _ipv6_addresses():
            addresses.setdefault(name, []).append(address)
        links = {name: link(control, name) for name in addresses}
    return tuple(
        Interface(
            name=name,
            addresses=tuple(found),
            up=bool(links[name].flags & _UP),
            loopback=bool(links[name].flags & _LOOPBACK),
            virtual=_is_virtual(name),
            mtu=links[name].mtu,
            default_route=name == default,
        )
        for name, found in addresses.items()
        if found
    )


def resolve(name: str) -> tuple[tuple[str, ...], str]:
    """Ask this machine's resolver for a name: the addresses in its order, or why there are none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found)), ""


def route_to(address: str) -> str:
    """Return what the kernel says of the way to an address, by `ip route get`; empty where there is no such tool."""
    from distdiag.node import run

    try:
        done = run.run(["ip", "route", "get", address], timeout_s=2.0)
    except run.CannotRun:
        return ""
    said = (done.stdout or done.stderr).decode("utf-8", "replace").strip()
    return " ".join(said.split())[:200]


def is_address(text: str) -> bool:
    """Tell an address from a name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Tell 127.0.0.0/8 and ::1."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def interface_of(address: str) -> str | None:
    """Name the interface that has this address."""
    plain = address.partition("%")[0]
    for interface in interfaces():
        if any(entry.partition("/")[0] == plain for entry in interface.addresses):
            return interface.name
    return None


def _names() -> Names:
    name = socket.gethostname()
    addresses, error = resolve(name)
    return Names(name, addresses, error, socket.getfqdn())


def _ipv4_addresses(control: socket.socket) -> list[tuple[str, str, int]]:
    buffer = array.array("B", bytes(_ENTRY_BYTES * 256))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    length = struct.unpack("iP", fcntl.ioctl(control.fileno(), _SIOCGIFCONF, request))[0]
    found = []
    for start in range(0, length, _ENTRY_BYTES):
        entry = buffer[start : start + _ENTRY_BYTES].tobytes()
        label = entry[:16].rstrip(b"\0").split(b"\0")[0]
        mask = fcntl.ioctl(control.fileno(), _SIOCGIFNETMASK, entry)[20:24]
        name = label.decode().partition(":")[0]  # eth0:1 is an address of eth0
        found.append((name, socket.inet_ntoa(entry[20:24]), bin(int.from_bytes(mask, "big")).count("1")))
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Columns of /proc/net/if_inet6: address, index, prefix length, scope, flags, name. Without link-local ones."""
    found = []
    for line in machine.read_text("/proc/net/if_inet6").splitlines():
        columns = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(columns[0]))
        if not address.is_link_local:
            found.append((columns[5], f"{address}/{int(columns[2], 16)}"))
    return found


@dataclass(frozen=True)
class Link:
    """What the kernel says of an interface: flags (IFF_..., if.h), MTU, kind of hardware (ARPHRD_..., if_arp.h).

    Asked by ioctl and not read from /sys, which may belong to another network namespace than ours.
    """

    flags: int
    mtu: int | None
    hardware: int


def link(control: socket.socket, name: str) -> Link:
    """Ask for an interface; all is zero if it is gone."""
    flags, mtu = _ask(control, _SIOCGIFFLAGS, "H", name), _ask(control, _SIOCGIFMTU, "i", name)
    return Link(flags=flags or 0, mtu=mtu, hardware=_ask(control, _SIOCGIFHWADDR, "H", name) or 0)


def _ask(control: socket.socket, what: int, kind: str, name: str) -> int | None:
    """Ask for one number of an interface (struct ifreq: 16 bytes of name, then the answer)."""
    try:
        answer = fcntl.ioctl(control.fileno(), what, struct.pack("16s24x", name.encode()[:15]))
    except OSError:  # gone meanwhile
        return None
    return int(struct.unpack_from(kind, answer, 16)[0])


def _default_route_interface() -> str:
    for line in machine.read_text("/proc/net/route").splitlines()[1:]:
        columns = line.split()
        if columns[1] == "00000000" and int(columns[3], 16) & _ROUTE_UP:
            return columns[0]
    return ""


def _is_virtual(name: str) -> bool:
    """Tell bridges of container engines and VM hosts: they exist on every node, with the same address on each."""
    prefixes = ("docker", "br-", "virbr", "cni", "flannel", "cali", "lxc", "lxd", "podman", "vmnet", "vboxnet", "kube")
    return name.startswith(prefixes)
