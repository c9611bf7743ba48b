"""What distdiag.facts.pcie reads, typed; not in that module, which must load fast where ranks start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pcie:
    """How the GPUs of a node reach each other and its RDMA cards over PCIe.

    `redirecting` are bridges above them with ACS request redirect. `translated`: the type of an IOMMU domain that
    translates a GPU's addresses, "DMA-FQ"; empty where none does, or it is unknown. `virtual` is None where it is
    unknown whether this is a virtual machine.
    """

    gpus: tuple[str, ...]
    nvswitches: int
    virtual: bool | None
    redirecting: tuple[str, ...]
    translated: str
