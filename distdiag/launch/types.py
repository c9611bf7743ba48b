"""Request, node facts and rank results of commands that start ranks."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from distdiag.cluster.targets import Cluster
from distdiag.facts.host.pcie_types import Pcie  # noqa: TC001 - what is sent is decoded by its annotations
from distdiag.record import record
from distdiag.report import quoted

if TYPE_CHECKING:
    from distdiag.cluster.host_results import HostResult

MOST_RANKS = 4096
"""Per node: more is a typo, and each rank takes a hundred megabytes."""


class Backend(StrEnum):
    """The library that moves the data."""

    AUTO = "auto"
    NCCL = "nccl"
    GLOO = "gloo"


class Device(StrEnum):
    """The location of the data."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class Status(StrEnum):
    """A rank's result. LOST: contact with its node was lost. WAITING: it was waiting for another rank."""

    OK = "ok"
    FAILED = "failed"
    DIED = "died"
    MISSING = "missing"
    LOST = "lost"
    WAITING = "waiting"


@record(kw_only=True)
class Fault:
    """A real fault to inject into ranks, `option` as typed. `place`: its stage or row, if the kind has a choice."""

    option: str
    kind: str
    ranks: tuple[int, ...]
    place: str = ""


@record(kw_only=True)
class Request:
    """The options; `program` is how distdiag was called, for commands to paste."""

    command: ClassVar[str]
    """The subcommand; the prefix of its finding ids."""
    stages: ClassVar[tuple[str, ...]]
    """The stages of every rank, in order."""

    program: str = "distdiag"
    nproc: int | None = None
    backend: Backend = Backend.AUTO
    device: Device = Device.AUTO
    timeout_s: float = 30.0
    master_port: int = 0
    master_addr: str = ""
    ifname: str = ""
    nccl_debug: bool = False
    strict: bool = False
    cluster: Cluster = field(default_factory=Cluster)
    fault: Fault | None = None

    def own_options(self) -> dict[str, object]:
        """Return non-default options of this command alone, by name; None leaves an option out."""
        raise NotImplementedError

    def less(self) -> dict[str, str]:
        """Return options that send less data, for `again`."""
        raise NotImplementedError

    def pairs(self) -> str:
        """Return the command that tests pairs of the same ranks, to find the bad rank or link."""
        number = ["--nproc", str(self.nproc)] if self.nproc is not None else []
        where = [f"{name} {quoted(value)}" for name, value in self.cluster.typed()]
        return " ".join([self.program, "gpu-test", "--isolate", *where, *number])

    def again(self, *, extra: str = "", **changes: str) -> str:
        """Return the command that repeats this with other options: again(stall="120")."""
        typed: dict[str, object] = {
            "nproc": self.nproc,
            "backend": self.backend if self.backend is not Backend.AUTO else None,
            "device": self.device if self.device is not Device.AUTO else None,
            "stall": f"{self.timeout_s:g}" if self.timeout_s != Request.timeout_s else None,
            "master-addr": self.master_addr or None,
            "master-port": self.master_port or None,
            "ifname": self.ifname or None,
            "nccl-debug": "" if self.nccl_debug else None,
            "strict": "" if self.strict else None,
            **self.own_options(),
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        typed = {name: value for name, value in typed.items() if f"--{name} " not in extra}
        options = [
            f"--{name} {quoted(str(value)) if value != '' else ''}".rstrip()
            for name, value in typed.items()
            if value is not None
        ]
        where = [f"{name} {quoted(value)}" for name, value in self.cluster.typed()]
        return " ".join([f"{self.program} {self.command}", *where, *options, *([extra] if extra else [])])


@record(kw_only=True)
class Versions:
    """Versions reported by the ranks; None if absent, or no rank got to that point."""

    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    hip: str | None = None
    nccl: str | None = None


@record(kw_only=True)
class RankResult:
    """One row of the table."""

    rank: int
    local_rank: int
    host: str
    pid: int | None
    device: str | None
    device_name: str | None
    capability: str | None
    free_bytes: int | None
    total_bytes: int | None
    stage: str
    doing: str
    status: Status
    error: str | None
    elapsed_s: float


@record(kw_only=True)
class RunFacts:
    """The facts of a run, common to every command that starts ranks."""

    world_size: int
    backend: str
    device: str
    timeout_s: float
    versions: Versions
    ranks: tuple[RankResult, ...]
    outcome: str
    log_dirs: dict[str, str]
    """Host -> directory there, with --nccl-debug."""
    hosts: tuple[HostResult, ...]
    rendezvous: Rendezvous | None
    """None on one node: its ranks use 127.0.0.1."""


@record(kw_only=True)
class Rendezvous:
    """The ranks' rendezvous address, and each node's interface to it."""

    host: str
    address: str
    port: int
    interfaces: dict[str, str]
    paths_tried: int
    paths_open: int


@record
class Gpus:
    """NVIDIA GPUs here. `visible` is None if the driver did not answer; `error` is the reason."""

    driver_present: bool
    visible: int | None
    error: str = ""


@record
class NodeFacts:
    """The facts of a node before ranks start there."""

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
    """Total line rate of active InfiniBand, RoCE and EFA ports; None without any."""
    rdma_ports: dict[str, int] = field(default_factory=dict)
    """Number of active ports by link layer and rate: {"InfiniBand, 400 Gb/s": 8}."""
    pcie: Pcie | None = None
    """None with fewer than two NVIDIA GPUs."""
    nvidia_driver: str = ""
    """Version of the loaded kernel module; empty without one."""
    machine: str = ""
    """The machine's product name, in clouds the instance type: "p5.48xlarge"; empty if unknown."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables read by NCCL, Gloo and torch."""
    limits: dict[str, str] = field(default_factory=dict)
    """Soft limits by ulimit's letter: {"-n": "1024", "-l": "unlimited"}."""
    stale_variables: tuple[str, ...] = ()
    """Variables of a job that contradict this process's launcher: "WORLD_SIZE=7"."""
