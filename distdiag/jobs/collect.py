"""Facts of one node: the processes that may belong to a job. Nothing is judged here."""

from __future__ import annotations

import os
import re
import time
from dataclasses import field, replace

from distdiag.facts import deadlines, machine
from distdiag.facts.network.sockets import TcpTables
from distdiag.facts.process import procs, ptrace_permission
from distdiag.facts.process.activity import Activity  # noqa: TC001 - decoded by its annotations
from distdiag.facts.process.rank_identity import Identity, identify
from distdiag.facts.stacks.stack_types import Sample  # noqa: TC001
from distdiag.facts.stacks.thread_places import Places  # noqa: TC001
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts.process.procs import Proc

_PATIENCE_S = 1.0


@record
class Ask:
    """`pids`: included in any case. `user`: only this user's processes; "": of all users."""

    pids: Sequence[int] = ()
    user: str = ""


@record
class Process:
    """One process that may belong to a job.

    `place`: the rank in its environment; None without one, or (`hidden`) if unreadable. `job`: the variables that
    distinguish jobs of its launcher. `above`: ancestors, nearest first. `started_s`: after boot. `network`: its network
    namespace; `asked`: its pid was requested. `store`: without a rank itself, it started ranks and has a connection at
    their MASTER_PORT. `connections`: of a process with torch and no rank, see procs.connections. `visible_gpus`: the
    values of its *_VISIBLE_DEVICES, each selecting from the previous one.
    """

    pid: int
    parent: int
    above: tuple[int, ...] = ()
    user: int = -1
    state: str = ""
    comm: str = ""
    command: str = ""
    kind: str = ""
    python: bool = False
    torch: bool = False
    gpu: bool = False
    hidden: bool = False
    place: Identity | None = None
    job: dict[str, str] = field(default_factory=dict)
    started_s: float = 0.0
    network: str = ""
    asked: bool = False
    store: bool = False
    connections: tuple[str, ...] = ()
    visible_gpus: tuple[str, ...] = ()


@record
class Processes:
    """The processes of one node.

    `asked_missing`: requested pids that do not exist; `asked_unseen`: they exist, but /proc hides them from this user
    (hidepid, or another PID namespace). `shows_others`: /proc has no hidepid for this user. `uptime_s`: time since boot
    at the reading. `closed`: the user of each unreadable Python process not otherwise known to belong to a job.
    """

    host: str
    user: int = -1
    ptrace_scope: int | None = None
    may_trace: bool = False
    processes: tuple[Process, ...] = ()
    asked_missing: tuple[int, ...] = ()
    asked_unseen: tuple[int, ...] = ()
    shows_others: bool = True
    uptime_s: float = 0.0
    closed: tuple[str, ...] = ()


@record
class Watched:
    """All samples of one process, in order of time.

    `hints`: (file, line, "gpu" or "comm") if the source line of an innermost frame waits for a GPU or a Work. `places`:
    of its threads in the libraries, at the first and last sample. `activity`: beside its main thread between the
    samples; None after one sample. `build_locks`: lock files of torch's C++ extensions, if it waits for one.
    """

    pid: int
    samples: tuple[Sample, ...]
    hints: tuple[tuple[str, int, str], ...] = ()
    places: tuple[Places, ...] = ()
    activity: Activity | None = None
    build_locks: tuple[str, ...] = ()


