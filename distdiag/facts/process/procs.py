"""Processes of this machine: identity, variables of a job, and the reason for a standstill.

All is read from /proc, see proc(5); no process is stopped, signalled or attached to. Only those variables of an
environment are ever examined that give a process's place in a job, or its GPUs.
"""

from __future__ import annotations

import os
import re
import struct

from distdiag.facts import machine
from distdiag.facts.network import sockets
from distdiag.facts.process import off_cpu, syscall_names
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.facts.network.sockets import TcpTables

_WANTED_PREFIXES = ("RANK=", "LOCAL_RANK=", "WORLD_SIZE=", "LOCAL_WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT=")
_WANTED_FAMILIES = (
    *("TORCHELASTIC_RUN_ID=", "SLURM_JOB_ID=", "SLURM_STEP_ID=", "SLURM_PROCID=", "SLURM_NTASKS=", "SLURM_LOCALID="),
    *("SLURM_STEP_NUM_TASKS=", "SLURM_STEP_TASKS_PER_NODE=", "SLURM_NODEID=", "PMIX_NAMESPACE=", "OMPI_COMM_WORLD_"),
    *("OMPI_MCA_ess_base_jobid=", "MV2_COMM_WORLD_", "JSM_NAMESPACE_", "FLUX_TASK_", "FLUX_JOB_", "PMI_RANK="),
    *("PMI_SIZE=", "MPI_LOCALRANKID=", "MPI_LOCALNRANKS=", "NODE_RANK="),
    *("TORCHELASTIC_RESTART_COUNT=", "TORCHELASTIC_MAX_RESTARTS="),
    *("CUDA_VISIBLE_DEVICES=", "HIP_VISIBLE_DEVICES=", "ROCR_VISIBLE_DEVICES="),
)
_WANTED = tuple(name.encode() for name in (*_WANTED_PREFIXES, *_WANTED_FAMILIES))
_CACHE_FOLDERS = (b"HOME=", b"XDG_CACHE_HOME=", b"TORCH_EXTENSIONS_DIR=")
"""Only for polled_path, which checks these folders for the locks of torch's builds."""
_TICKS = os.sysconf("SC_CLK_TCK")
_ON_DESCRIPTOR = (
    *("read", "write", "pread64", "pwrite64", "readv", "writev", "fsync", "fdatasync", "ioctl", "flock"),
    *("recvfrom", "recvmsg", "sendto", "sendmsg", "accept", "accept4", "connect"),
)
_ON_PROCESS = ("wait4", "waitid")
_POLLS = ("poll", "ppoll")
_ON_PATH = {"open": 0, "stat": 0, "openat": 1, "newfstatat": 1, "statx": 1}
"""Index of the path argument."""
_LONGEST_PATH = 4096


@record
class Proc:
    """One line of the process table. `cpu_s` of all its threads; `started` in clock ticks after boot."""

    pid: int
    parent: int
    state: str
    comm: str
    cpu_s: float
    started: int


_MOST_CONNECTIONS = 1024


@record
class Task:
    """One thread."""

    tid: int
    state: str
    comm: str
    cpu_s: float


@record
class Standstill:
    """The wait of a process as known to the kernel: function, system call, seconds since its start.

    `path`: the object of the call: a file, or a description of a pipe, the address of a socket, a child.
    """

    tid: int
    state: str
    wait_channel: str
    syscall: str
    path: str
    since_s: float | None


def table() -> dict[int, Proc]:
    """Read the process table."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            proc = read(int(entry))
            if proc is not None:
                found[proc.pid] = proc
    return found


def read(pid: int) -> Proc | None:
    """Read one process; None if it exited."""
    fields = _stat(f"/proc/{pid}/stat")
    return None if fields is None else Proc(pid, int(fields[2]), fields[1], fields[0], _cpu(fields), int(fields[20]))


def tasks(pid: int) -> list[Task]:
    """Read the threads of a process; empty if it exited."""
    found = []
    for entry in machine.names_in(f"/proc/{pid}/task"):
        fields = _stat(f"/proc/{pid}/task/{entry}/stat")
        if fields is not None:
            found.append(Task(int(entry), fields[1], fields[0], _cpu(fields)))
    return found


def command_words(pid: int) -> list[str]:
    """Return a process's command line; empty for a zombie or a kernel thread."""
    words = machine.read_text(f"/proc/{pid}/cmdline").split("\0")
    return words[:-1] if words and not words[-1] else words


