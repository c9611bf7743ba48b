"""The type of distdiag.facts.host.pcie's facts, apart because that module must load fast where ranks start."""

from __future__ import annotations

from distdiag.record import record


@record
class Pcie:
    """PCIe paths between the GPUs of a node and to its RDMA cards.

    `redirecting`: bridges above them with ACS request redirect. `translated`: the type of an IOMMU domain that
    translates a GPU's addresses, "DMA-FQ"; empty if none or unknown. `virtual`: whether this is a virtual machine, None
    if unknown.
    """

    gpus: tuple[str, ...]
    nvswitches: int
    virtual: bool | None
    redirecting: tuple[str, ...]
    translated: str
