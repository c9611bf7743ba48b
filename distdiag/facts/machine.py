"""Facts of one machine from /proc and /sys: memory, shared memory, process states."""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

STOPPED = ("T", "t")
"""States of a process that stays stopped until resumed, see proc(5)."""
_STATES = {
    "T": "stopped (SIGSTOP or a suspended job)",
    "t": "stopped by a tracer",
    "D": "waiting in the kernel (D)",
}
_SECRET = re.compile(r"(?i)([\w-]*(?:token(?!s|iz)|secret|passw|api[-_]?key|credential|auth)[\w-]*(?:=|\s+))(\S+)")
_LIKELY_KEY = re.compile(r"\b(?:hf_|sk-|ghp_|AKIA|xox[bp]-)[\w-]{8,}")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASS")
_LONGEST_VALUE = 200


# Not dataclasses, see distdiag.agent.boot: every agent imports this at its start.
class ProcessState:
    """State letter of proc(5) (R S D T t Z X), empty if the process exited, and the kernel function it waits in."""

    def __init__(self, letter: str, wait_channel: str) -> None:
        self.letter = letter
        self.wait_channel = wait_channel


class Work:
    """Total work of a process: seconds in which a thread ran or waited for a core, and bytes read."""

    def __init__(self, busy_s: float = 0.0, read_bytes: int = 0) -> None:
        self.busy_s = busy_s
        self.read_bytes = read_bytes


def host_name() -> str:
    """Return this node's name, up to the first dot."""
    return os.uname().nodename.partition(".")[0] or "this-node"


