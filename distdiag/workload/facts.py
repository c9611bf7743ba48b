"""What a node told of itself, see distdiag.workload.collect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpus:
    """NVIDIA GPUs here. `visible` is None if the driver did not tell; `error` says why."""

    driver_present: bool
    visible: int | None
    error: str = ""


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
