"""PCIe paths between GPUs and RDMA cards: redirection by bridges, translation by IOMMUs. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import counted
from distdiag.fold import by_key
from distdiag.record import record
from distdiag.report import Level, Where, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts.host.pcie_types import Pcie
    from distdiag.report import Finding


@record
class PcieNode:
    """A node, its PCIe facts, and whether an RDMA card is in use."""

    host: str
    pcie: Pcie | None
    has_rdma: bool


def findings(command: str, nodes: Sequence[PcieNode]) -> list[Finding]:
    """Return bridges that redirect peer-to-peer traffic and IOMMUs that translate it; virtual machines are skipped.

    If NVSwitches connect all GPUs and no RDMA card is in use, that path is idle: the level is info.
    """
    bare = [(node.pcie, node) for node in nodes if node.pcie is not None and node.pcie.virtual is False]
    bridges = by_key((pcie.redirecting, node) for pcie, node in bare if pcie.redirecting)
    types = by_key((pcie.translated, node) for pcie, node in bare if pcie.translated)
    return [
        *(_of_bridges(command, addresses, those) for addresses, those in bridges.items()),
        *(_found("iommu", command, those, type=type_) for type_, those in types.items()),
    ]


def _of_bridges(command: str, bridges: tuple[str, ...], nodes: Sequence[PcieNode]) -> Finding:
    made = _found("acs", command, nodes, bridges=counted(len(bridges), "PCIe bridge"))
    assert made.fix is not None
    turn_off = tuple(f"sudo setpci -s {quoted(bridge)} ECAP_ACS+0x6.w=0000" for bridge in bridges)
    evidence = tuple(f"{bridge}: ACSCtl has ReqRedir+" for bridge in bridges)
    return replace(made, evidence=evidence, fix=replace(made.fix, commands=turn_off))


def _found(row: str, command: str, nodes: Sequence[PcieNode], **words: object) -> Finding:
    hosts = tuple(dict.fromkeys(node.host for node in nodes))
    spared = all(node.pcie and node.pcie.nvswitches and not node.has_rdma for node in nodes)
    level = Level.INFO if spared else Level.WARN
    return finding(row, {"command": command, "hosts": fold(hosts), **words}, level=level, where=Where(hosts=hosts))