def cpu_model() -> str:
    """Return the name of the first CPU in /proc/cpuinfo; empty if it has none (Arm)."""
    match = re.search(r"^model name\s*: (.+)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else ""


def available_memory_bytes() -> int | None:
    """Return the memory usable without swapping, within this cgroup's limit; None if unreadable."""
    system = _meminfo("MemAvailable")
    left = [size for size in (system, _cgroup_left_bytes()) if size is not None]
    return min(left) if left else None


def variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return this process's variables with these prefixes, without secrets, long values truncated."""
    wanted = (name for name in sorted(os.environ) if name.startswith(prefixes))
    return {name: os.environ[name][:_LONGEST_VALUE] for name in wanted if not any(word in name for word in _SECRETS)}


def total_memory_bytes() -> int | None:
    """Return the memory of the machine; None if unreadable."""
    return _meminfo("MemTotal")


def shared_memory_bytes() -> tuple[int, int] | None:
    """Return free and total bytes of /dev/shm; None without one."""
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return None
    return shm.f_bavail * shm.f_frsize, shm.f_blocks * shm.f_frsize


def oom_kills() -> int | None:
    """Count the kernel's OOM kills since boot; None if unreadable."""
    for line in read_text("/proc/vmstat").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def process_state(pid: int) -> ProcessState:
    """Read the current state of a process."""
    stat = read_text(f"/proc/{pid}/stat")
    letter = stat.rpartition(")")[2].split()[:1]
    return ProcessState(letter[0] if letter else "", read_text(f"/proc/{pid}/wchan").strip("0"))


def work_of(pid: int) -> Work:
    """Read the total work of a process; zeros if the kernel does not count it (schedstat and io of proc(5))."""
    threads = names_in(f"/proc/{pid}/task")
    columns = [read_text(f"/proc/{pid}/task/{thread}/schedstat").split() for thread in threads]
    busy_ns = sum(int(ran) + int(waited) for ran, waited, *_ in columns)
    read = re.search(r"^rchar: (\d+)", read_text(f"/proc/{pid}/io"), re.MULTILINE)
    return Work(busy_ns / 1e9, int(read[1]) if read is not None else 0)


def waited_for_cores_s() -> float:
    """Return the total time that threads of this process waited for a core; 0 if the kernel does not count it."""
    threads = names_in("/proc/self/task")
    columns = [read_text(f"/proc/self/task/{thread}/schedstat").split() for thread in threads]
    return sum(int(column[1]) for column in columns if len(column) > 1) / 1e9


def why_it_stands_still(letter: str) -> str:
    """Describe a state that explains a standstill; empty for any other."""
    return _STATES.get(letter, "")


def network_namespace(pid: int) -> str:
    """Name a process's network namespace, "net:[4026531840]"; empty if unreadable."""
    return link_target(f"/proc/{pid}/ns/net")


def ancestors(pid: int) -> list[str]:
    """List the names of a process's ancestors, the nearest first."""
    names = []
    for _ in range(64):
        parent = parent_of(pid)
        if parent is None:
            break
        names.append(read_text(f"/proc/{parent}/comm").strip())
        pid = parent
    return names


def parent_of(pid: int) -> int | None:
    """Return a process's parent; None at the top, or if it exited."""
    columns = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(columns[1]) if len(columns) > 1 and columns[1] not in ("0", str(pid)) else None


def command_line(pid: int) -> str:
    """Return a process's command, at most 120 characters: without arguments after the third, and without secrets."""
    words = read_text(f"/proc/{pid}/cmdline").split("\0")
    words = [word for word in words if word]
    if "-c" in words[:3]:
        words[words.index("-c") + 1 : words.index("-c") + 2] = ["..."]  # omit a program passed by -c
    # Redact before cutting: the name of an option and its secret may be on both sides of the cut.
    shown = redacted(" ".join(words[:4])) + (" ..." if len(words) > 4 else "")
    return shown if len(shown) <= 120 else shown[:117] + "..."


def redacted(text: str) -> str:
    """Mask arguments that look like secrets."""
    return _LIKELY_KEY.sub("***", _SECRET.sub(r"\1***", text))


def user_name(number: int) -> str:
    """Return a user's name, or "uid 1000" if unknown here."""
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


def read_text(path: str) -> str:
    """Read a small file of /proc or /sys; empty if missing or unreadable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def names_in(folder: str) -> list[str]:
    """List a folder; empty if missing or unreadable."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def link_target(path: str) -> str:
    """Return the target of a link; empty if missing or unreadable."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def modified_s(path: str) -> float:
    """Return a file's modification time, in seconds since 1970; 0 if missing."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def status_words(process: object, field: str) -> list[str]:
    """Return the words of a field of /proc/PROCESS/status; empty if missing. `process`: "self", 12, or "12/task/13"."""
    found = re.search(rf"^{field}:(.*)$", read_text(f"/proc/{process}/status"), re.MULTILINE)
    return found[1].split() if found is not None else []


def throttled_s() -> float:
    """Return the seconds for which a CPU quota of this process's cgroups (v1 and v2) throttled it."""
    seconds = [0.0]
    for folder in (*cgroup_folders(""), *cgroup_folders("cpu")):
        stat = dict(line.split() for line in read_text(f"{folder}/cpu.stat").splitlines())
        seconds.append(int(stat.get("throttled_usec", 0)) / 1e6 + int(stat.get("throttled_time", 0)) / 1e9)
    return max(seconds)


def cgroup_folders(controller: str) -> Iterator[str]:
    """Yield the folder of our cgroup and its parents; an empty controller means the unified hierarchy."""
    for line in read_text("/proc/self/cgroup").splitlines():
        controllers, path = line.split(":", 2)[1:]
        if controllers != controller and controller not in controllers.split(","):
            continue
        root = f"/sys/fs/cgroup/{controllers}".rstrip("/")
        folder = root + path.rstrip("/")
        while folder.startswith(root):
            yield folder
            folder = folder.rpartition("/")[0]


def _meminfo(name: str) -> int | None:
    for line in read_text("/proc/meminfo").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_left_bytes() -> int | None:
    """Return the bytes left below the tightest memory limit of our cgroups (v1 and v2) and their parents."""
    left = []
    for controller, names in (("", ("max", "current")), ("memory", ("limit_in_bytes", "usage_in_bytes"))):
        for folder in cgroup_folders(controller):
            limit, used = (read_text(f"{folder}/memory.{name}").strip() for name in names)
            if limit.isdigit() and used.isdigit():
                left.append(max(0, int(limit) - int(used)))
    return min(left) if left else None
