"""PCIe paths between GPUs and RDMA cards: redirection by bridges, translation by IOMMUs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.diagnosis.wording import counted
from distdiag.ids import Shared
from distdiag.report import Finding, Fix, Level, Where, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts.pcie_types import Pcie

_BEYOND = "NVLink traffic does not take this path; traffic between GPUs and RDMA cards does."


@dataclass(frozen=True)
class PcieNode:
    """A node, its PCIe facts, and whether an RDMA card is in use."""

    host: str
    pcie: Pcie | None
    has_rdma: bool


def findings(command: str, nodes: Sequence[PcieNode]) -> list[Finding]:
    """Return bridges that redirect peer-to-peer traffic and IOMMUs that translate it; virtual machines are skipped.

    If NVSwitches connect all GPUs and no RDMA card is in use, that path is idle: the level is info.
    """
    bridges: dict[tuple[str, ...], list[PcieNode]] = {}
    types: dict[str, list[PcieNode]] = {}
    for node in nodes:
        pcie = node.pcie
        if pcie is not None and pcie.virtual is False:
            if pcie.redirecting:
                bridges.setdefault(pcie.redirecting, []).append(node)
            if pcie.translated:
                types.setdefault(pcie.translated, []).append(node)
    return [
        *(_redirected(command, addresses, those) for addresses, those in bridges.items()),
        *(_translated(command, type_, those) for type_, those in types.items()),
    ]


def _redirected(command: str, bridges: tuple[str, ...], nodes: Sequence[PcieNode]) -> Finding:
    return Finding(
        id=Shared.ACS.of(command),
        level=_level(nodes),
        title=f"ACS is on at {counted(len(bridges), 'PCIe bridge')} above the GPUs of {_hosts(nodes)}: "
        "peer-to-peer traffic goes through the CPU",
        detail=f"What GPUs and RDMA cards send each other over PCIe takes that path, which is slow or hangs. {_BEYOND}",
        where=Where(hosts=_names(nodes)),
        evidence=tuple(f"{bridge}: ACSCtl has ReqRedir+" for bridge in bridges),
        fix=Fix(
            text="turn it off until the next boot; permanently, turn IO virtualization (VT-d, AMD-Vi) or ACS off in "
            "the BIOS; not on a host that passes its GPUs to virtual machines",
            commands=tuple(f"sudo setpci -s {quoted(bridge)} ECAP_ACS+0x6.w=0000" for bridge in bridges),
        ),
    )


def _translated(command: str, type_: str, nodes: Sequence[PcieNode]) -> Finding:
    return Finding(
        id=Shared.IOMMU.of(command),
        level=_level(nodes),
        title=f"the IOMMU of {_hosts(nodes)} translates GPU addresses (domain type {type_})",
        detail="On bare metal CUDA does not support PCIe peer-to-peer copies in this mode: they are slow, hang or lose "
        f"data. {_BEYOND}",
        where=Where(hosts=_names(nodes)),
        fix=Fix(
            text="boot with iommu=pt, or turn IO virtualization (VT-d, AMD-Vi) off in the BIOS; until then make NCCL "
            "avoid copies between GPUs over PCIe",
            commands=("export NCCL_P2P_LEVEL=NVL",),
        ),
    )


def _level(nodes: Sequence[PcieNode]) -> Level:
    spared = all(node.pcie and node.pcie.nvswitches and not node.has_rdma for node in nodes)
    return Level.INFO if spared else Level.WARN


def _names(nodes: Sequence[PcieNode]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.host for node in nodes))


def _hosts(nodes: Sequence[PcieNode]) -> str:
    return fold(_names(nodes))
