"""Findings of core-bt --check-setup: whether a crash would leave a usable core, and what to change. Pure."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING

from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import format_hosts, format_size
from distdiag.facts.core.setup import PatternKind
from distdiag.knowledge.crashes import core_limit
from distdiag.record import record
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distdiag.facts.core.setup import CoreFolder, CorePattern, ProcessSetup, SetupFacts

_MAX_EVIDENCE = 6
_A_CORE_BYTES = 1 << 30
"""Assumed core size of a process of unknown size."""
_LEAST_BYTES = 4096
"""A smaller core lacks even its notes; systemd-coredump then keeps none."""
_STACKS_AND_HEAP = 1
"""Bit of coredump_filter for anonymous private memory."""
_ALL_CORES = "/var/crash/core.%e.%h.%p"
_FILES = (PatternKind.RELATIVE, PatternKind.ABSOLUTE)


@record
class _Node:
    """A node to judge; `processes` are its ranks, else distdiag itself."""

    facts: SetupFacts
    pattern: CorePattern
    processes: tuple[ProcessSetup, ...]
    alone: bool

    @property
    def sudo(self) -> str:
        return "" if self.facts.is_root else "sudo "

    def name(self, process: ProcessSetup) -> str:
        if not self.facts.ranks:
            return "here"
        by_pid = f"pid {process.pid}"
        return f"rank {process.rank} ({by_pid})" if process.rank is not None else f"{by_pid} ({process.command})"

    def finding(
        self,
        verdict: str,
        about: Sequence[ProcessSetup] = (),
        *,
        fix: Fix | None = None,
        evidence: Iterable[str] = (),
        **words: str,
    ) -> Finding:
        """Return a finding about processes, with ranks and pids if they are ranks; `fix` replaces the row's.

        The title has no numbers, so that findings of several nodes can be equal.
        """
        some = "ranks" if len(about) == len(self.processes) else "some ranks"
        words["some"] = some if self.facts.ranks else "processes started here"
        about = about if self.facts.ranks else ()
        ranks = tuple(process.rank for process in about if process.rank is not None)
        where = Where(ranks=ranks, pids=tuple(process.pid for process in about) if self.alone else ())
        given = {"pattern": self.pattern.text, "sudo": self.sudo, **words}
        found = finding(f"setup-{verdict}", given, where=where, evidence=tuple(evidence)[:_MAX_EVIDENCE])
        return replace(found, fix=fix) if fix else found


def setup_findings(setups: Mapping[str, SetupFacts]) -> list[Finding]:
    """Judge the facts of all nodes, by host; equal findings of several nodes are merged."""
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
    if facts.pattern is None:
        yield finding("setup-unread-pattern")
        return
    node = _Node(facts, facts.pattern, facts.ranks or (facts.own,), alone)
    judges: tuple[Callable[[_Node], Iterator[Finding]], ...]
    judges = (_handler, _limit, _folder, _kept, _overwrites, _space, _unread)
    found = [finding for judge in judges for finding in judge(node)]
    yield from found
    if not {Level.FAIL, Level.UNKNOWN} & {finding.level for finding in found}:
        yield node.finding("ready", goes=_goes_to(node))


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


def _on_host_only(node: _Node) -> bool:
    return bool(node.facts.container) and not node.facts.may_set


def _set_pattern(node: _Node) -> Fix:
    note = "this changes the whole machine, with its containers, until the next reboot"
    if _on_host_only(node):
        return Fix(text=f"core_pattern can only be changed on the host ({note})")
    folder = _ALL_CORES.rpartition("/")[0]
    tee = f"echo '{_ALL_CORES}' | {node.sudo}tee /proc/sys/kernel/core_pattern"
    commands = (f"{node.sudo}mkdir -p -m 1777 {folder}", tee)
    return Fix(text=f"write cores to a directory, each under a unique name; {note}", commands=commands)


def _handler(node: _Node) -> Iterator[Finding]:
    """Judge the handler of cores: none, a program, or a program on the host of this container."""
    facts, pattern, systemd = node.facts, node.pattern, node.facts.systemd
    largest = max((process.memory_bytes or 0 for process in node.processes), default=0)
    if pattern.kind is PatternKind.NOWHERE:
        yield node.finding("pattern", pattern=pattern.text or "empty", fix=_set_pattern(node))
    elif pattern.kind is PatternKind.PROGRAM and facts.handler_there is False:
        yield node.finding("handler-gone", program=pattern.program, fix=_set_pattern(node))
    elif pattern.kind in (PatternKind.PROGRAM, PatternKind.SOCKET) and facts.container:
        kept = f"on the host, they are in {' and '.join(pattern.folders)}" if pattern.folders else ""
        if pattern.handler == "WSL":
            kept = "they are in %LOCALAPPDATA%\\Temp\\wsl-crashes of Windows (here in /mnt/c/Users)"
        yield node.finding("handler-on-host", container=facts.container, goes=_goes_to(node), kept=kept)
    elif systemd is not None and not systemd.keeps:
        yield node.finding("handler-keeps-none")
    elif systemd is not None and _below(systemd.most_bytes, largest):
        line = f"ExternalSizeMax is {_size(systemd.most_bytes)}, the largest rank has {_size(largest)}"
        yield node.finding("handler-cuts", evidence=(line,))


def _limit(node: _Node) -> Iterator[Finding]:
    """Judge RLIMIT_CORE.

    The kernel applies it to files only. Programs may receive it (%c), or, as in Debian's pattern for systemd-coredump,
    a number instead; systemd-coredump obeys the limit it receives.
    """
    pattern = node.pattern
    if pattern.kind not in _FILES and not pattern.passes_limit:
        return
    obeyed = pattern.kind in _FILES or pattern.handler == "systemd-coredump"
    none = [process for process in node.processes if _limited(process, _LEAST_BYTES)]
    cut = [each for each in node.processes if each not in none and _limited(each, each.memory_bytes or 0)]
    for verdict, some in (("limit" if obeyed else "limit-passed-on", none), ("limit-low", cut)):
        if some:
            rows = _limits(node, some)
            yield node.finding(verdict, some, handler=pattern.handler, evidence=rows, fix=_raise(node, some))


def _limited(process: ProcessSetup, needed: int) -> bool:
    limits = process.limits
    return limits is not None and (_below(limits.core, needed) or _below(limits.file, needed))


def _below(limit: int | None, needed: int) -> bool:
    return limit is not None and limit < needed


def _limits(node: _Node, some: Iterable[ProcessSetup]) -> Iterator[str]:
    for process in some:
        if limits := process.limits:
            core = f"core file size {_size(limits.core)} (hard {_size(limits.core_hard)})"
            memory = f"memory in use {_size(process.memory_bytes or 0)}"
            yield f"{node.name(process)}: {core}, file size {_size(limits.file)}, {memory}"


def _raise(node: _Node, some: Sequence[ProcessSetup]) -> Fix:
    launchers = [name for process in some for name in (*process.launchers, *(("systemd",) if process.unit else ()))]
    container = [node.facts.container] if node.facts.container else []
    known = [core_limit(name) for name in dict.fromkeys([*(launchers or ["shell"]), *container])]
    words = list(dict.fromkeys(limit.fix for limit in known))
    commands = [command for limit in known for command in limit.commands]
    limits = [(process.limits, process.memory_bytes or _LEAST_BYTES) for process in some]
    is_hard = any(limit is not None and limit.core_hard is not None for limit, _ in limits)
    if is_hard:
        words.append("the hard limit is too low: only root can raise it (/etc/security/limits.conf for logins)")
    if any(limit is not None and _below(limit.file, needed) for limit, needed in limits):
        words.append("raise the file size limit too")
        commands.insert(0, "ulimit -f unlimited")
    if node.facts.ranks:
        words[0] = f"for running ranks, use prlimit (as their user); for the next start: {words[0]}"
        pids = " ".join(str(process.pid) for process in some)
        raised = f"{node.sudo}prlimit --pid $pid --core=unlimited" + ("" if is_hard else ":")
        now = [f"for pid in {pids}; do {raised}; done"] if node.alone else []
        commands = [*now, *commands]
    return Fix(text="; ".join(words), commands=tuple(dict.fromkeys(commands)))


def _folder(node: _Node) -> Iterator[Finding]:
    """Judge the folder of each process: it exists, is writable, and the name is free."""
    problems: dict[str, list[ProcessSetup]] = {}
    for process in node.processes:
        if process.folder is not None and (problem := _problem(process.folder, node.pattern.text)):
            problems.setdefault(problem, []).append(process)
    for problem, some in problems.items():
        yield node.finding("place", some, problem=problem, fix=_other_folder(node))


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
    """Judge processes excluded for safety (dumpable), and cores without memory (coredump_filter)."""
    secret = [each for each in node.processes if each.dumpable is False and node.facts.suid_dumpable != 1]
    bare = [each for each in node.processes if each.filter is not None and not each.filter & _STACKS_AND_HEAP]
    yield from (node.finding(verdict, some) for verdict, some in (("dumpable", secret), ("filter", bare)) if some)


def _overwrites(node: _Node) -> Iterator[Finding]:
    if node.pattern.kind not in _FILES or node.pattern.unique:
        return
    fix = None
    if _on_host_only(node):
        fix = Fix(text="start each rank in its own directory; the names can only be changed on the host")
    folders = [process.folder for process in node.facts.ranks if process.folder is not None]
    same = {(folder.path, folder.filesystem) for folder in folders}
    shared = "Ranks here share a directory." if len(same) < len(node.facts.ranks) else ""
    place = "in a directory" if node.pattern.kind is PatternKind.RELATIVE else ""
    yield node.finding("overwrites", in_a_directory=place, shared=shared, fix=fix)


def _space(node: _Node) -> Iterator[Finding]:
    """Compare the free space for cores with the memory of the processes, by file system."""
    disks: dict[int | None, list[tuple[CoreFolder, int]]] = {}
    for process in node.processes:
        folder = node.facts.store or process.folder
        if folder is not None and folder.free_bytes is not None:
            needed = (process.memory_bytes or 0) if node.facts.ranks else _A_CORE_BYTES
            disks.setdefault(folder.filesystem, []).append((folder, needed))
    for folders in disks.values():
        folder, total = folders[0][0], sum(needed for _, needed in folders)
        if (folder.free_bytes or 0) < total:
            row = f"{folder.path}: {_size(folder.free_bytes)} free, at least {_size(total)} needed"
            of_all = "of every rank: the last would be truncated" if len(folders) > 1 else ""
            yield node.finding("space", of_all=of_all, path=quote(folder.path), evidence=(row,))


def _unread(node: _Node) -> Iterator[Finding]:
    files = node.pattern.kind in _FILES
    unread = [each for each in node.processes if each.limits is None or (files and each.folder is None)]
    if unread:
        yield node.finding("unread", unread)
    if node.facts.gone:
        yield node.finding("gone", evidence=(f"no process {pid}" for pid in node.facts.gone))


def _size(size: int | None) -> str:
    return "unlimited" if size is None else format_size(size)
