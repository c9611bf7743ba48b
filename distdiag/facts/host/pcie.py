"""PCIe paths between GPUs and RDMA cards: bridges that redirect traffic to the CPU (ACS), and a translating IOMMU.

Sources: PCI Express Base Specification, "Access Control Services" and "Extended Capabilities"; the kernel's
Documentation/ABI/testing/sysfs-bus-pci and sysfs-kernel-iommu_groups. Only root may read beyond a device's 64th byte.
"""

from __future__ import annotations

import os
import re

from distdiag.facts import machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.facts.host.pcie_types import Pcie

_DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA, _DISPLAY, _NVSWITCH = "0x10de", "0x03", "0x0680"  # PCI vendor; classes of GPUs, and of other bridges
_EXTENDED, _LAST = 0x100, 0x1000
_ACS, _REQUEST_REDIRECT = 0x000D, 0x0004  # ACSCap's id; ReqRedir of ACSCtl


def look(root: str = "") -> Pcie | None:
    """Read this system, or a copy of its /sys and /proc below `root`.

    None with fewer than two NVIDIA GPUs.
    """
    gpus, nvswitches = _nvidia(root)
    if len(gpus) < 2:
        return None
    from distdiag.facts.host.pcie_types import Pcie  # lazy: dataclasses cost every other node a tenth of its start

    bridges = sorted({bridge for path in (*gpus.values(), *_rdma_cards(root)) for bridge in _above(path)})
    types = (machine.read_text(f"{path}/iommu_group/type").strip() for path in gpus.values())
    return Pcie(
        gpus=tuple(gpus),
        nvswitches=nvswitches,
        virtual=_is_virtual(machine.read_text(f"{root}/proc/cpuinfo")),
        redirecting=tuple(bridge for bridge in bridges if redirects(_config(f"{root}{_DEVICES}/{bridge}"))),
        translated=next((type_ for type_ in types if type_.startswith("DMA")), ""),
    )


def _nvidia(root: str) -> tuple[dict[str, str], int]:
    """Find the GPUs, address -> directory in /sys, and count the NVSwitches."""
    folder = f"{root}{_DEVICES}"
    gpus, nvswitches = {}, 0
    for address in sorted(machine.names_in(folder)):
        path = f"{folder}/{address}"
        class_ = machine.read_text(f"{path}/class")
        if class_.startswith((_DISPLAY, _NVSWITCH)) and machine.read_text(f"{path}/vendor").strip() == _NVIDIA:
            nvswitches += class_.startswith(_NVSWITCH)
            if class_.startswith(_DISPLAY):
                gpus[address] = path
    return gpus, nvswitches


def _rdma_cards(root: str) -> Iterator[str]:
    folder = f"{root}/sys/class/infiniband"
    for name in sorted(machine.names_in(folder)):
        yield f"{folder}/{name}/device"


def _above(path: str) -> list[str]:
    """List the bridges above a device: the other addresses in the name of its directory."""
    return [part for part in os.path.realpath(path).split("/") if _ADDRESS.fullmatch(part)][:-1]


def _config(path: str) -> bytes:
    try:
        with open(f"{path}/config", "rb") as file:
            return file.read(_LAST)
    except OSError:
        return b""


def redirects(config: bytes) -> bool:
    """Return whether a bridge redirects requests, by its configuration space; False also if that part is unreadable."""
    place = _EXTENDED
    for _ in range(64):  # the most that fit: a broken device may have a cycle
        if not _EXTENDED <= place <= len(config) - 8:
            return False
        header = int.from_bytes(config[place : place + 4], "little")
        if header & 0xFFFF == _ACS:
            return bool(int.from_bytes(config[place + 6 : place + 8], "little") & _REQUEST_REDIRECT)
        place = header >> 20
    return False


def _is_virtual(cpuinfo: str) -> bool | None:
    """Read the hypervisor flag, which only x86 has."""
    flags = next((line.split() for line in cpuinfo.splitlines() if line.startswith("flags")), None)
    return None if flags is None else "hypervisor" in flags
