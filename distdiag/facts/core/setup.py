"""Whether a crash would leave a core here, as facts: limits, the kernel's settings, and the place. See core(5)."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass

from distdiag.facts import machine, procs, rank_identity
from distdiag.facts.core import places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h
_PR_GET_DUMPABLE = 3
_COREDUMP_CONF = "systemd/coredump.conf"
_SYSTEMD_FOLDERS = ("/etc", "/run", "/usr/local/lib", "/usr/lib")  # the first one is the strongest
_SLURM_CONFS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")
_UNITS = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


@dataclass(frozen=True)
class Limits:
    """RLIMIT_CORE, soft and hard, and the soft RLIMIT_FSIZE, which cuts a core too. Bytes; None for no limit."""

    core: int | None
    core_hard: int | None
    file: int | None


@dataclass(frozen=True)
class ProcessSetup:
    """What would become of one process's core. None: not ours to read.

    `launchers`: what started it, the nearest first; `unit`: its systemd service. `contained`: it has process ids of its
    own, as in a container. `memory_bytes` of its own (its core is at least that large). `filter`: coredump_filter.
    """

    pid: int
    rank: int | None
    command: str
    launchers: tuple[str, ...]
    unit: str
    contained: bool | None
    limits: Limits | None
    dumpable: bool | None
    filter: int | None
    memory_bytes: int | None
    place: places.Place | None


@dataclass(frozen=True)
class SystemdStore:
    """What coredump.conf says: `keeps` cores at all, of at most so many bytes (None: what is built in)."""

    keeps: bool
    most_bytes: int | None


@dataclass(frozen=True)
class SetupFacts:
    """One node. None: not ours to read, or it makes no sense here.

    `own` is the process that looks, `ranks` those that were asked for, `gone` those that are no more. `container`: what
    it seems to run in, "" for a machine of its own; there the handler and its files are the host's. `handler_there`:
    the program that takes cores exists. `store`: where it keeps them. `may_set`: core_pattern may be written from here.
    `slurm_propagates`: SLURM gives a job the limit of the shell that submitted it.
    """

    pattern: places.Pattern | None
    own: ProcessSetup
    ranks: tuple[ProcessSetup, ...]
    gone: tuple[int, ...]
    container: str
    is_root: bool
    may_set: bool
    suid_dumpable: int | None
    handler_there: bool | None
    systemd: SystemdStore | None
    store: places.Place | None
    slurm_propagates: bool | None


def look(pids: Sequence[int]) -> SetupFacts:
    """Read what would become of the cores of this process, and of those with the given ids."""
    pattern = places.pattern()
    container = _container()
    ours = pattern is not None and pattern.kind is places.Kind.PROGRAM and not container
    found = {pid: _process(pid, pattern) for pid in dict.fromkeys(pids)}
    own = _process(os.getpid(), pattern)
    assert own is not None, "a process finds itself"
    return SetupFacts(
        pattern=pattern,
        own=own,
        ranks=tuple(one for one in found.values() if one is not None),
        gone=tuple(pid for pid, one in found.items() if one is None),
        container=container,
        is_root=os.geteuid() == 0,
        may_set=os.access(places.PATTERN, os.W_OK),
        suid_dumpable=_number(machine.read_text("/proc/sys/fs/suid_dumpable")),
        handler_there=os.access(pattern.program, os.X_OK) if pattern is not None and ours else None,
        systemd=systemd_store() if pattern is not None and ours and pattern.handler == "systemd-coredump" else None,
        store=places.place(pattern.folders[0]) if pattern is not None and ours and pattern.folders else None,
        slurm_propagates=slurm_propagates(),
    )


def systemd_store(root: str = "") -> SystemdStore:
    """Read what systemd-coredump was told, below `root`. A drop-in beats the file, and the last name the first."""
    main = next(
        (path for path in (f"{root}{top}/{_COREDUMP_CONF}" for top in _SYSTEMD_FOLDERS) if os.path.isfile(path)), ""
    )
    drop_ins: dict[str, str] = {}
    for top in reversed(_SYSTEMD_FOLDERS):
        drop_ins.update({os.path.basename(path): path for path in glob.glob(f"{root}{top}/{_COREDUMP_CONF}.d/*.conf")})
    told: dict[str, str] = {}
    for path in (main, *(drop_ins[name] for name in sorted(drop_ins))):
        told.update(re.findall(r"^\s*(Storage|ExternalSizeMax)\s*=\s*(\S+)", machine.read_text(path), re.MULTILINE))
    keeps = told.get("Storage", "external") != "none"
    return SystemdStore(keeps, _size(told.get("ExternalSizeMax", "")))


def slurm_propagates(path: str | None = None) -> bool | None:
    """Read from slurm.conf whether jobs get the submitting shell's limit on cores; None without such a file."""
    usual = [os.environ.get("SLURM_CONF", ""), *_SLURM_CONFS]
    text = next(filter(None, map(machine.read_text, [path] if path else usual)), "")
    if not text:
        return None
    told = re.findall(r"^\s*PropagateResourceLimits(Except)?\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    for is_except, names in told:
        wanted = "CORE" in names.upper().split(",") or names.upper() == "ALL"
        return wanted is not bool(is_except)
    return True


def _process(pid: int, pattern: places.Pattern | None) -> ProcessSetup | None:
    status = machine.read_text(f"/proc/{pid}/status")
    if not status:
        return None
    variables = procs.variables(pid) or {}
    who = rank_identity.identify(variables)
    return ProcessSetup(
        pid=pid,
        rank=who.rank if who else None,
        command=machine.command_line(pid),
        launchers=tuple(one.launcher for one in rank_identity.identify_all(variables)),
        unit=_unit(pid),
        contained=_contained(pid),
        limits=_limits(pid),
        dumpable=_dumpable(pid, status),
        filter=_number(machine.read_text(f"/proc/{pid}/coredump_filter"), 16),
        memory_bytes=_memory(status),
        place=_place_of(pid, status, pattern),
    )


def _limits(pid: int) -> Limits | None:
    rows = dict(re.findall(r"^Max (core file|file) size\s+(\w+\s+\w+)", machine.read_text(f"/proc/{pid}/limits"), re.M))
    if len(rows) < 2:
        return None
    core, hard = map(_number, rows["core file"].split())
    return Limits(core, hard, _number(rows["file"].split()[0]))


def _dumpable(pid: int, status: str) -> bool | None:
    """Tell whether the kernel would dump this process, which changed its user or whose program is unreadable if not."""
    if pid == os.getpid():
        import ctypes

        return int(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)) == 1
    user = _ids(status, "Uid")[1]
    try:
        # Files in /proc/PID of a process that may not be dumped belong to root, see proc(5).
        owner = os.stat(f"/proc/{pid}/stat").st_uid
    except OSError:
        return None
    return owner == user if user else None