def facts(ask: Ask) -> Processes:
    """Find the processes that may belong to a job."""
    requested = set(ask.pids)
    table = procs.table()
    children = procs.children_of(table.values())
    words, mute = deadlines.each(table, procs.command_words, patience_s=_PATIENCE_S)
    ours = _ourselves(table, children, words) - requested
    tcp = TcpTables()
    read, late = deadlines.each(
        [pid for pid in words if pid not in ours],
        lambda pid: _read(table[pid], table, words[pid], tcp, asked=pid in requested),
        patience_s=_PATIENCE_S,
    )
    found = {pid: process for pid, process in read.items() if process is not None}
    locked = [_locked(table[pid], table) for pid in (*mute, *late)]
    _add_neighbours(found, table, children, {*ours, *mute, *late})
    _add_hidden(found, table, children, {*ours, *mute, *late})
    parents = {process.parent for process in found.values() if process.place is not None}
    found.update((process.pid, process) for process in locked if process.parent in parents or process.pid in requested)
    found.update((process.pid, replace(process, store=True)) for process in _with_store(found, tcp))
    if ask.user:
        owner = _user_id(ask.user)
        found = {pid: process for pid, process in found.items() if process.user == owner or pid in requested}
    return Processes(
        host=machine.host_name(),
        user=os.geteuid(),
        ptrace_scope=ptrace_permission.ptrace_scope(),
        may_trace=ptrace_permission.may_trace(),
        processes=tuple(found.values()),
        asked_missing=tuple(sorted(pid for pid in requested - table.keys() if not _is_alive(pid))),
        asked_unseen=tuple(sorted(pid for pid in requested - table.keys() if _is_alive(pid))),
        shows_others=os.path.exists("/proc/1/stat"),  # with hidepid=1 the folder exists but cannot be searched
        uptime_s=time.clock_gettime(time.CLOCK_BOOTTIME),
        closed=tuple(
            _user_name(pid)
            for pid, own in words.items()
            if pid not in found and pid not in ours and _is_python(own) and _is_unread(pid, table)
        ),
    )


def _is_alive(pid: int) -> bool:
    """Test whether a process exists by signal 0, which works despite hidepid."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _with_store(found: dict[int, Process], tcp: TcpTables) -> list[Process]:
    """List possible ranks without RANK: processes with torch that started ranks and connect to the same MASTER_PORT."""
    ports: dict[int, set[int]] = {}
    for process in found.values():
        port = process.job.get("MASTER_PORT", "")
        if process.place is not None and port.isascii() and port.isdigit():
            ports.setdefault(process.parent, set()).add(int(port))
    above = [(found[pid], own) for pid, own in ports.items() if pid in found]
    return [
        process
        for process, own in above
        if process.place is None
        and process.torch
        and process.kind == ""
        and procs.has_connection(process.pid, own, tcp)
    ]


def _user_name(pid: int) -> str:
    import pwd

    owner = procs.owner(pid)
    try:
        return pwd.getpwuid(-1 if owner is None else owner).pw_name
    except (KeyError, OverflowError):
        return f"uid {owner}"


def _user_id(name: str) -> int:
    """Return the uid of a user on this node; -2, an invalid uid, if unknown."""
    import pwd

    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return -2


def _ourselves(table: dict[int, Proc], children: dict[int, list[int]], words: dict[int, list[str]]) -> set[int]:
    """List distdiag's own processes: ancestors and children of this one, and agents of other runs."""
    found = set(_above(os.getpid(), table))
    todo = [os.getpid(), *(pid for pid in words if _is_distdiag(words[pid]))]
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += [child for child in children.get(pid, ()) if child not in found]
    return found


def _is_distdiag(words: list[str]) -> bool:
    """Return whether this is another distdiag pyspy-all or an agent; the ranks of a gpu-test count as ranks."""
    program = [os.path.basename(word) for word in words[:4]]
    return "distdiag-agent" in words[-3:] or ("distdiag" in program and "pyspy-all" in words[:8])


def _locked(proc: Proc, table: dict[int, Proc]) -> Process:
    """Return the few facts readable without the memory map, which the kernel has locked."""
    return Process(
        pid=proc.pid,
        parent=proc.parent,
        above=tuple(_above(proc.pid, table)),
        state=proc.state,
        comm=proc.comm,
        command=proc.comm,
        kind="locked",
        hidden=True,
        started_s=proc.started / os.sysconf("SC_CLK_TCK"),
    )