def variables(pid: int) -> dict[str, str] | None:
    """Read the variables for a place in a job, as at program start; None if unreadable."""
    entries = _environment(pid)
    return None if entries is None else wanted(entries)


def cache_folders(pid: int) -> dict[str, str]:
    """Read the variables with the folders of a process's caches; empty if unreadable."""
    return variables_named(pid, _CACHE_FOLDERS)


def variables_named(pid: int, beginnings: tuple[bytes, ...]) -> dict[str, str]:
    """Read the variables with these prefixes, truncated to 4,096 characters; empty if unreadable."""
    entries = (entry for entry in _environment(pid) or () if entry.startswith(beginnings))
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value[:4096] for name, _, value in pairs}


def _environment(pid: int) -> list[bytes] | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return None


def wanted(entries: Iterable[bytes]) -> dict[str, str]:
    """Select the variables for a place in a job from an environment of NAME=value; decodes no others."""
    found = {}
    for entry in entries:
        if entry.startswith(_WANTED):
            name, _, value = entry.decode("utf-8", "replace").partition("=")
            found[name] = value[:256]
    return found


def owner(pid: int) -> int | None:
    """Return the effective user id of a process; None if it exited."""
    words = machine.status_words(pid, "Uid")
    return int(words[1]) if words else None


def tracer(pid: int) -> int | None:
    """Return the tracer of a process (strace, gdb); None without one."""
    words = machine.status_words(pid, "TracerPid")
    return (int(words[0]) or None) if words else None


def program(pid: int) -> str:
    """Return the path of a process's program; empty if unreadable."""
    return machine.link_target(f"/proc/{pid}/exe")


