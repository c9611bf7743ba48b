"""Network interfaces as described by the kernel, in the order seen by NCCL and Gloo; InfiniBand ports.

Sources: getifaddrs(3) by way of ioctl and /proc/net/if_inet6; /sys/class/net and /sys/class/infiniband of the kernel's
documentation (Documentation/ABI).
"""

from __future__ import annotations

import array
import fcntl
import glob
import ipaddress
import os
import socket
import struct

from distdiag.facts import machine
from distdiag.record import record

# include/uapi/linux/sockios.h
_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFNETMASK, _SIOCGIFMTU, _SIOCGIFHWADDR = 0x8912, 0x8913, 0x891B, 0x8921, 0x8927
_ENTRY_BYTES = 40
"""sizeof(struct ifreq) on 64-bit Linux."""
_ROUTE_UP = 0x1
_ARPHRD = {1: "ethernet", 32: "infiniband", 772: "loopback", 65534: "tunnel", 768: "tunnel", 776: "tunnel"}
"""include/uapi/linux/if_arp.h."""
_UP, _RUNNING = 0x1, 0x40  # include/uapi/linux/if.h
_SIGNS = (("bridge", "bridge"), ("bonding", "bond"), ("tun_flags", "tunnel"), ("wireless", "wireless"))
"""Entries of an interface's directory in /sys, and the kind that each reveals."""
_NAMES = {
    "bridge": ("docker", "br-", "virbr", "cni", "podman", "lxcbr", "lxdbr", "kube"),
    "veth": ("veth", "cali", "lxc"),
    "tunnel": ("tun", "tap", "wg", "tailscale", "flannel", "vxlan", "utun"),
    "virtual": ("vmnet", "vboxnet"),
}
INTERNAL = ("bridge", "veth", "tunnel", "virtual")
"""Kinds that mostly do not reach other machines, or only by a detour."""


@record
class Nic:
    """One interface. `kind`: ethernet, infiniband, bridge, bond, vlan, veth, tunnel, wireless, loopback, or virtual.

    `speed_bits_per_s`: None if the driver does not report it; `running`: IFF_RUNNING: up, and with a carrier.
    `addresses` as "10.0.0.1/16", IPv4 first, without link-local ones.
    """

    name: str
    kind: str
    addresses: tuple[str, ...]
    up: bool
    running: bool
    mtu: int | None
    speed_bits_per_s: int | None
    default_route: bool

    @property
    def loopback(self) -> bool:
        """Whether it is a loopback interface."""
        return self.kind == "loopback"

    @property
    def virtual(self) -> bool:
        """Whether it was created by a container engine, a VM host or a tunnel."""
        return self.kind in INTERNAL

    @property
    def plain_addresses(self) -> tuple[str, ...]:
        """Its addresses without the prefix length: "10.0.0.1"."""
        return tuple(entry.partition("/")[0] for entry in self.addresses)


@record
class IbPort:
    """One port of an InfiniBand, RoCE or EFA device; `state` and `physical` in the kernel's words."""

    device: str
    port: int
    state: str
    physical: str
    link: str
    rate_bits_per_s: int | None
    netdevs: tuple[str, ...]


def nics() -> tuple[Nic, ...]:
    """List all interfaces, in the kernel's order."""
    known, default = addresses(), _default_route_interface()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        return tuple(
            _nic(control, number, name, known.get(name, ()), is_default=name == default)
            for number, name in socket.if_nameindex()
        )


def addresses() -> dict[str, tuple[str, ...]]:
    """List the addresses of each interface, IPv4 first; without interfaces that have none."""
    found: dict[str, list[str]] = {}
    for name, address in [*_ipv4_addresses(), *_ipv6_addresses()]:
        found.setdefault(name, []).append(address)
    return {name: tuple(own) for name, own in found.items()}


def _nic(control: socket.socket, number: int, name: str, own: tuple[str, ...], *, is_default: bool) -> Nic:
    folder = f"/sys/class/net/{name}"
    # /sys may be another network namespace's, with an interface of the same name, hence the queries by ioctl.
    ours = machine.read_text(f"{folder}/ifindex").strip() == str(number)
    flags = _ask(control, _SIOCGIFFLAGS, "H", name) or 0
    return Nic(
        name=name,
        kind=_kind(name, _ask(control, _SIOCGIFHWADDR, "H", name) or 0, folder if ours else ""),
        addresses=own,
        up=bool(flags & _UP),
        running=bool(flags & _RUNNING),
        mtu=_ask(control, _SIOCGIFMTU, "i", name),
        speed_bits_per_s=_speed(folder) if ours else None,
        default_route=is_default,
    )


