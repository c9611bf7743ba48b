"""Facts of one node for doctor, read in parallel, each part with its own deadline. Nothing is judged here."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import field
from functools import partial

from distdiag.facts import deadlines, machine
from distdiag.facts.cuda import driver, environment, torchfiles
from distdiag.facts.cuda.driver import Driver  # noqa: TC001
from distdiag.facts.cuda.places import Places
from distdiag.facts.gpu import gpu_health
from distdiag.facts.gpu.gpu_health import Health
from distdiag.facts.host import cgroups, file_systems, kernel_signs, pcie
from distdiag.facts.host.cgroups import Cgroup  # noqa: TC001 - these are decoded by their annotations
from distdiag.facts.host.file_systems import Space  # noqa: TC001
from distdiag.facts.host.kernel_signs import KernelLine  # noqa: TC001
from distdiag.facts.host.pcie_types import Pcie  # noqa: TC001
from distdiag.facts.logs.line_patterns import Patterns
from distdiag.facts.network import interfaces as network
from distdiag.facts.network import link_counters, nics
from distdiag.facts.network.interfaces import Names  # noqa: TC001
from distdiag.facts.network.link_counters import Counters  # noqa: TC001
from distdiag.facts.network.nics import IbPort, Nic  # noqa: TC001
from distdiag.jobs import collect as processes
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from distdiag.facts.logs.line_patterns import Rows

_LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
    "stack": resource.RLIMIT_STACK,
    "as": resource.RLIMIT_AS,
}
_IPC_LOCK = 14  # CAP_IPC_LOCK, linux/capability.h
_VARIABLES = (
    *("NCCL_", "RCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "UCX_", "FI_"),
    *("MASTER_ADDR", "MASTER_PORT", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"),
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_LONGEST_LIST = 2000
_IMEX_NODES = "/etc/nvidia-imex/nodes_config.cfg"
_MOUNT_S = 3.0
_NAMES_S = 3.0
_COUNTERS_S = 1.0
_LOG_AGE_S = 7 * 86400.0
_MOST_LINES, _KEPT_LINES = 100_000, 100
_SLACK_S = 2.0


@record
class Ask:
    """`paths`: further folders. `python`: the interpreter to examine, "": our own. `kernel`: rows of known lines."""

    paths: Sequence[str]
    timeout_s: float
    """Of each part."""
    python: str
    kernel: Rows


@record
class Arrived:
    """The first report, sent before reading anything."""

    host: str


@record
class Limit:
    """A resource limit inherited by child processes; None: unlimited. In bytes, files or processes."""

    name: str
    soft: int | None
    hard: int | None


@record
class System:
    """The node itself. `may_lock`: has CAP_IPC_LOCK. `in_step`: started by SLURM or mpirun."""

    kernel: str
    arch: str
    product: str
    up_s: float
    limits: tuple[Limit, ...]
    may_lock: bool
    in_step: bool
    cpus: int
    cpus_online: int
    memory_bytes: int | None
    available_bytes: int | None
    cgroup: Cgroup
    shm: Space | None
    variables: dict[str, str] = field(default_factory=dict)
    huge_pages: str = ""
    """Setting of transparent huge pages: always, madvise, never."""
    somaxconn: int | None = None
    """Maximum length of a listening socket's accept queue."""
    proxies: tuple[str, ...] = ()
    """Names of proxy variables; the values may hold a password."""
    no_proxy: str = ""


@record
class Disks:
    """The file systems of the node: those of `written`, the folders that jobs write to, and network mounts."""

    spaces: tuple[Space, ...]
    written: tuple[str, ...]


@record
class NodeNetwork:
    """The network of the node. `names` is None if the resolver timed out."""

    nics: tuple[Nic, ...]
    ib_ports: tuple[IbPort, ...]
    names: Names | None
    counters: Counters
    pcie: Pcie | None
    ephemeral_ports: str


@record
class Software:
    """The Python that runs distdiag there, and its packages' versions; "": not installed. `error`: why unknown."""

    executable: str
    python: str = ""
    torch: str = ""
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    glibc: str = ""
    ofed: str = ""
    error: str = ""
    libraries: dict[str, int] = field(default_factory=dict)
    """Bytes of each library in torch/lib, by file name."""


