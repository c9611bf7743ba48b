"""What a node told of itself, see distdiag.workload.collect."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpus:
    """NVIDIA GPUs here. `visible` is None if the driver did not tell; `error` says why."""

    driver_present: bool
    visible: int | None
    error: str = ""


@dataclass(frozen=True)
class Pcie:
    """How the GPUs of a node reach each other and its RDMA cards over PCIe.

    `redirecting` are bridges above them with ACS request redirect. `translated`: the type of an IOMMU domain that
    translates a GPU's addresses, "DMA-FQ"; empty where none does, or it is not to be known. `virtual` is None where
    nothing tells whether this is a virtual machine.
    """

    gpus: tuple[str, ...]
    nvswitches: int
    virtual: bool | None
    redirecting: tuple[str, ...]
    translated: str


@dataclass(frozen=True)
class NodeFacts:
    """What is to be known of a node before ranks start there."""

    host: str
    kernel: str
    python: str
    gpus: Gpus
    cuda_visible_devices: str | None
    memory_available_bytes: int | None
    shm_free_bytes: int | None
    shm_total_bytes: int | None
    cpus: int | None = None
    rdma_bits_per_s: int | None = None
    """Line rate of all active InfiniBand, RoCE and EFA ports; None where there are none."""
    rdma_ports: dict[str, int] = field(default_factory=dict)
    """How many active ports have which link layer and rate: {"InfiniBand, 400 Gb/s": 8}."""
    pcie: Pcie | None = None
    """None with fewer than two NVIDIA GPUs."""
    nvidia_driver: str = ""
    """The version of the loaded kernel module; empty if there is none."""
    machine: str = ""
    """What the maker calls this machine, clouds their kind of instance: "p5.48xlarge"; empty if it is not told."""
    variables: dict[str, str] = field(default_factory=dict)
    """What NCCL, Gloo and torch read from the environment."""
    limits: dict[str, str] = field(default_factory=dict)
    """Soft limits by ulimit's letter: {"-n": "1024", "-l": "unlimited"}."""
    said_otherwise: tuple[str, ...] = ()
    """Variables of a job that are not what the launcher of this process says: "WORLD_SIZE=7"."""
