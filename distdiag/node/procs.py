"""The processes of this machine as facts: who they are, what they may be in a job, how they stand still.

Everything is read from /proc, see proc(5); nothing is stopped, signalled or attached to. Of an environment only the
variables that name a place in a job are ever looked at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from distdiag.node import asleep, machine, syscall_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_WANTED_PREFIXES = ("RANK=", "LOCAL_RANK=", "WORLD_SIZE=", "LOCAL_WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT=")
_WANTED_FAMILIES = (
    *("TORCHELASTIC_RUN_ID=", "SLURM_JOB_ID=", "SLURM_STEP_ID=", "SLURM_PROCID=", "SLURM_NTASKS=", "SLURM_LOCALID="),
    *("SLURM_STEP_NUM_TASKS=", "SLURM_STEP_TASKS_PER_NODE=", "SLURM_NODEID=", "PMIX_NAMESPACE=", "OMPI_COMM_WORLD_"),
    *("OMPI_MCA_ess_base_jobid=", "MV2_COMM_WORLD_", "JSM_NAMESPACE_", "FLUX_TASK_", "FLUX_JOB_", "PMI_RANK="),
    *("PMI_SIZE=", "MPI_LOCALRANKID=", "MPI_LOCALNRANKS=", "NODE_RANK="),
)
_WANTED = tuple(name.encode() for name in (*_WANTED_PREFIXES, *_WANTED_FAMILIES))
_TICKS = os.sysconf("SC_CLK_TCK")
_ON_DESCRIPTOR = ("read", "write", "pread64", "pwrite64", "readv", "writev", "fsync", "fdatasync", "ioctl")
_ON_PATH = {"open": 0, "stat": 0, "openat": 1, "newfstatat": 1, "statx": 1}
"""Which argument points to the path."""


@dataclass(frozen=True)
class Proc:
    """One line of the process table. `cpu_s` of all its threads; `started` in clock ticks after boot."""

    pid: int
    parent: int
    state: str
    comm: str
    cpu_s: float
    started: int


@dataclass(frozen=True)
class Task:
    """One thread as the kernel sees it."""

    tid: int
    state: str
    comm: str
    cpu_s: float


@dataclass(frozen=True)
class Standstill:
    """Why a process does not go on, as far as the kernel tells: function, system call, file, since how many seconds."""

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
    """Read one process; None if it is gone."""
    fields = _stat(f"/proc/{pid}/stat")
    return None if fields is None else Proc(pid, int(fields[2]), fields[1], fields[0], _cpu(fields), int(fields[20]))


def tasks(pid: int) -> list[Task]:
    """Read the threads of a process; none if it is gone."""
    try:
        entries = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found = []
    for entry in entries:
        fields = _stat(f"/proc/{pid}/task/{entry}/stat")
        if fields is not None:
            found.append(Task(int(entry), fields[1], fields[0], _cpu(fields)))
    return found


def command_words(pid: int) -> list[str]:
    """Give a process's command line; empty for a zombie or a kernel thread."""
    words = machine.read_text(f"/proc/{pid}/cmdline").split("\0")
    return words[:-1] if words and not words[-1] else words


def variables(pid: int) -> dict[str, str] | None:
    """Read the variables that tell a place in a job, as at the start of the program; None if not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read()
    except OSError:
        return None
    return wanted(data.split(b"\0"))


def wanted(entries: Iterable[bytes]) -> dict[str, str]:
    """Take from an environment, NAME=value each, the variables that tell a place in a job; no other is looked at."""
    found = {}
    for entry in entries:
        if entry.startswith(_WANTED):
            name, _, value = entry.decode("utf-8", "replace").partition("=")
            found[name] = value[:256]
    return found


def owner(pid: int) -> int | None:
    """Give the user id that a process runs as; None if it is gone."""
    status = machine.read_text(f"/proc/{pid}/status")
    for line in status.splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[2])
    return None


def tracer(pid: int) -> int | None:
    """Give the process that traces this one (strace, gdb); None if there is none."""
    for line in machine.read_text(f"/proc/{pid}/status").splitlines():
        if line.startswith("TracerPid:"):
            return int(line.split()[1]) or None
    return None


def program(pid: int) -> str:
    """Give the path of the program that a process runs; empty if not ours to read."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def maps(pid: int) -> str | None:
    """Read what a process has mapped; None if not ours to read."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def network(pid: int) -> str:
    """Name a process's network namespace, "net:[4026531840]"; empty if not ours to read."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def switches(pid: int) -> int:
    """Count how often a process's main thread gave up the processor to wait; -1 if it is gone."""
    for line in machine.read_text(f"/proc/{pid}/status").splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    return -1


