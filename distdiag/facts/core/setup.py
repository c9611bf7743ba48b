"""Whether a crash would leave a core here: core_pattern, its folder, limits, settings. See core(5)."""

from __future__ import annotations

import glob
import os
import re
import stat
from enum import Enum

from distdiag.facts import machine
from distdiag.facts.process import procs, rank_identity
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_PATTERN = "/proc/sys/kernel/core_pattern"
_USES_PID = "/proc/sys/kernel/core_uses_pid"
_DISCARDING = ("/bin/false", "/bin/true", "/usr/bin/false", "/usr/bin/true", "/dev/null")
_PER_PROCESS = frozenset("pPiI")
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h
_PR_GET_DUMPABLE = 3
_COREDUMP_CONF = "systemd/coredump.conf"
_SYSTEMD_FOLDERS = ("/etc", "/run", "/usr/local/lib", "/usr/lib")  # highest precedence first
_UNITS = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_HANDLERS = {
    "systemd-coredump": ("systemd-coredump", ("/var/lib/systemd/coredump",)),
    "apport": ("apport", ("/var/lib/apport/coredump", "/var/crash")),
    "abrt-hook-ccpp": ("abrt", ("/var/spool/abrt", "/var/tmp/abrt")),
    "wsl-capture-crash": ("WSL", ("/mnt/?/Users/*/AppData/Local/Temp/wsl-crashes",)),
}
"""Prefix of the program's name -> common name, and the folders for its cores."""


class PatternKind(str, Enum):
    """Destination of a core: a file relative to the working directory, a fixed path, a program, a socket, or none."""

    RELATIVE = "relative"
    ABSOLUTE = "absolute"
    PROGRAM = "program"
    SOCKET = "socket"
    NOWHERE = "nowhere"


@record
class CorePattern:
    """core_pattern, parsed.

    `folder` is the path before its first %; relative for a relative pattern. `program` receives the cores instead,
    `handler` is its common name, and `folders` (globs) its stores. `unique`: no two processes of a machine write the
    same file. `passes_limit`: the program receives the core size limit.
    """

    text: str
    uses_pid: bool
    kind: PatternKind
    folder: str = ""
    program: str = ""
    handler: str = ""
    folders: tuple[str, ...] = ()
    unique: bool = True
    passes_limit: bool = False


@record
class CoreFolder:
    """A folder for cores. `free_bytes` and `filesystem` (st_dev) are None if missing or unreadable.

    `writable`: by the user of the process, judging by owner and mode. `blocked_by`: an existing file of the core's name
    that the kernel will not replace ("a folder", "another user's file").
    """

    path: str
    exists: bool
    writable: bool
    free_bytes: int | None = None
    filesystem: int | None = None
    blocked_by: str = ""


@record
class Limits:
    """RLIMIT_CORE, soft and hard, and the soft RLIMIT_FSIZE, which also truncates cores. Bytes; None: unlimited."""

    core: int | None
    core_hard: int | None
    file: int | None


