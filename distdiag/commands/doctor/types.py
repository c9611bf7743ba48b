"""What doctor is asked, what it has of one node, and its answer as --json prints it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.doctor.collect import (  # noqa: TC001
    Clock,
    Disks,
    Gpus,
    Jobs,
    KernelLog,
    NodeNetwork,
    Software,
    System,
)
from distdiag.commands.doctor.paths import NodePaths  # noqa: TC001
from distdiag.diagnosis.connectivity import PATH_IDS
from distdiag.report import Fix, Level  # noqa: TC001

COMMAND = "doctor"
CHECKS = {
    "memlock": "locked memory is limited, and RDMA needs to lock its buffers",
    "nofile": "few open files are allowed",
    "nproc": "few processes are allowed",
    "core": "a crash leaves no core file",
    "stack": "the stack is small",
    "address-space": "address space is limited",
    "somaxconn": "few connections may wait at a listening socket",
    "few-ports": "few ports for outgoing connections",
    "debug-switch": "a variable for debugging slows jobs down",
    "proxy": "a proxy catches connections between the nodes",
    "load": "other programs use the cores",
    "noexec": "compiled libraries cannot be loaded from a folder",
    "nfs-slots": "NFS requests wait in the node's own queue",
    "rebooted": "a node started while ranks were running elsewhere",
    "memory": "little memory is left",
    "memory-limit": "a cgroup limits memory",
    "cpu-limit": "a cgroup limits processors",
    "pids-limit": "a cgroup allows few more processes",
    "oom": "processes of this cgroup were ended for lack of memory",
    "shm": "/dev/shm is small or full",
    "disk-full": "a file system is full",
    "inodes": "a file system has no inodes left",
    "mount-hung": "a file system does not answer",
    "disk-read-only": "a file system that jobs write to is read-only",
    "disk-error": "a file system cannot be read",
    "clock": "a clock is off",
    "loopback-down": "lo is down",
    "nic-down": "an interface has no carrier",
    "no-network": "no interface is up",
    "nccl-ifname": "NCCL would use a wrong interface",
    "gloo-ifname": "Gloo would use a wrong interface",
    "name-slow": "the own host name is resolved slowly",
    "link-errors": "errors of a link grow",
    "link-flaps": "a link went down often",
    "retransmits": "TCP segments are lost",
    "rdma-down": "RDMA ports are not active",
    "acs": "PCIe bridges redirect peer-to-peer traffic to the CPU",
    "iommu": "the IOMMU translates GPU addresses",
    "python": "Python does not run",
    "torch": "torch is missing, or built without CUDA",
    "advisory": "a version with a known bug",
    "gpu.no-driver": "NVIDIA's driver is not loaded",
    "gpu.hangs": "the driver hangs",
    "gpu.missing": "a GPU does not respond",
    "gpu.driver-mismatch": "kernel module and libraries of the driver differ",
    "gpu.share": "fewer GPUs are visible than there are on the bus",
    "gpu.init": "the driver fails to initialize",
    "gpu.smi": "nvidia-smi does not answer",
    "gpu.reset-required": "the driver requests a reset of a GPU or the node",
    "gpu.remap-failed": "remapping a memory row failed",
    "gpu.remap-pending": "a memory row waits for a reset to be remapped",
    "gpu.ecc": "uncorrectable memory errors",
    "gpu.nvlink": "NVLinks are inactive",
    "gpu.nvlink-errors": "errors of NVLinks",
    "gpu.fabric": "the NVLink fabric is not ready",
    "gpu.throttled": "clocks of a GPU are held down",
    "gpu.pcie-width": "a GPU has fewer PCIe lanes than it could",
    "gpu.slower": "a GPU has a lower clock or power limit than the others of its model",
    "gpu.pcie-replays": "PCIe packets of a GPU were sent again",
    "gpu.imex": "no IMEX channel for NVLink between nodes",
    "gpu.busy": "a GPU is in use before the job starts",
    "gpu.persistence": "persistence mode is off",
    "gpu.power-limit": "the power of a GPU is limited",
    "job-running": "ranks of a job are running on a node",
    "log.unread": "the kernel log cannot be read",
    "log.xid": "Xid errors in the kernel log",
    "log.gpu-lost": "a GPU that fell off the bus, in the kernel log",
    "log.nvlink": "NVLink errors in the kernel log",
    "log.sxid": "fatal NVSwitch errors in the kernel log",
    "log.hardware": "hardware errors in the kernel log",
    "log.storage": "storage errors in the kernel log",
    "log.link": "links that went down, in the kernel log",
    "log.oom": "processes ended for lack of memory, in the kernel log",
    "differs.debug": "TORCH_DISTRIBUTED_DEBUG=DETAIL on some nodes only",
    "differs.nccl": "nodes differ in NCCL",
    "differs.torch": "nodes differ in torch",
    "differs.files": "nodes differ in torch's libraries though the version is the same",
    "differs.imex": "nodes differ in IMEX's list or NVLink clique",
    "differs.driver": "nodes differ in the NVIDIA driver",
    "differs.python": "nodes differ in Python",
    "differs.gpus": "nodes differ in their GPUs",
    "differs.rdma": "nodes differ in RDMA ports",
    "differs.network": "nodes differ in network interfaces",
    "differs.environment": "nodes differ in variables",
    "differs.limits": "nodes differ in limits",
    "differs.mounts": "nodes differ in file systems",
    "differs.memory": "nodes differ in memory",
    "differs.cpus": "nodes differ in processors",
    "differs.shm": "nodes differ in /dev/shm",
    "differs.system": "nodes differ in kernel, glibc, firmware or machine type",
    "incomplete": "not all facts of a node came",
    **{id_: words for id_, words in PATH_IDS.items() if id_.startswith("rank-ports-")},
    "paths-untested": "paths between nodes of which no result came",
    "mtu-black-hole": "large packets between nodes are lost",
    "link-slow": "a path between nodes has much less throughput than the others",
    "link-lossy": "a path between nodes loses packets",
    "no-answer": "a node did not answer when the paths were to be tested",
}
"""All findings by id, without the command's name, and what each means; --only and --ignore choose."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. `ignore`: (id, reason); `paths`: further folders whose file systems are looked at.

    `connects`: whether the nodes try the paths between them.
    """

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    ignore: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 20.0
    connects: bool = True
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeDoctor:
    """The facts of one node; a part that is None did not come: it is in `late` or `failed`, or all of `missing`."""

    host: str
    clock: Clock | None = None
    system: System | None = None
    disks: Disks | None = None
    network: NodeNetwork | None = None
    software: Software | None = None
    gpus: Gpus | None = None
    kernel: KernelLog | None = None
    jobs: Jobs | None = None
    paths: NodePaths | None = None
    late: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """What is wrong with one node, without its name: equal ones of several nodes become one finding.

    `subject` tells what of the node it is about: two symptoms of one id and subject are the same.
    """

    id: str
    level: Level
    title: str
    subject: str = ""
    detail: str = ""
    evidence: tuple[str, ...] = ()
    fix: Fix | None = None


@dataclass(frozen=True, kw_only=True)
class DifferenceRow:
    """A fact that is not the same on all nodes: value -> hosts. `outliers`: hosts without what most have, if any."""

    id: str
    fact: str
    values: dict[str, tuple[str, ...]]
    outliers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """One node: "fit", "fit with warnings", "not fit" or "unknown", and the ids of the findings that say so."""

    host: str
    fit: str
    findings: tuple[str, ...]
    facts: dict[str, str]
    clock_offset_s: float | None
    clock_uncertainty_s: float | None


@dataclass(frozen=True, kw_only=True)
class Silenced:
    """A finding that --ignore took out."""

    id: str
    title: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """The answer. `fit` of all nodes; `exclude`: nodes to leave out, as SLURM's --exclude takes them."""

    fit: str
    exclude: str
    nodes: tuple[NodeRow, ...]
    differences: tuple[DifferenceRow, ...]
    silenced: tuple[Silenced, ...]
    unchecked: tuple[str, ...]