def _memory(status: str) -> int | None:
    found = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE)
    return sum(map(int, found)) * 1024 if found else None


def _place_of(pid: int, status: str, pattern: places.Pattern | None) -> places.Place | None:
    """Look at the place as the process sees it: its directory, or the folder in its own root."""
    if pattern is None or pattern.kind not in (places.Kind.RELATIVE, places.Kind.ABSOLUTE):
        return None
    relative = pattern.kind is places.Kind.RELATIVE
    try:
        shown = os.path.join(os.readlink(f"/proc/{pid}/cwd") if relative else "/", pattern.folder).rstrip("/") or "/"
    except OSError:
        return None
    seen = f"/proc/{pid}/{'cwd' if relative else 'root'}/{pattern.folder.lstrip('/')}"
    user, groups = _ids(status, "Uid")[1], frozenset(_ids(status, "Gid") + _ids(status, "Groups"))
    name = "" if "%" in pattern.text or pattern.uses_pid else os.path.basename(pattern.text)
    return places.place(shown, seen, name, user, groups)


def _unit(pid: int) -> str:
    """Name the systemd service that a process is in; empty if it is in none."""
    paths = [line.rpartition(":")[2] for line in machine.read_text(f"/proc/{pid}/cgroup").splitlines()]
    return next((name for name in map(os.path.basename, paths) if name.endswith(".service")), "")


def _contained(pid: int) -> bool | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != _FIRST_PID_NAMESPACE
    except OSError:
        return None


def _container() -> str:
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "Apptainer"
    if not _contained(os.getpid()):
        return ""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if os.path.exists("/run/.containerenv"):
        return "Podman"
    return "Docker" if os.path.exists("/.dockerenv") else "a container"


def _ids(status: str, name: str) -> list[int]:
    found = re.search(rf"^{name}:(.*)$", status, re.MULTILINE)
    return [int(word) for word in found[1].split()] if found else []


def _number(text: str, base: int = 10) -> int | None:
    try:
        return int(text, base)
    except ValueError:  # "unlimited", or nothing
        return None


def _size(text: str) -> int | None:
    """Read a size of systemd.syntax(7), "2G"; None for infinity."""
    found = re.fullmatch(r"(\d+)([BKMGTPE]?)", text)
    return int(found[1]) << 10 * _UNITS[found[2]] if found else None