@record
class ProcessSetup:
    """Whether and where a process would dump core. None: permission denied.

    `launchers`: nearest first; `unit`: the systemd service. `contained`: in its own pid namespace, as in a container.
    `memory_bytes`: private memory (the least size of its core). `filter`: coredump_filter.
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
    folder: CoreFolder | None


@record
class CoredumpConf:
    """coredump.conf of systemd: whether it `keeps` cores, of at most `most_bytes` (None: the default)."""

    keeps: bool
    most_bytes: int | None


@record
class SetupFacts:
    """One node. None: permission denied, or not applicable.

    `own` is this process, `ranks` those of the given pids, `gone` the pids without a process. `container`: the detected
    runtime, else ""; inside, the handler and its files are the host's. `handler_there`: the program that receives cores
    exists. `store`: its folder of cores. `may_set`: core_pattern is writable from here.
    """

    pattern: CorePattern | None
    own: ProcessSetup
    ranks: tuple[ProcessSetup, ...]
    gone: tuple[int, ...]
    container: str
    is_root: bool
    may_set: bool
    suid_dumpable: int | None
    handler_there: bool | None
    systemd: CoredumpConf | None
    store: CoreFolder | None


def read(pids: Sequence[int]) -> SetupFacts:
    """Read the core dump setup of this process and of the given pids."""
    pattern = read_pattern()
    container = _container()
    ours = pattern is not None and pattern.kind is PatternKind.PROGRAM and not container
    found = {pid: _process(pid, pattern) for pid in dict.fromkeys(pids)}
    own = _process(os.getpid(), pattern)
    assert own is not None, "a process finds itself"
    return SetupFacts(
        pattern=pattern,
        own=own,
        ranks=tuple(process for process in found.values() if process is not None),
        gone=tuple(pid for pid, process in found.items() if process is None),
        container=container,
        is_root=os.geteuid() == 0,
        may_set=os.access(_PATTERN, os.W_OK),
        suid_dumpable=_number(machine.read_text("/proc/sys/fs/suid_dumpable")),
        handler_there=os.access(pattern.program, os.X_OK) if pattern is not None and ours else None,
        systemd=coredump_conf() if pattern is not None and ours and pattern.handler == "systemd-coredump" else None,
        store=core_folder(pattern.folders[0]) if pattern is not None and ours and pattern.folders else None,
    )


def read_pattern() -> CorePattern | None:
    """Read core_pattern; None if the kernel lacks core dumps, or permission is denied."""
    text = machine.read_text(_PATTERN)
    uses_pid = machine.read_text(_USES_PID).strip() not in ("", "0")
    return parse_pattern(text.rstrip("\n"), uses_pid=uses_pid) if text else None


def parse_pattern(text: str, *, uses_pid: bool) -> CorePattern:
    """Parse a core_pattern; `uses_pid` is core_uses_pid."""
    letters = frozenset(re.findall(r"%(.)", text))
    if text.startswith("|"):
        return _piped(text, uses_pid, passes_limit="c" in letters)
    if text.startswith("@"):
        return CorePattern(text, uses_pid, PatternKind.SOCKET, program=text.lstrip("@"))
    if text == "/dev/null" or (not text and not uses_pid):
        return CorePattern(text, uses_pid, PatternKind.NOWHERE)
    kind = PatternKind.ABSOLUTE if text.startswith("/") else PatternKind.RELATIVE
    folder = text.partition("%")[0].rpartition("/")[0] or ("/" if kind is PatternKind.ABSOLUTE else "")
    return CorePattern(text, uses_pid, kind, folder=folder, unique=uses_pid or bool(letters & _PER_PROCESS))


def _piped(text: str, uses_pid: bool, *, passes_limit: bool) -> CorePattern:
    program = next(iter(text[1:].split()), "")
    if program in ("", *_DISCARDING):
        return CorePattern(text, uses_pid, PatternKind.NOWHERE, program=program)
    base = os.path.basename(program)
    name, folders = next((known for start, known in _HANDLERS.items() if base.startswith(start)), (base, ()))
    return CorePattern(text, uses_pid, PatternKind.PROGRAM, "", program, name, folders, passes_limit=passes_limit)


def core_folder(
    path: str, seen: str = "", name: str = "", user: int = 0, groups: frozenset[int] = frozenset()
) -> CoreFolder:
    """Check a folder, through the path `seen`, for a process that would write its core there.

    `name`: the file name of the core, if known; `user` and `groups`: effective ids of the process.
    """
    try:
        state, disk = os.stat(seen or path), os.statvfs(seen or path)
    except OSError as error:
        return CoreFolder(path, not isinstance(error, FileNotFoundError), False)
    if not state.st_nlink:  # removed working directory
        return CoreFolder(path, False, False)
    writable = stat.S_ISDIR(state.st_mode) and not disk.f_flag & os.ST_RDONLY and _may_write(state, user, groups)
    blocked_by = _blocked_by(os.path.join(seen or path, name), user, state) if name else ""
    return CoreFolder(path, True, writable, disk.f_bavail * disk.f_frsize, state.st_dev, blocked_by)


def _may_write(state: os.stat_result, user: int, groups: frozenset[int]) -> bool:
    if user == 0:
        return True
    shift = 6 if state.st_uid == user else 3 if state.st_gid in groups else 0
    return state.st_mode >> shift & 3 == 3


def _blocked_by(path: str, user: int, folder: os.stat_result) -> str:
    """Describe an existing file that the kernel cannot replace with the core (do_coredump, fs/coredump.c)."""
    try:
        state = os.lstat(path)
    except OSError:
        return ""
    if stat.S_ISDIR(state.st_mode):
        return "a folder"
    sticky = folder.st_mode & stat.S_ISVTX
    return "another user's file" if sticky and user not in (0, state.st_uid, folder.st_uid) else ""


def coredump_conf(root: str = "") -> CoredumpConf:
    """Read the settings of systemd-coredump below `root`. Drop-ins override the main file, in order of their names."""
    main = next(
        (path for path in (f"{root}{top}/{_COREDUMP_CONF}" for top in _SYSTEMD_FOLDERS) if os.path.isfile(path)), ""
    )
    drop_ins: dict[str, str] = {}
    for top in reversed(_SYSTEMD_FOLDERS):
        drop_ins.update({os.path.basename(path): path for path in glob.glob(f"{root}{top}/{_COREDUMP_CONF}.d/*.conf")})
    settings: dict[str, str] = {}
    for path in (main, *(drop_ins[name] for name in sorted(drop_ins))):
        settings.update(re.findall(r"^\s*(Storage|ExternalSizeMax)\s*=\s*(\S+)", machine.read_text(path), re.MULTILINE))
    keeps = settings.get("Storage", "external") != "none"
    return CoredumpConf(keeps, _size(settings.get("ExternalSizeMax", "")))


def _process(pid: int, pattern: CorePattern | None) -> ProcessSetup | None:
    status = machine.read_text(f"/proc/{pid}/status")
    if not status:
        return None
    variables = procs.variables(pid) or {}
    found = rank_identity.identify(variables)
    return ProcessSetup(
        pid=pid,
        rank=found.rank if found else None,
        command=machine.command_line(pid),
        launchers=tuple(found.launcher for found in rank_identity.identify_all(variables)),
        unit=_unit(pid),
        contained=_contained(pid),
        limits=_limits(pid),
        dumpable=_dumpable(pid, status),
        filter=_number(machine.read_text(f"/proc/{pid}/coredump_filter"), 16),
        memory_bytes=_memory(status),
        folder=_folder_of(pid, status, pattern),
    )


def _limits(pid: int) -> Limits | None:
    rows = dict(re.findall(r"^Max (core file|file) size\s+(\w+\s+\w+)", machine.read_text(f"/proc/{pid}/limits"), re.M))
    if len(rows) < 2:
        return None
    core, hard = map(_number, rows["core file"].split())
    return Limits(core, hard, _number(rows["file"].split()[0]))


def _dumpable(pid: int, status: str) -> bool | None:
    """Return whether the kernel would dump this process; it refuses after setuid or for an unreadable program."""
    if pid == os.getpid():
        import ctypes

        return int(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)) == 1
    user = _ids(status, "Uid")[1]
    try:
        # Files in /proc/PID of an undumpable process belong to root, see proc(5).
        owner = os.stat(f"/proc/{pid}/stat").st_uid
    except OSError:
        return None
    return owner == user if user else None


def _memory(status: str) -> int | None:
    found = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE)
    return sum(map(int, found)) * 1024 if found else None


def _folder_of(pid: int, status: str, pattern: CorePattern | None) -> CoreFolder | None:
    """Check the folder as seen by the process: its working directory, or the path below its own root."""
    if pattern is None or pattern.kind not in (PatternKind.RELATIVE, PatternKind.ABSOLUTE):
        return None
    relative = pattern.kind is PatternKind.RELATIVE
    try:
        shown = os.path.join(os.readlink(f"/proc/{pid}/cwd") if relative else "/", pattern.folder).rstrip("/") or "/"
    except OSError:
        return None
    seen = f"/proc/{pid}/{'cwd' if relative else 'root'}/{pattern.folder.lstrip('/')}"
    user, groups = _ids(status, "Uid")[1], frozenset(_ids(status, "Gid") + _ids(status, "Groups"))
    name = "" if "%" in pattern.text or pattern.uses_pid else os.path.basename(pattern.text)
    return core_folder(shown, seen, name, user, groups)


def _unit(pid: int) -> str:
    paths = [line.rpartition(":")[2] for line in machine.read_text(f"/proc/{pid}/cgroup").splitlines()]
    return next((name for name in map(os.path.basename, paths) if name.endswith(".service")), "")


def _contained(pid: int) -> bool | None:
    namespace = machine.link_target(f"/proc/{pid}/ns/pid")
    return namespace != _FIRST_PID_NAMESPACE if namespace else None


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
    except ValueError:  # "unlimited", or empty
        return None


def _size(text: str) -> int | None:
    """Parse a size of systemd.syntax(7), "2G", into bytes; None for infinity."""
    found = re.fullmatch(r"(\d+)([BKMGTPE]?)", text)
    return int(found[1]) << 10 * _UNITS[found[2]] if found else None