@record
class Gpus:
    """The GPUs of the node according to the bus, the driver's libraries and nvidia-smi; `asked_s`: their time limit."""

    driver: Driver
    health: Health
    asked_s: float = 0.0
    imex_channels: int = 0
    """Devices through which GPUs of several nodes share memory over NVLink (GB200)."""
    imex_nodes: tuple[str, ...] = ()
    """The nodes in IMEX's own list, sorted."""


@record
class KernelLog:
    """Relevant lines of the kernel's log of the last week; or why it is unreadable."""

    lines: tuple[KernelLine, ...]
    error: str = ""


@record
class Jobs:
    """The ranks running here, by pid, and the load average of the last minute.

    `oldest_s`: running time of the oldest rank; None without ranks.
    """

    pids: tuple[int, ...]
    load: float
    oldest_s: float | None = None


@record
class Clock:
    """Offset of the node's clock to that of the machine running distdiag, and the uncertainty: half the round trip."""

    offset_s: float
    uncertainty_s: float


@record
class Part:
    """One message of a node. `time_s`: its clock on receipt of the request; `late`: parts that timed out.

    `failed`: unreadable parts, and why. `clock` is added on receipt of the message.
    """

    time_s: float | None = None
    clock: Clock | None = None
    system: System | None = None
    disks: Disks | None = None
    network: NodeNetwork | None = None
    software: Software | None = None
    gpus: Gpus | None = None
    kernel: KernelLog | None = None
    jobs: Jobs | None = None
    late: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)


def facts() -> Arrived:
    """Return the host name at once."""
    return Arrived(machine.host_name())


def more(ask: Ask, tell: Callable[[Part], None]) -> None:
    """Read this node."""
    tell(Part(time_s=time.time()))
    parts: dict[str, Callable[[], Any]] = {
        "system": _system,
        "disks": lambda: _disks(ask.paths),
        "network": _network,
        "software": lambda: _software(ask.python or sys.executable, ask.timeout_s),
        "gpus": lambda: _gpus(ask.timeout_s),
        "kernel": lambda: _kernel(Patterns(ask.kernel)),
        "jobs": _jobs,
    }
    failed: dict[str, str] = {}
    work = {name: partial(_or_none, name, read, failed) for name, read in parts.items()}
    found, late = deadlines.together(work, patience_s=ask.timeout_s + _SLACK_S)
    tell(Part(**{name: value for name, value in found.items() if value is not None}, late=tuple(late), failed=failed))


def _or_none(name: str, read: Callable[[], Any], failed: dict[str, str]) -> Any:  # noqa: ANN401 - a part of some type
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - a failing part is reported, and affects no other
        failed[name] = f"{type(error).__name__}: {error}"[:200]
        return None


def _system() -> System:
    system = os.uname()
    shm = file_systems.spaces(["/dev/shm"], patience_s=_MOUNT_S)[0]
    return System(
        kernel=system.release,
        arch=system.machine,
        product=machine.read_text("/sys/class/dmi/id/product_name").strip(),
        up_s=float((machine.read_text("/proc/uptime").split() or ["0"])[0]),
        limits=tuple(_limit(name, number) for name, number in _LIMITS.items()),
        may_lock=_may_lock(),
        in_step=any(name in os.environ for name in ("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")),
        cpus=len(os.sched_getaffinity(0)),
        cpus_online=os.cpu_count() or 1,
        memory_bytes=machine.total_memory_bytes(),
        available_bytes=machine.available_memory_bytes(),
        cgroup=cgroups.look(),
        shm=shm if not shm.error or shm.error.startswith(file_systems.NO_ANSWER) else None,
        variables=machine.variables(_VARIABLES),
        huge_pages=_huge_pages(),
        somaxconn=_number("/proc/sys/net/core/somaxconn"),
        proxies=tuple(sorted(name for name in os.environ if name.lower() in _PROXIES and os.environ[name])),
        no_proxy=(os.environ.get("no_proxy") or os.environ.get("NO_PROXY", ""))[:_LONGEST_LIST],
    )


def _huge_pages() -> str:
    _, _, rest = machine.read_text("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")
    return rest.partition("]")[0]


def _number(path: str) -> int | None:
    text = machine.read_text(path).strip()
    return int(text) if text.isdecimal() else None


def _limit(name: str, number: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number))
    return Limit(name, soft, hard)


def _may_lock() -> bool:
    words = machine.status_words("self", "CapEff")
    return bool(words) and bool(int(words[0], 16) >> _IPC_LOCK & 1)