def _ask(control: socket.socket, what: int, kind: str, name: str) -> int | None:
    """Query one number of an interface (struct ifreq: 16 bytes of name, then the answer); None if it was removed."""
    try:
        answer = fcntl.ioctl(control.fileno(), what, struct.pack("16s24x", name.encode()[:15]))
    except OSError:
        return None
    return int(struct.unpack_from(kind, answer, 16)[0])


def _ipv4_addresses() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_ENTRY_BYTES * 256))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        length = struct.unpack("iP", fcntl.ioctl(control.fileno(), _SIOCGIFCONF, request))[0]
        for start in range(0, length, _ENTRY_BYTES):
            entry = buffer[start : start + _ENTRY_BYTES].tobytes()
            label = entry[:16].rstrip(b"\0").split(b"\0")[0]
            mask = int.from_bytes(fcntl.ioctl(control.fileno(), _SIOCGIFNETMASK, entry)[20:24], "big")
            name = label.decode().partition(":")[0]  # eth0:1 is an address of eth0
            found.append((name, f"{socket.inet_ntoa(entry[20:24])}/{bin(mask).count('1')}"))
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


def _default_route_interface() -> str:
    for line in machine.read_text("/proc/net/route").splitlines()[1:]:
        columns = line.split()
        if columns[1] == "00000000" and int(columns[3], 16) & _ROUTE_UP:
            return columns[0]
    return ""


def _speed(folder: str) -> int | None:
    """Read Mb/s; -1 and an error mean unknown to the driver."""
    text = machine.read_text(f"{folder}/speed").strip()
    return int(text) * 10**6 if text.isdigit() and int(text) > 0 else None


def _kind(name: str, hardware: int, folder: str) -> str:
    """Return the kind of an interface; `folder`: its directory in /sys, empty if not visible."""
    for sign, kind in _SIGNS:
        if folder and os.path.exists(f"{folder}/{sign}"):
            return kind
    devtype = _devtype(folder) if folder else ""
    plain = _ARPHRD.get(hardware, "virtual")
    if devtype or plain != "ethernet":
        return devtype or plain
    if not folder:
        return _by_name(name)
    if "/devices/virtual/" not in os.path.realpath(folder):
        return plain
    return "veth" if _is_pair(folder) else _by_name(name) if _by_name(name) != "ethernet" else "virtual"


def _by_name(name: str) -> str:
    return next((kind for kind, names in _NAMES.items() if name.startswith(names)), "ethernet")


def _devtype(folder: str) -> str:
    """Read the driver's DEVTYPE: vlan, vxlan, wlan, bridge, bond, wireguard."""
    lines = machine.read_text(f"{folder}/uevent").splitlines()
    devtype = next((line.partition("=")[2] for line in lines if line.startswith("DEVTYPE=")), "")
    return {"wlan": "wireless", "vlan": "vlan", "vxlan": "tunnel", "wireguard": "tunnel"}.get(devtype, "")


def _is_pair(folder: str) -> bool:
    """Return whether it is an end of a veth pair: the other end has another index."""
    own, other = machine.read_text(f"{folder}/ifindex").strip(), machine.read_text(f"{folder}/iflink").strip()
    return own != other


def ib_ports() -> tuple[IbPort, ...]:
    """List the ports of RDMA devices; empty without any."""
    found = []
    for folder in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        device, number = folder.split("/")[4], folder.rpartition("/")[2]
        rate = machine.read_text(f"{folder}/rate").split()
        names = (machine.read_text(path).strip() for path in sorted(glob.glob(f"{folder}/gid_attrs/ndevs/*")))
        found.append(
            IbPort(
                device=device,
                port=int(number),
                state=_word(machine.read_text(f"{folder}/state")),
                physical=_word(machine.read_text(f"{folder}/phys_state")),
                link=machine.read_text(f"{folder}/link_layer").strip(),
                rate_bits_per_s=int(float(rate[0]) * 10**9) if rate and rate[0].replace(".", "").isdigit() else None,
                netdevs=tuple(dict.fromkeys(name for name in names if name)),
            )
        )
    return tuple(found)


def _word(text: str) -> str:
    return text.rpartition(":")[2].strip()
