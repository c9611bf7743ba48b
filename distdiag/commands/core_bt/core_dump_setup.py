"""Whether a crash would leave a core with stacks, and what to set if not: the findings of --setup. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING

from distdiag.commands.core_bt.types import COMMAND
from distdiag.diagnosis.wording import format_hosts
from distdiag.facts.core.setup import PatternKind
from distdiag.knowledge.crashes import core_limit
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distdiag.facts.core.setup import CoreFolder, CorePattern, ProcessSetup, SetupFacts

_MAX_EVIDENCE = 6
_A_CORE_BYTES = 1 << 30
"""Space for a core of an unknown process."""
_LEAST_BYTES = 4096
"""A smaller core does not even have its notes; systemd-coredump keeps none then."""
_STACKS_AND_HEAP = 1
"""Bit of coredump_filter: private memory without a file."""
_ALL_CORES = "/var/crash/core.%e.%h.%p"
_FILES = (PatternKind.RELATIVE, PatternKind.ABSOLUTE)


@dataclass(frozen=True)
class _Node:
    """What the findings of a node are made of: `processes` are its ranks, else distdiag itself."""

    facts: SetupFacts
    pattern: CorePattern
    processes: tuple[ProcessSetup, ...]
    alone: bool

    @property
    def sudo(self) -> str:
        """The prefix of commands for the administrator."""
        return "" if self.facts.is_root else "sudo "

    def subject(self, some: Sequence[ProcessSetup]) -> str:
        """Format processes for a sentence, without numbers, so that it is the same for several nodes."""
        if not self.facts.ranks:
            return "processes started here"
        return "ranks" if len(some) == len(self.processes) else "some ranks"

    def name(self, process: ProcessSetup) -> str:
        """Format one process for a piece of evidence."""
        if not self.facts.ranks:
            return "here"
        by_pid = f"pid {process.pid}"
        return f"rank {process.rank} ({by_pid})" if process.rank is not None else f"{by_pid} ({process.command})"

    def finding(
        self, id_: str, level: Level, title: str, about: Sequence[ProcessSetup] = (), **rest: object
    ) -> Finding:
        """Return a finding about processes, with their ranks and ids if they are ranks."""
        about = about if self.facts.ranks else ()
        ranks = tuple(process.rank for process in about if process.rank is not None)
        pids = tuple(process.pid for process in about) if self.alone else ()
        where = Where(ranks=ranks, pids=pids)
        return Finding(id=f"{COMMAND}.setup-{id_}", level=level, title=title, where=where, **rest)  # type: ignore[arg-type]


def setup_findings(setups: Mapping[str, SetupFacts]) -> list[Finding]:
    """Judge the facts of all nodes, by their names; what is the same on several of them is one finding."""
    folded: dict[tuple[str, Level, str, str, Fix | None], list[tuple[str, Finding]]] = {}
    for host, facts in setups.items():
        for found in _of_node(facts, alone=len(setups) == 1):
            folded.setdefault((found.id, found.level, found.title, found.detail, found.fix), []).append((host, found))
    return [_joined(same, len(setups)) for same in folded.values()]


def _joined(same: Sequence[tuple[str, Finding]], nodes: int) -> Finding:
    ranks = sorted({rank for _, found in same for rank in found.where.ranks})
    first = same[0][1]
    evidence = tuple(dict.fromkeys(line for _, found in same for line in found.evidence))[:_MAX_EVIDENCE]
    where = Where(hosts=tuple(host for host, _ in same), ranks=tuple(ranks), pids=first.where.pids)
    names = f"all {nodes} hosts" if len(same) == nodes else format_hosts(where.hosts)
    return replace(first, title=f"{names}: {first.title}" if nodes > 1 else first.title, where=where, evidence=evidence)


def _of_node(facts: SetupFacts, *, alone: bool) -> Iterator[Finding]:
    processes = facts.ranks or (facts.own,)
    if facts.pattern is None:
        title = "unknown whether the kernel writes cores: /proc/sys/kernel/core_pattern is unreadable"
        yield Finding(id=f"{COMMAND}.setup-pattern", level=Level.UNKNOWN, title=title)
        return
    node = _Node(facts, facts.pattern, processes, alone)
    judges: tuple[Callable[[_Node], Iterator[Finding]], ...]
    judges = (_nowhere, _handler, _limit, _folder, _kept, _overwrites, _space, _unread)
    found = [finding for judge in judges for finding in judge(node)]
    yield from found
    if not {Level.FAIL, Level.UNKNOWN} & {finding.level for finding in found}:
        yield node.finding("ready", Level.INFO, f"a crash leaves a core: {_goes_to(node)}")


def _goes_to(node: _Node) -> str:
    facts, pattern = node.facts, node.pattern
    if pattern.kind is PatternKind.ABSOLUTE:
        return f"as {pattern.text}"
    if pattern.kind is PatternKind.RELATIVE:
        return f"as {pattern.text}{'.PID' if pattern.uses_pid else ''} in the working directory of the process"
    if facts.container:
        return f"{pattern.handler or pattern.program} receives it, on the host of this container"
    if pattern.handler == "systemd-coredump":
        return "systemd-coredump keeps it for a few days (coredumpctl list)"
    return f"{pattern.handler or pattern.program} receives it" + (f" ({pattern.folders[0]})" if pattern.folders else "")


def _set_pattern(node: _Node) -> Fix:
    note = "this changes the whole machine, with its containers, until the next reboot"
    if node.facts.container and not node.facts.may_set:
        return Fix(text=f"core_pattern can only be changed on the host ({note})")
    return Fix(
        text=f"write cores to a directory, each under a unique name; {note}",
        commands=(
            f"{node.sudo}mkdir -p -m 1777 {_ALL_CORES.rpartition('/')[0]}",
            f"echo '{_ALL_CORES}' | {node.sudo}tee /proc/sys/kernel/core_pattern",
        ),
    )


def _nowhere(node: _Node) -> Iterator[Finding]:
    if node.pattern.kind is PatternKind.NOWHERE:
        title = f"core dumps are discarded: core_pattern is {node.pattern.text or 'empty'}"
        yield node.finding("pattern", Level.FAIL, title, fix=_set_pattern(node))


def _handler(node: _Node) -> Iterator[Finding]:
    facts, pattern = node.facts, node.pattern
    largest = max((process.memory_bytes or 0 for process in node.processes), default=0)
    if pattern.kind is PatternKind.PROGRAM and facts.handler_there is False:
        title = f"core dumps are lost: core_pattern pipes to {pattern.program}, which does not exist"
        yield node.finding("handler", Level.FAIL, title, fix=_set_pattern(node))
    elif pattern.kind in (PatternKind.PROGRAM, PatternKind.SOCKET) and facts.container:
        title = f"cores leave this container ({facts.container}): {_goes_to(node)}"
        yield node.finding("handler", Level.INFO, title, detail=_on_the_host(pattern))
    elif facts.systemd is not None and not facts.systemd.keeps:
        conf = Fix(text="set Storage=external in /etc/systemd/coredump.conf", commands=("coredumpctl list",))
        yield node.finding("handler", Level.FAIL, "systemd-coredump keeps no core (Storage=none)", fix=conf)
    elif facts.systemd is not None and facts.systemd.most_bytes is not None and facts.systemd.most_bytes < largest:
        title = "systemd-coredump truncates or drops cores of this size (ExternalSizeMax)"
        conf = Fix(text="set ExternalSizeMax=infinity and ProcessSizeMax=infinity in /etc/systemd/coredump.conf")
        lines = (f"ExternalSizeMax is {_size(facts.systemd.most_bytes)}, the largest rank has {_size(largest)}",)
        yield node.finding("handler", Level.WARN, title, fix=conf, evidence=lines)


def _on_the_host(pattern: CorePattern) -> str:
    if pattern.handler == "WSL":
        return "they are in %LOCALAPPDATA%\\Temp\\wsl-crashes of Windows (here below /mnt/c/Users)"
    return f"on the host, they are in {' and '.join(pattern.folders)}" if pattern.folders else ""


def _limit(node: _Node) -> Iterator[Finding]:
    """Judge RLIMIT_CORE, which the kernel obeys for files only. Programs may get it (%c), or, as in Debian's pattern
    for systemd-coredump, a number instead; systemd-coredump obeys what it gets."""
    pattern = node.pattern
    if pattern.kind not in _FILES and not pattern.passes_limit:
        return
    obeyed = pattern.kind in _FILES or pattern.handler == "systemd-coredump"
    none = [process for process in node.processes if _limited(process, _LEAST_BYTES)]
    cut = [
        process for process in node.processes if process not in none and _limited(process, process.memory_bytes or 0)
    ]
    if none:
        title = f"a crash of {node.subject(none)} leaves no core: the core size limit is 0 (ulimit -c)"
        if not obeyed:
            title = (
                f"a crash of {node.subject(none)} may leave no core: {pattern.handler} is passed a core size limit of 0"
            )
        level = Level.FAIL if obeyed else Level.WARN
        yield node.finding("limit", level, title, none, evidence=_limits(node, none), fix=_raise(node, none))
    if cut:
        less = "the core size limit is below the memory in use"
        title = f"the core of {node.subject(cut)} would be truncated: {less}"
        yield node.finding("limit", Level.WARN, title, cut, evidence=_limits(node, cut), fix=_raise(node, cut))


def _limited(process: ProcessSetup, needed: int) -> bool:
    limits = process.limits
    return limits is not None and (_below(limits.core, needed) or _below(limits.file, needed))


def _below(limit: int | None, needed: int) -> bool:
    return limit is not None and limit < needed


def _limits(node: _Node, some: Iterable[ProcessSetup]) -> tuple[str, ...]:
    rows = (
        f"{node.name(process)}: core file size {_size(limits.core)} (hard {_size(limits.core_hard)}), "
        f"file size {_size(limits.file)}, memory in use {_size(process.memory_bytes or 0)}"
        for process in some
        if (limits := process.limits) is not None
    )
    return tuple(rows)[:_MAX_EVIDENCE]


def _raise(node: _Node, some: Sequence[ProcessSetup]) -> Fix:
    launchers = [name for process in some for name in (*process.launchers, *(("systemd",) if process.unit else ()))]
    container = [node.facts.container] if node.facts.container else []
    known = [core_limit(name) for name in dict.fromkeys([*(launchers or ["shell"]), *container])]
    words = list(dict.fromkeys(limit.fix for limit in known))
    commands = [command for limit in known for command in limit.commands]
    limits = [(process.limits, process.memory_bytes or _LEAST_BYTES) for process in some]
    if any(limit is not None and limit.core_hard is not None for limit, _ in limits):
        words.append("the hard limit is too low: only root can raise it (/etc/security/limits.conf for logins)")
    if any(limit is not None and _below(limit.file, needed) for limit, needed in limits):
        words.append("raise the file size limit too")
        commands.insert(0, "ulimit -f unlimited")
    if node.facts.slurm_propagates is False and "srun" in launchers:
        words.append("slurm.conf here does not propagate it by default")
    if node.facts.ranks:
        words[0] = f"for running ranks, use prlimit (as their user); for the next start: {words[0]}"
        pids = " ".join(str(process.pid) for process in some)
        now = [f"for pid in {pids}; do prlimit --pid $pid --core=unlimited:; done"] if node.alone else []
        commands = [*now, *commands]
    return Fix(text="; ".join(words), commands=tuple(dict.fromkeys(commands)))


def _folder(node: _Node) -> Iterator[Finding]:
    """Judge the folder of each process: does it exist, may the process write, and is the name free."""
    problems: dict[str, list[ProcessSetup]] = {}
    for process in node.processes:
        if process.folder is not None and (problem := _problem(process.folder, node.pattern.text)):
            problems.setdefault(problem, []).append(process)
    for problem, some in problems.items():
        title = f"no core of {node.subject(some)} can be written: {problem}"
        yield node.finding("place", Level.FAIL, title, some, fix=_other_folder(node))


def _problem(folder: CoreFolder, name: str) -> str:
    if not folder.exists:
        return f"{folder.path} does not exist"
    if not folder.writable:
        return f"its user cannot write to {folder.path}"
    file = f"{folder.path.rstrip('/')}/{name.rpartition('/')[2]}"
    return f"{folder.blocked_by} of that name is not replaced: {file}" if folder.blocked_by else ""


def _other_folder(node: _Node) -> Fix:
    if node.pattern.kind is PatternKind.ABSOLUTE:
        path = quote(node.pattern.folder)
        contained = any(process.contained for process in node.processes)
        inside = " (inside the container, if it runs in a container)" if contained else ""
        commands = (f"{node.sudo}mkdir -p {path}", f"{node.sudo}chmod 1777 {path}")
        return Fix(text=f"create the directory, writable by every user{inside}", commands=commands)
    other = _set_pattern(node)
    return Fix(text=f"start the job in another directory; or {other.text}", commands=other.commands)


def _kept(node: _Node) -> Iterator[Finding]:
    """Judge what the kernel keeps from a core for safety, and what it leaves out of one."""
    secret = [process for process in node.processes if process.dumpable is False]
    if secret and node.facts.suid_dumpable != 1:
        title = f"the kernel writes no core of {node.subject(secret)}: not dumpable"
        detail = "The process changed its user after its start, or cannot read its own program."
        fix = Fix(text="start it as that user from the beginning (runuser, setpriv), not as root that switches later")
        yield node.finding("dumpable", Level.FAIL, title, secret, detail=detail, fix=fix)
    bare = [
        process for process in node.processes if process.filter is not None and not process.filter & _STACKS_AND_HEAP
    ]
    if bare:
        title = f"a core of {node.subject(bare)} has neither stacks nor heap (coredump_filter)"
        fix = Fix(text="in the shell that starts the job", commands=("echo 0x33 > /proc/self/coredump_filter",))
        yield node.finding("filter", Level.FAIL, title, bare, fix=fix)


def _overwrites(node: _Node) -> Iterator[Finding]:
    if node.pattern.kind not in _FILES or node.pattern.unique:
        return
    title = f"each core overwrites the previous core: all processes in a directory write {node.pattern.text}"
    if node.pattern.kind is PatternKind.ABSOLUTE:
        title = f"each core overwrites the previous core: all processes write {node.pattern.text}"
    fix = Fix(
        text="start each rank in its own directory; or add the pid to the name, on the whole machine until "
        "the next reboot",
        commands=(f"echo 1 | {node.sudo}tee /proc/sys/kernel/core_uses_pid",),
    )
    if node.facts.container and not node.facts.may_set:
        fix = Fix(text="start each rank in its own directory; the names can only be changed on the host")
    folders = [process.folder for process in node.facts.ranks if process.folder is not None]
    same = {(folder.path, folder.filesystem) for folder in folders}
    detail = "Ranks here share a directory." if len(same) < len(node.facts.ranks) else ""
    yield node.finding("overwrites", Level.WARN, title, detail=detail, fix=fix)


def _space(node: _Node) -> Iterator[Finding]:
    """Compare what is free where cores go with what the processes have in memory, by file system."""
    disks: dict[int | None, list[tuple[CoreFolder, int]]] = {}
    for process in node.processes:
        folder = node.facts.store or process.folder
        if folder is not None and folder.free_bytes is not None:
            needed = (process.memory_bytes or 0) if node.facts.ranks else _A_CORE_BYTES
            disks.setdefault(folder.filesystem, []).append((folder, needed))
    for folders in disks.values():
        folder, total = folders[0][0], sum(needed for _, needed in folders)
        if (folder.free_bytes or 0) < total:
            rows = (f"{folder.path}: {_size(folder.free_bytes)} free, at least {_size(total)} needed",)
            title = "not enough disk space for a core"
            title += " of every rank: the last would be truncated" if len(folders) > 1 else ""
            text = "free some space, or point core_pattern to a larger disk"
            fix = Fix(text=text, commands=(f"df -h {quote(folder.path)}",))
            yield node.finding("space", Level.WARN, title, evidence=rows, fix=fix)


def _unread(node: _Node) -> Iterator[Finding]:
    unread = [
        process
        for process in node.processes
        if process.limits is None or (node.pattern.kind in _FILES and process.folder is None)
    ]
    if unread:
        title = f"limits or working directory of {node.subject(unread)} cannot be read: run as their user or root"
        yield node.finding("unread", Level.UNKNOWN, title, unread)
    if node.facts.gone:
        title = "requested processes not found"
        lines = tuple(f"no process {pid}" for pid in node.facts.gone)
        yield node.finding("gone", Level.UNKNOWN, title, evidence=lines)


def _size(size: int | None) -> str:
    if size is None:
        return "unlimited"
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.1f} {unit}"
    return f"{size} B"