def _read(proc: Proc, table: dict[int, Proc], words: list[str], tcp: TcpTables, *, asked: bool) -> Process | None:
    """Read a process; None if it shows no relation to a job."""
    if not words and proc.state != "Z":
        return None  # a kernel thread
    variables = procs.variables(proc.pid)
    place = place_of(variables or {})
    kind = _kind(proc, words)
    python = proc.state != "Z" and procs.is_python(proc.pid, words)
    mapped = (procs.maps(proc.pid) or "") if python else ""
    # Of a rank's processes, the one with torch loaded is the rank.
    torch = "libtorch" in mapped
    if place is None and not (asked or torch or kind == "launcher" or _is_titled(words)):
        return None
    process = _process(proc, table, words, variables, kind=kind, python=python, mapped=mapped)
    without_rank = place is None and torch and kind == ""
    return replace(process, asked=asked, connections=procs.connections(proc.pid, tcp) if without_rank else ())


def _process(
    proc: Proc,
    table: dict[int, Proc],
    words: list[str],
    variables: dict[str, str] | None,
    *,
    kind: str,
    python: bool,
    mapped: str,
) -> Process:
    owner = procs.owner(proc.pid)
    return Process(
        pid=proc.pid,
        parent=proc.parent,
        above=tuple(_above(proc.pid, table)),
        user=-1 if owner is None else owner,
        state=proc.state,
        comm=proc.comm,
        command=machine.command_line(proc.pid) or proc.comm,
        kind=kind,
        python=python,
        torch="libtorch" in mapped,
        gpu=python and procs.uses_gpu(proc.pid, mapped),
        hidden=variables is None and proc.state != "Z",
        place=place_of(variables or {}),
        job={name: value for name, value in (variables or {}).items() if name in _JOB_NAMES},
        started_s=proc.started / os.sysconf("SC_CLK_TCK"),
        network=machine.network_namespace(proc.pid),
        visible_gpus=_visible_gpus(variables or {}),
    )


def _visible_gpus(variables: dict[str, str]) -> tuple[str, ...]:
    """Return the variables in order: ROCR_VISIBLE_DEVICES applies first; HIP falls back to CUDA's variable."""
    of_runtime = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in variables else "CUDA_VISIBLE_DEVICES"
    return tuple(variables[name] for name in ("ROCR_VISIBLE_DEVICES", of_runtime) if name in variables)


def place_of(variables: dict[str, str]) -> Identity | None:
    """Return the rank in a process's environment, if any.

    Lightning's first rank on a node sets only its children's local ranks, which equal the ranks on the first node.
    """
    found = identify(variables)
    if found is not None or variables.get("NODE_RANK") != "0" or "MASTER_PORT" not in variables:
        return found
    known = identify({**variables, "RANK": variables.get("LOCAL_RANK", "")})
    return None if known is None else replace(known, launcher="Lightning")


