"""What keeps GPUs from reaching each other over PCIe, and is seen before any rank starts. Pure.

Sources: NVIDIA, NCCL user guide, "Troubleshooting", PCI Access Control Services (ACS): IO virtualization redirects
peer-to-peer traffic to the CPU's root complex, "a significant performance reduction or even a hang", and virtual
machines need ACS; NVIDIA, CUDA C++ programming guide, "IOMMU on Linux": peer-to-peer copies over PCIe are not supported
on bare metal with an IOMMU, and may lose data. Root ports alone, with ACSCtl 0x001d: a hang (NVIDIA/nccl#2079).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.report import Finding, Fix, Level, Where, quoted
from distdiag.workload.model import Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.workload.model import Request
    from distdiag.workload.record import Place

_BEYOND = "Traffic over NVLink does not go this way; that between GPUs and RDMA cards does."


def pcie_findings(request: Request, places: Sequence[Place]) -> list[Finding]:
    """Say where bridges redirect what GPUs send each other, or an IOMMU translates it; never of virtual machines.

    Where all GPUs have NVSwitches between them and no RDMA card is there, nothing needs that way: a remark.
    """
    if request.device is Device.CPU:
        return []
    bridges: dict[tuple[str, ...], list[Place]] = {}
    types: dict[str, list[Place]] = {}
    for place in places:
        pcie = place.facts.pcie
        if pcie is not None and pcie.virtual is False:
            if pcie.redirecting:
                bridges.setdefault(pcie.redirecting, []).append(place)
            if pcie.translated:
                types.setdefault(pcie.translated, []).append(place)
    return [
        *(_redirected(request, addresses, those) for addresses, those in bridges.items()),
        *(_translated(request, type_, those) for type_, those in types.items()),
    ]


def _redirected(request: Request, bridges: tuple[str, ...], places: Sequence[Place]) -> Finding:
    return Finding(
        id=f"{request.command}.acs",
        level=_level(places),
        title=f"ACS is on at {len(bridges)} PCIe bridge{'s' * (len(bridges) > 1)} above the GPUs of {_hosts(places)}: "
        "what GPUs and RDMA cards send each other takes the way through the CPU",
        detail=f"That is slow, or hangs. {_BEYOND}",
        where=Where(hosts=_names(places)),
        evidence=tuple(f"{bridge}: ACSCtl has ReqRedir+" for bridge in bridges),
        fix=Fix(
            text="turn it off there until the next boot; for good, turn IO virtualization (VT-d, AMD-Vi) or ACS off in "
            "the BIOS; not on a host that gives its GPUs to virtual machines",
            commands=tuple(f"sudo setpci -s {quoted(bridge)} ECAP_ACS+0x6.w=0000" for bridge in bridges),
        ),
    )


def _translated(request: Request, type_: str, places: Sequence[Place]) -> Finding:
    return Finding(
        id=f"{request.command}.iommu",
        level=_level(places),
        title=f"the IOMMU of {_hosts(places)} translates the addresses of its GPUs (domain type {type_})",
        detail="On bare metal CUDA does not support peer-to-peer copies over PCIe in that: they are slow, hang or lose "
        f"data. {_BEYOND}",
        where=Where(hosts=_names(places)),
        fix=Fix(
            text="boot with iommu=pt, or turn IO virtualization (VT-d, AMD-Vi) off in the BIOS; until then NCCL can "
            "leave out copies between GPUs over PCIe",
            commands=("export NCCL_P2P_LEVEL=NVL",),
        ),
    )


def _level(places: Sequence[Place]) -> Level:
    known = [(place.facts, place.facts.pcie) for place in places]
    spared = all(pcie and pcie.nvswitches and facts.rdma_bits_per_s is None for facts, pcie in known)
    return Level.INFO if spared else Level.WARN


def _names(places: Sequence[Place]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.host for place in places))


def _hosts(places: Sequence[Place]) -> str:
    return fold(_names(places))