def uses_gpu(pid: int) -> bool:
    """Tell whether a process has a GPU open: NVIDIA, AMD, or WSL's."""
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
            if (target.startswith("/dev/nvidia") and target[11:].isdigit()) or target in ("/dev/kfd", "/dev/dxg"):
                return True
    except OSError:
        return False
    return False


def has_connection(pid: int, ports: set[int]) -> bool:
    """Tell whether a process has a TCP socket of which either end is one of these ports, or listens there."""
    wanted = {f":{port:04X}" for port in ports}
    tables = [machine.read_text(f"/proc/{pid}/net/{name}").splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    inodes = {row[9] for row in rows if row[1][-5:] in wanted or row[2][-5:] in wanted} - {"0"}
    try:
        entries = os.listdir(f"/proc/{pid}/fd") if inodes else []
    except OSError:  # gone, or not ours to read
        return False
    return any(_inode_of(f"/proc/{pid}/fd/{one}") in inodes for one in entries)


def _inode_of(descriptor: str) -> str:
    """Give a socket's inode; empty for what is none, or was closed since it was listed."""
    try:
        target = os.readlink(descriptor)
    except OSError:
        return ""
    return target[8:-1] if target.startswith("socket:[") else ""


def standstill(pid: int, tid: int, clocks: dict[int, float]) -> Standstill:
    """Ask the kernel what one thread waits for; what is not ours to read stays empty. `clocks`: see asleep.seconds."""
    folder = f"/proc/{pid}/task/{tid}"
    fields = _stat(f"{folder}/stat")
    name, path = _syscall(pid, machine.read_text(f"{folder}/syscall").split())
    return Standstill(
        tid=tid,
        state=fields[1] if fields else "",
        wait_channel=machine.read_text(f"{folder}/wchan").strip("0"),
        syscall=name,
        path=path,
        since_s=asleep.seconds(pid, [tid], clocks).get(tid),
    )


def is_python(pid: int, words: list[str]) -> bool:
    """Tell whether a process is an interpreter: by its program, or by the libpython that it has loaded."""
    base = os.path.basename(program(pid) or (words[0] if words else ""))
    if base.startswith(("python", "pypy")):
        return True
    return "libpython" in (maps(pid) or "")


def children_of(procs: Iterable[Proc]) -> dict[int, list[int]]:
    """List the children of every process that has some."""
    found: dict[int, list[int]] = {}
    for proc in procs:
        found.setdefault(proc.parent, []).append(proc.pid)
    return found


def _stat(path: str) -> list[str] | None:
    """Read comm and the fields after it: [comm, state, ppid, ...]; None if gone."""
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
    """Name the system call of /proc/PID/syscall ("number arguments...") and the file it is about."""
    if len(words) < 4:
        return "", ""
    number, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
    name = syscall_names.NAMES.get(os.uname().machine, {}).get(number, f"syscall {number}")
    if name in _ON_DESCRIPTOR:
        try:
            return name, os.readlink(f"/proc/{pid}/fd/{arguments[0]}")
        except OSError:
            return name, ""
    return name, _path_at(pid, arguments[_ON_PATH[name]]) if name in _ON_PATH else ""


def _path_at(pid: int, address: int) -> str:
    """Read a path out of a process's memory; empty if not ours to read."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
            file.seek(address)
            text = file.read(min(512, 4096 - address % 4096)).split(b"\0")[0]
    except (OSError, OverflowError):
        return ""
    return text.decode("utf-8", "replace")