def maps(pid: int) -> str | None:
    """Read a process's memory map; None if unreadable."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def switches(pid: int, tid: int | None = None) -> int:
    """Count a thread's voluntary context switches (default: the main thread's); -1 if it exited."""
    words = machine.status_words(f"{pid}/task/{tid or pid}", "voluntary_ctxt_switches")
    return int(words[0]) if words else -1


def ran_s(pid: int) -> float | None:
    """Return the processor seconds of the main thread, to the nanosecond; None if not counted by the kernel."""
    words = machine.read_text(f"/proc/{pid}/task/{pid}/schedstat").split()
    return int(words[0]) / 1e9 if words and words[0].isdigit() else None


def thaws_by(pid: int) -> str:
    """Return the command to resume a process with a frozen cgroup; empty if it is not frozen.

    The path is below /sys/fs/cgroup here, which in a container may differ from the host's.
    """
    for line in machine.read_text(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "freezer" in controllers.split(","):
            place = f"/sys/fs/cgroup/freezer{path}/freezer.state"
            if machine.read_text(place).strip() in ("FROZEN", "FREEZING"):
                return f"echo THAWED > {place}"
        elif not controllers and "frozen 1" in machine.read_text(f"/sys/fs/cgroup{path}/cgroup.events"):
            return f"echo 0 > /sys/fs/cgroup{path}/cgroup.freeze"
    return ""


_GPU_DRIVERS = re.compile(
    r"/(libcuda\.so|libamdhip64|libhsa-runtime64|libze_intel_gpu|libascendcl|libmusa\.so|libmusart)"
)


def uses_gpu(pid: int, mapped: str | None = None) -> bool:
    """Return whether a process has a GPU open (NVIDIA, AMD, WSL's), or a GPU driver's library mapped.

    Containers may rename devices, so the library counts as well. `mapped`: its maps, if already read.
    """
    if _GPU_DRIVERS.search((maps(pid) if mapped is None else mapped) or ""):
        return True
    for entry in machine.names_in(f"/proc/{pid}/fd"):
        target = machine.link_target(f"/proc/{pid}/fd/{entry}")
        if (target.startswith("/dev/nvidia") and target[11:].isdigit()) or target in ("/dev/kfd", "/dev/dxg"):
            return True
    return False


def has_connection(pid: int, ports: set[int], tables: TcpTables) -> bool:
    """Return whether a process has a TCP socket with one of these ports at either end, or listens on one."""
    ends = tuple(f":{port}" for port in ports)
    return any(sock.local.endswith(ends) or sock.remote.endswith(ends) for sock in tables.sockets(pid))


def connections(pid: int, tables: TcpTables) -> tuple[str, ...]:
    """List the TCP connections of a process by both ends, in the same form at each end."""
    found = (sock for sock in tables.sockets(pid) if sock.state == "ESTABLISHED")
    return tuple(sorted(">".join(sorted((sock.local, sock.remote))) for sock in found))[:_MOST_CONNECTIONS]


def standstill(pid: int, tid: int, clocks: dict[int, float]) -> Standstill:
    """Read the wait of one thread from the kernel; unreadable parts are empty. `clocks`: see off_cpu.seconds."""
    folder = f"/proc/{pid}/task/{tid}"
    fields = _stat(f"{folder}/stat")
    name, path = _syscall(pid, machine.read_text(f"{folder}/syscall").split())
    return Standstill(
        tid=tid,
        state=fields[1] if fields else "",
        wait_channel=machine.read_text(f"{folder}/wchan").strip("0"),
        syscall=name,
        path=path,
        since_s=off_cpu.seconds(pid, [tid], clocks).get(tid),
    )


def is_python(pid: int, words: list[str]) -> bool:
    """Return whether a process is a Python interpreter: by its program, or a loaded libpython."""
    base = os.path.basename(program(pid) or (words[0] if words else ""))
    if base.startswith(("python", "pypy")):
        return True
    return "libpython" in (maps(pid) or "")


def children_of(procs: Iterable[Proc]) -> dict[int, list[int]]:
    """List the children of every process."""
    found: dict[int, list[int]] = {}
    for proc in procs:
        found.setdefault(proc.parent, []).append(proc.pid)
    return found


def _stat(path: str) -> list[str] | None:
    """Read comm and the fields after it: [comm, state, ppid, ...]; None if it exited."""
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    return [head.partition("(")[2], *tail.split()]


def _cpu(fields: list[str]) -> float:
    return (int(fields[12]) + int(fields[13])) / _TICKS


def _syscall(pid: int, words: list[str]) -> tuple[str, str]:
    """Name the system call of /proc/PID/syscall ("number arguments...") and its file."""
    if len(words) < 4:
        return "", ""
    number, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
    name = syscall_names.NAMES.get(os.uname().machine, {}).get(number, f"syscall {number}")
    if name in _ON_DESCRIPTOR:
        return name, _open_file(pid, arguments[0])
    if name in _ON_PROCESS:
        return name, _program(arguments[0 if name == "wait4" else 1])
    if name in _POLLS:
        polled = _memory(pid, arguments[0], 8) if arguments[1] == 1 else b""
        return name, _open_file(pid, struct.unpack_from("<i", polled)[0]) if len(polled) == 8 else ""
    return name, _path_at(pid, arguments[_ON_PATH[name]]) if name in _ON_PATH else ""


def _open_file(pid: int, fd: int) -> str:
    target = machine.link_target(f"/proc/{pid}/fd/{fd}")
    if target.startswith("pipe:["):
        children = map(int, machine.read_text(f"/proc/{pid}/task/{pid}/children").split())
        others = [child for child in children if _has_open(child, target)]
        return f"a pipe from {_program(others[0])}" if others else "a pipe"
    if target.startswith("socket:["):
        return _socket(pid, target[8:-1])
    return target


def _socket(pid: int, inode: str) -> str:
    """Name a TCP socket by the peer's address, a listening one by its own."""
    for name in ("tcp", "tcp6"):
        lines = machine.read_text(f"/proc/{pid}/net/{name}").splitlines()
        row = next((line for line in lines if f" {inode} " in line), "")
        for sock in sockets.parse_inet(f"\n{row}", name).values():
            return f"TCP {sock.remote or sock.local}"
    return "a socket"


def _has_open(pid: int, target: str) -> bool:
    folder = f"/proc/{pid}/fd"
    return any(machine.link_target(f"{folder}/{fd}") == target for fd in machine.names_in(folder))


def _program(pid: int) -> str:
    """Name a process: "tar (pid 812)"; empty if it exited."""
    process = read(pid)
    return f"{process.comm} (pid {pid})" if process is not None else ""


def _path_at(pid: int, address: int) -> str:
    # The read stops early at unmapped memory.
    return _memory(pid, address, _LONGEST_PATH).split(b"\0")[0].decode("utf-8", "replace")


def _memory(pid: int, address: int, size: int) -> bytes:
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
            file.seek(address)
            return file.read(size)
    except (OSError, OverflowError):
        return b""