_JOB_NAMES = (
    *("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"),
    *("OMPI_MCA_ess_base_jobid", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)


def _add_neighbours(
    found: dict[int, Process], table: dict[int, Proc], children: dict[int, list[int]], ours: set[int]
) -> None:
    """Add siblings of ranks: dead, unreadable, or still without torch.

    A Python by its command line counts; without torch, only one spawned by multiprocessing beside ranks.
    """
    ranks = [process for process in found.values() if process.parent > 1]
    placed = {process.parent for process in ranks if process.place is not None}
    spawning = {process.parent for process in ranks if process.kind == "spawned" and process.torch}
    for parent in placed | spawning:
        for pid in children.get(parent, ()):
            if pid in found or pid in ours:
                continue
            words = procs.command_words(pid)
            kind, variables = _kind(table[pid], words), procs.variables(pid)
            is_dead = table[pid].state == "Z" and parent in placed
            is_unread = _is_python(words) and variables is None and parent in placed
            if is_dead or is_unread or (kind == "spawned" and parent in spawning):
                found[pid] = _process(
                    table[pid], table, words, variables, kind=kind, python=_is_python(words), mapped=""
                )


def _add_hidden(
    found: dict[int, Process], table: dict[int, Proc], children: dict[int, list[int]], ours: set[int]
) -> None:
    """Add unreadable processes under launchers: the topmost Pythons of each child's tree.

    Without any, the child itself counts under torchrun and similar; under slurmstepd it is a step's shell or sleep.
    """
    for launcher in [process for process in found.values() if process.kind == "launcher"]:
        for child in children.get(launcher.pid, ()):
            if child in ours or not _is_unread(child, table):
                continue
            tree = _tree(child, children)
            if any(pid in found for pid in tree):  # a nested launcher, or readable after all
                continue
            pythons = [pid for pid in tree if _is_python(procs.command_words(pid)) and _is_unread(pid, table)]
            tops = [pid for pid in pythons if not set(pythons).intersection(_above(pid, table))]
            for pid in tops or ([child] if launcher.python else []):
                words = procs.command_words(pid)
                kind = kind_of(words, table[pid].comm)
                found[pid] = _process(table[pid], table, words, None, kind=kind, python=_is_python(words), mapped="")


def _tree(root: int, children: dict[int, list[int]]) -> list[int]:
    found, left = [], [root]
    while left:
        pid = left.pop()
        found.append(pid)
        left += children.get(pid, ())
    return found


def _is_unread(pid: int, table: dict[int, Proc]) -> bool:
    is_closed = table[pid].state != "Z" and procs.variables(pid) is None
    return is_closed and os.path.exists(f"/proc/{pid}")  # it may have exited in between


def _is_python(words: list[str]) -> bool:
    return bool(words) and os.path.basename(words[0]).startswith("python")


def _is_titled(words: list[str]) -> bool:
    """Return whether setproctitle wrote this command line, as in "sglang::scheduler_TP1"."""
    return bool(words) and _TITLE.match(words[0]) is not None


_TITLE = re.compile(r"[A-Za-z][\w-]*::\w")


def _kind(proc: Proc, words: list[str]) -> str:
    """Classify a process; children of a fork server still have its command line."""
    kind = kind_of(words, proc.comm)
    is_forked = kind == "tracker" and "forkserver" in " ".join(words[:8]) and procs.command_words(proc.parent) == words
    return "spawned" if is_forked else kind


def kind_of(words: list[str], comm: str) -> str:
    """Classify by command line and name: launcher, data-worker, compile-worker, tracker, spawned; else ""."""
    line = " ".join(words[:8])
    base = os.path.basename(words[0]) if words else comm
    if comm == "pt_data_worker":
        return "data-worker"
    if "multiprocessing.resource_tracker" in line or "multiprocessing.forkserver" in line:
        return "tracker"
    if "torch/_inductor/compile_worker" in line or "torch._inductor.compile_worker" in line:
        return "compile-worker"
    if "multiprocessing.spawn import spawn_main" in line:
        return "spawned"
    script = next((os.path.basename(word) for word in words[1:4] if not word.startswith("-")), "")
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if base in _LAUNCHERS or base.startswith("slurmstepd") or comm == "pt_elastic":
        return "launcher"
    if base.startswith("python") and (script in _LAUNCHERS or module in _LAUNCHING_MODULES):
        return "launcher"
    return ""


_LAUNCHERS = (
    *("torchrun", "accelerate", "deepspeed", "srun", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"),
    *("mpirun.openmpi", "mpiexec.openmpi", "mpirun.mpich", "mpiexec.mpich", "orterun", "orted", "prted", "prterun"),
    *("jsrun", "flux", "slurmstepd", "horovodrun", "strace"),
)
_LAUNCHING_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher.launch",
    "accelerate.commands.launch",
)


def _above(pid: int, table: dict[int, Proc]) -> list[int]:
    found = []
    while pid in table and (parent := table[pid].parent) > 0 and parent not in found:
        found.append(parent)
        pid = parent
    return found
