"""Network interfaces as the kernel describes them, in the order in which NCCL and Gloo see them; InfiniBand ports.

Sources: getifaddrs(3) by way of ioctl and /proc/net/if_inet6; /sys/class/net and /sys/class/infiniband of the kernel's
documentation (Documentation/ABI).
"""

from __future__ import annotations

import glob
import os
import socket
from dataclasses import dataclass

from distdiag.node import machine, network

_ARPHRD = {1: "ethernet", 32: "infiniband", 772: "loopback", 65534: "tunnel", 768: "tunnel", 776: "tunnel"}
"""include/uapi/linux/if_arp.h."""
_UP, _RUNNING = 0x1, 0x40  # include/uapi/linux/if.h
_SIGNS = (("bridge", "bridge"), ("bonding", "bond"), ("tun_flags", "tunnel"), ("wireless", "wireless"))
"""What lies in an interface's directory in /sys."""
_NAMES = {
    "bridge": ("docker", "br-", "virbr", "cni", "podman", "lxcbr", "lxdbr", "kube-bridge"),
    "veth": ("veth", "cali", "lxc"),
    "tunnel": ("tun", "tap", "wg", "tailscale", "flannel", "vxlan", "utun"),
}


@dataclass(frozen=True)
class Nic:
    """One interface. `kind`: ethernet, infiniband, bridge, bond, vlan, veth, tunnel, wireless, loopback, or virtual.

    `speed_bits_per_s` is None where the driver does not tell; `running` is IFF_RUNNING: up, and with a carrier.
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


@dataclass(frozen=True)
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
    known = {one.name: one for one in network.interfaces()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        links = [(number, name, network.link(control, name)) for number, name in socket.if_nameindex()]
    return tuple(_nic(number, name, link, known.get(name)) for number, name, link in links)


def _nic(number: int, name: str, link: network.Link, known: network.Interface | None) -> Nic:
    folder = f"/sys/class/net/{name}"
    # /sys may be that of another network namespace, with an interface of the same name.
    ours = machine.read_text(f"{folder}/ifindex").strip() == str(number)
    return Nic(
        name=name,
        kind=_kind(name, link.hardware, folder if ours else ""),
        addresses=known.addresses if known is not None else (),
        up=bool(link.flags & _UP),
        running=bool(link.flags & _RUNNING),
        mtu=link.mtu,
        speed_bits_per_s=_speed(folder) if ours else None,
        default_route=known is not None and known.default_route,
    )


def _speed(folder: str) -> int | None:
    """Read Mb/s; -1 and an error mean that the driver does not know."""
    text = machine.read_text(f"{folder}/speed").strip()
    return int(text) * 10**6 if text.isdigit() and int(text) > 0 else None


def _kind(name: str, hardware: int, folder: str) -> str:
    """Tell the kind of an interface; `folder` is its own in /sys, empty if that cannot be seen."""
    for sign, kind in _SIGNS:
        if folder and os.path.exists(f"{folder}/{sign}"):
            return kind
    told = _devtype(folder) if folder else ""
    plain = _ARPHRD.get(hardware, "virtual")
    if told or plain != "ethernet":
        return told or plain
    if not folder:
        return _by_name(name)
    if "/devices/virtual/" not in os.path.realpath(folder):
        return plain
    return "veth" if _is_pair(folder) else _by_name(name) if _by_name(name) != "ethernet" else "virtual"


def _by_name(name: str) -> str:
    """Guess by the names that container engines and VM hosts use."""
    return next((kind for kind, names in _NAMES.items() if name.startswith(names)), "ethernet")


def _devtype(folder: str) -> str:
    """Read what the driver calls itself: vlan, vxlan, wlan, bridge, bond, wireguard."""
    lines = machine.read_text(f"{folder}/uevent").splitlines()
    told = next((line.partition("=")[2] for line in lines if line.startswith("DEVTYPE=")), "")
    return {"wlan": "wireless", "vlan": "vlan", "vxlan": "tunnel", "wireguard": "tunnel"}.get(told, "")


def _is_pair(folder: str) -> bool:
    """Tell the end of a veth pair: the other end has another index."""
    own, other = machine.read_text(f"{folder}/ifindex").strip(), machine.read_text(f"{folder}/iflink").strip()
    return own != other


def ib_ports() -> tuple[IbPort, ...]:
    """List the ports of RDMA devices; empty where there are none."""
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
    """Take the word of "4: ACTIVE"."""
    return text.rpartition(":")[2].strip()