def _disks(paths: Sequence[str]) -> Disks:
    written = tuple(dict.fromkeys([*file_systems.useful_folders(os.environ), *paths]))
    wanted = [*written, *file_systems.network_mounts()]
    return Disks(tuple(file_systems.spaces(wanted, patience_s=_MOUNT_S)), written)


def _network() -> NodeNetwork:
    work: dict[str, Callable[[], Any]] = {
        "names": network.look,
        "counters": lambda: link_counters.sample(_COUNTERS_S),
    }
    found, _ = deadlines.together(work, patience_s=_NAMES_S + _COUNTERS_S)
    return NodeNetwork(
        nics=nics.nics(),
        ib_ports=nics.ib_ports(),
        names=found["names"].names if "names" in found else None,
        counters=found.get("counters") or link_counters.Counters(),
        pcie=pcie.look(),
        ephemeral_ports="-".join(machine.read_text("/proc/sys/net/ipv4/ip_local_port_range").split()),
    )


def _software(executable: str, timeout_s: float) -> Software:
    """Read the versions a Python would import, from files: torch itself is never imported."""
    python = environment.interpreter(executable, timeout_s=timeout_s)
    if python.error:
        return Software(executable, error=python.error)
    packages = {package.name: package.version for package in environment.packages(python.paths)}
    torch = torchfiles.read_torch(python)
    return Software(
        executable=python.executable,
        python=python.version,
        torch=torch.version if torch is not None else "",
        cuda=torch.cuda if torch is not None else "",
        hip=torch.hip if torch is not None else "",
        nccl=next((version for name, version in packages.items() if name.startswith("nvidia-nccl")), ""),
        glibc=_glibc(),
        ofed=machine.read_text("/sys/module/mlx5_core/version").strip(),
        libraries=_libraries(torch.folder) if torch is not None else {},
    )


def _libraries(torch_folder: str) -> dict[str, int]:
    try:
        with os.scandir(os.path.join(torch_folder, "lib")) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if ".so" in entry.name}
    except OSError:
        return {}


def _glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    except (ValueError, OSError):  # musl
        return ""


def _kernel(rows: Patterns) -> KernelLog:
    """Read the kernel's log: the newest line of each Xid and GPU, and of each other kind."""
    lines, error = kernel_signs.kernel_log(rows, _LOG_AGE_S, most=_MOST_LINES)
    newest = {(line.kind, line.text.partition(",")[0] if line.kind == "xid" else ""): line for line in lines}
    return KernelLog(tuple(newest.values())[-_KEPT_LINES:], error)


def _jobs() -> Jobs:
    """Find the ranks: processes with a rank in the environment and torch loaded, without their children."""
    seen = processes.facts(processes.Ask())
    found = [each for each in seen.processes if each.place and each.torch]
    pids = {each.pid for each in found}
    ranks = [each for each in found if not pids.intersection(each.above)]
    oldest = max((seen.uptime_s - each.started_s for each in ranks), default=None)
    return Jobs(tuple(each.pid for each in ranks), os.getloadavg()[0], oldest)


def _gpus(timeout_s: float) -> Gpus:
    places = Places("", dict(os.environ))
    quick = driver.look(places, ask=False, timeout_s=timeout_s)
    if not (quick.kernel or quick.devices or quick.wsl):
        return Gpus(quick, Health(error="no NVIDIA driver"))
    work: dict[str, Callable[[], Any]] = {
        "driver": lambda: driver.look(places, ask=True, timeout_s=timeout_s),
        "health": lambda: gpu_health.read(timeout_s),
    }
    found, _ = deadlines.together(work, patience_s=timeout_s + _SLACK_S / 2)
    late = Health(error=f"nvidia-smi did not answer within {timeout_s:g} s")
    return Gpus(found.get("driver", quick), found.get("health", late), timeout_s, *_imex())


def _imex() -> tuple[int, tuple[str, ...]]:
    """Return the number of IMEX channels, and the nodes in its list."""
    try:
        channels = len(os.listdir("/dev/nvidia-caps-imex-channels"))
    except OSError:
        channels = 0
    lines = (line.partition("#")[0].strip() for line in machine.read_text(_IMEX_NODES).splitlines())
    return channels, tuple(sorted(filter(None, lines)))
