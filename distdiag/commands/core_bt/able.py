"""Whether a crash would leave a core that tells something, and what to set if not. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING

from distdiag.commands.core_bt.model import COMMAND
from distdiag.facts.core.places import Kind
from distdiag.knowledge.crashes import core_limit
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distdiag.facts.core.places import Pattern, Place
    from distdiag.facts.core.setup import ProcessSetup, SetupFacts

_EVIDENCE = 6
_A_CORE_BYTES = 1 << 30
"""Room for a core of nobody knows which process."""
_LEAST_BYTES = 4096
"""A smaller core has not even its notes; systemd-coredump keeps none then."""
_STACKS_AND_HEAP = 1
"""Bit of coredump_filter: private memory without a file."""
_ALL_CORES = "/var/crash/core.%e.%h.%p"
_FILES = (Kind.RELATIVE, Kind.ABSOLUTE)


@dataclass(frozen=True)
class _Node:
    """What one node's findings are made of: `processes` are its ranks, or distdiag itself, as what is started there."""

    facts: SetupFacts
    pattern: Pattern
    processes: tuple[ProcessSetup, ...]
    alone: bool

    @property
    def sudo(self) -> str:
        """What commands for the administrator begin with."""
        return "" if self.facts.is_root else "sudo "

    def who(self, some: Sequence[ProcessSetup]) -> str:
        """Name processes in a sentence, without numbers, so that nodes can be told in one."""
        if not self.facts.ranks:
            return "what is started here"
        return "ranks" if len(some) == len(self.processes) else "some ranks"

    def name(self, one: ProcessSetup) -> str:
        """Name one process in a piece of evidence."""
        if not self.facts.ranks:
            return "here"
        return f"rank {one.rank} (pid {one.pid})" if one.rank is not None else f"pid {one.pid} ({one.command})"

    def finding(
        self, id_: str, level: Level, title: str, about: Sequence[ProcessSetup] = (), **rest: object
    ) -> Finding:
        """Make a finding about processes, with their ranks and ids if they are ranks."""
        ranks = tuple(one.rank for one in about if one.rank is not None) if self.facts.ranks else ()
        pids = tuple(one.pid for one in about) if self.facts.ranks and self.alone else ()
        where = Where(ranks=ranks, pids=pids)
        return Finding(id=f"{COMMAND}.setup-{id_}", level=level, title=title, where=where, **rest)  # type: ignore[arg-type]


def able(setups: Mapping[str, SetupFacts]) -> list[Finding]:
    """Judge the facts of all nodes, by their names; what is the same on several of them is said once."""
    folded: dict[tuple[str, Level, str, str, Fix | None], list[tuple[str, Finding]]] = {}
    for host, facts in setups.items():
        for one in _of_node(facts, alone=len(setups) == 1):
            folded.setdefault((one.id, one.level, one.title, one.detail, one.fix), []).append((host, one))
    return [_joined(same) for same in folded.values()]


def _joined(same: Sequence[tuple[str, Finding]]) -> Finding:
    ranks = sorted({rank for _, one in same for rank in one.where.ranks})
    first = same[0][1]
    evidence = tuple(dict.fromkeys(line for _, one in same for line in one.evidence))[:_EVIDENCE]
    where = Where(hosts=tuple(host for host, _ in same), ranks=tuple(ranks), pids=first.where.pids)
    return replace(first, where=where, evidence=evidence)


def _of_node(facts: SetupFacts, *, alone: bool) -> Iterator[Finding]:
    processes = facts.ranks or (facts.own,)
    if facts.pattern is None:
        title = "whether the kernel makes cores is not known: /proc/sys/kernel/core_pattern cannot be read"
        yield Finding(id=f"{COMMAND}.setup-pattern", level=Level.UNKNOWN, title=title)
        return
    node = _Node(facts, facts.pattern, processes, alone)
    judges: tuple[Callable[[_Node], Iterator[Finding]], ...]
    judges = (_nowhere, _handler, _limit, _place, _kept, _overwrites, _space, _unread)
    found = [finding for judge in judges for finding in judge(node)]
    yield from found
    if not {Level.FAIL, Level.UNKNOWN} & {finding.level for finding in found}:
        yield node.finding("ready", Level.INFO, f"a crash leaves a core: {_goes_to(node)}")


def _goes_to(node: _Node) -> str:
    facts, pattern = node.facts, node.pattern
    if pattern.kind is Kind.ABSOLUTE:
        return f"as {pattern.text}"
    if pattern.kind is Kind.RELATIVE:
        return f"as {pattern.text}{'.PID' if pattern.uses_pid else ''} in the working directory of the process"
    if facts.container:
        return f"{pattern.handler or pattern.program} takes it, on the host of this container"
    if pattern.handler == "systemd-coredump":
        return "systemd-coredump keeps it for some days (coredumpctl list)"
    return f"{pattern.handler or pattern.program} takes it" + (f" ({pattern.folders[0]})" if pattern.folders else "")


def _set_pattern(node: _Node) -> Fix:
    note = "this changes the whole machine, with its containers, until its next boot"
    if node.facts.container and not node.facts.may_set:
        return Fix(text=f"core_pattern is the host's, and can only be changed there ({note})")
    return Fix(
        text=f"write cores to a folder, each with a name of its own; {note}",
        commands=(
            f"{node.sudo}mkdir -p -m 1777 {_ALL_CORES.rpartition('/')[0]}",
            f"echo '{_ALL_CORES}' | {node.sudo}tee /proc/sys/kernel/core_pattern",
        ),
    )


def _nowhere(node: _Node) -> Iterator[Finding]:
    if node.pattern.kind is Kind.NOWHERE:
        title = f"every core is thrown away: core_pattern is {node.pattern.text or 'empty'}"
        yield node.finding("pattern", Level.FAIL, title, fix=_set_pattern(node))


def _handler(node: _Node) -> Iterator[Finding]:
    facts, pattern = node.facts, node.pattern
    largest = max((one.memory_bytes or 0 for one in node.processes), default=0)
    if pattern.kind is Kind.PROGRAM and facts.handler_there is False:
        title = f"every core is lost: core_pattern gives it to {pattern.program}, and there is no such program"
        yield node.finding("handler", Level.FAIL, title, fix=_set_pattern(node))
    elif pattern.kind in (Kind.PROGRAM, Kind.SOCKET) and facts.container:
        title = f"cores do not stay in this container ({facts.container}): {_goes_to(node)}"
        yield node.finding("handler", Level.INFO, title, detail=_on_the_host(pattern))
    elif facts.systemd is not None and not facts.systemd.keeps:
        conf = Fix(text="set Storage=external in /etc/systemd/coredump.conf", commands=("coredumpctl list",))
        yield node.finding("handler", Level.FAIL, "systemd-coredump is told to keep no core (Storage=none)", fix=conf)
    elif facts.systemd is not None and facts.systemd.most_bytes is not None and facts.systemd.most_bytes < largest:
        title = "systemd-coredump cuts or drops cores of this size (ExternalSizeMax)"
        conf = Fix(text="set ExternalSizeMax=infinity and ProcessSizeMax=infinity in /etc/systemd/coredump.conf")
        lines = (f"ExternalSizeMax is {_size(facts.systemd.most_bytes)}, the largest rank has {_size(largest)}",)
        yield node.finding("handler", Level.WARN, title, fix=conf, evidence=lines)


def _on_the_host(pattern: Pattern) -> str:
    if pattern.handler == "WSL":
        return "look in %LOCALAPPDATA%\\Temp\\wsl-crashes of Windows (here below /mnt/c/Users)"
    return f"look on the host in {' and '.join(pattern.folders)}" if pattern.folders else ""


def _limit(node: _Node) -> Iterator[Finding]:
    """Judge RLIMIT_CORE, which the kernel obeys for files only. Programs may be told it (%c), or, as Debian does with
    systemd-coredump, a number instead; what it is told systemd-coredump obeys."""
    pattern = node.pattern
    if pattern.kind not in _FILES and not pattern.told_limit:
        return
    obeyed = pattern.kind in _FILES or pattern.handler == "systemd-coredump"
    none = [one for one in node.processes if one.limits is not None and _limited(one, _LEAST_BYTES)]
    cut = [one for one in node.processes if one not in none and _limited(one, one.memory_bytes or 0)]
    if none:
        title = f"a crash of {node.who(none)} leaves no core: its size is limited to nothing"
        if not obeyed:
            title = f"a crash of {node.who(none)} may leave no core: {pattern.handler} is told that none is wanted"
        level = Level.FAIL if obeyed else Level.WARN
        yield node.finding("limit", level, title, none, evidence=_limits(node, none), fix=_raise(node, none))
    if cut:
        title = f"the core of {node.who(cut)} would be cut off: the limit on its size is less than the memory in use"
        yield node.finding("limit", Level.WARN, title, cut, evidence=_limits(node, cut), fix=_raise(node, cut))


def _limited(one: ProcessSetup, needed: int) -> bool:
    return one.limits is not None and (_below(one.limits.core, needed) or _below(one.limits.file, needed))


def _below(limit: int | None, needed: int) -> bool:
    return limit is not None and limit < needed


def _limits(node: _Node, some: Iterable[ProcessSetup]) -> tuple[str, ...]:
    rows = (
        f"{node.name(one)}: core file size {_size(one.limits.core)} (hard {_size(one.limits.core_hard)}), "
        f"file size {_size(one.limits.file)}, memory in use {_size(one.memory_bytes or 0)}"
        for one in some
        if one.limits is not None
    )
    return tuple(rows)[:_EVIDENCE]


def _raise(node: _Node, some: Sequence[ProcessSetup]) -> Fix:
    launchers = [name for one in some for name in (*one.launchers, *(("systemd",) if one.unit else ()))]
    container = [node.facts.container] if node.facts.container else []
    known = [core_limit(name) for name in dict.fromkeys([*(launchers or ["shell"]), *container])]
    words = list(dict.fromkeys(one.fix for one in known))
    commands = [command for one in known for command in one.commands]
    if any(one.limits is not None and one.limits.core_hard is not None for one in some):
        words.append("the hard limit stands in the way: only root may raise it (/etc/security/limits.conf for logins)")
    if any(one.limits is not None and _below(one.limits.file, one.memory_bytes or _LEAST_BYTES) for one in some):
        words.append("the limit on the size of files has to be raised too")
        commands.insert(0, "ulimit -f unlimited")
    if node.facts.slurm_propagates is False and "srun" in launchers:
        words.append("slurm.conf here does not pass it on unless it is asked to")
    if node.facts.ranks:
        words[0] = f"ranks that run now get it from prlimit (as their user); for the next start: {words[0]}"
        commands = [*(_prlimit(some) if node.alone else ()), *commands]
    return Fix(text="; ".join(words), commands=tuple(dict.fromkeys(commands)))


def _prlimit(some: Sequence[ProcessSetup]) -> Iterator[str]:
    pids = " ".join(str(one.pid) for one in some)
    yield f"for pid in {pids}; do prlimit --pid $pid --core=unlimited:; done"


def _place(node: _Node) -> Iterator[Finding]:
    """Judge the folder of each process: is it there, may the process write, and is the name free."""
    problems: dict[str, list[ProcessSetup]] = {}
    for one in node.processes:
        if one.place is not None and (problem := _problem(one.place, node.pattern.text)):
            problems.setdefault(problem, []).append(one)
    for problem, some in problems.items():
        title = f"no core of {node.who(some)} can be written: {problem}"
        yield node.finding("place", Level.FAIL, title, some, fix=_other_place(node))


def _problem(place: Place, name: str) -> str:
    if not place.exists:
        return f"there is no folder {place.path}"
    if not place.writable:
        return f"its user may not write to {place.path}"
    file = f"{place.path.rstrip('/')}/{name.rpartition('/')[2]}"
    return f"{place.blocked_by} is in its place, and stays: {file}" if place.blocked_by else ""


def _other_place(node: _Node) -> Fix:
    if node.pattern.kind is Kind.ABSOLUTE:
        path = quote(node.pattern.folder)
        inside = " (inside of the container, if it runs in one)" if any(one.contained for one in node.processes) else ""
        commands = (f"{node.sudo}mkdir -p {path}", f"{node.sudo}chmod 1777 {path}")
        return Fix(text=f"make the folder, and let every user write to it{inside}", commands=commands)
    other = _set_pattern(node)
    return Fix(text=f"start the job in another folder; or {other.text}", commands=other.commands)


def _kept(node: _Node) -> Iterator[Finding]:
    """Judge what the kernel keeps from a core for safety, and what it leaves out of one."""
    secret = [one for one in node.processes if one.dumpable is False]
    if secret and node.facts.suid_dumpable != 1:
        title = f"the kernel makes no core of {node.who(secret)}"
        detail = "because the process changed its user after its start, or may not read its own program"
        fix = Fix(text="start it as that user from the beginning (runuser, setpriv), not as root that changes later")
        yield node.finding("dumpable", Level.FAIL, title, secret, detail=detail, fix=fix)
    bare = [one for one in node.processes if one.filter is not None and not one.filter & _STACKS_AND_HEAP]
    if bare:
        title = f"a core of {node.who(bare)} has neither stacks nor heap (coredump_filter)"
        fix = Fix(text="in the shell that starts the job", commands=("echo 0x33 > /proc/self/coredump_filter",))
        yield node.finding("filter", Level.FAIL, title, bare, fix=fix)


def _overwrites(node: _Node) -> Iterator[Finding]:
    if node.pattern.kind not in _FILES or node.pattern.apart:
        return
    title = f"each core replaces the one before: all processes of a folder write the same file ({node.pattern.text})"
    if node.pattern.kind is Kind.ABSOLUTE:
        title = f"each core replaces the one before: all processes write {node.pattern.text}"
    fix = Fix(
        text="start each rank in a folder of its own; or add the process's id to the name, on the whole machine until "
        "its next boot",
        commands=(f"echo 1 | {node.sudo}tee /proc/sys/kernel/core_uses_pid",),
    )
    if node.facts.container and not node.facts.may_set:
        fix = Fix(text="start each rank in a folder of its own; the names can only be changed on the host")
    same = {(one.place.path, one.place.filesystem) for one in node.facts.ranks if one.place is not None}
    detail = "the ranks here share a folder" if len(same) < len(node.facts.ranks) else ""
    yield node.finding("overwrites", Level.WARN, title, detail=detail, fix=fix)


def _space(node: _Node) -> Iterator[Finding]:
    """Compare what is free where cores go with what the processes have in memory, by file system."""
    disks: dict[int | None, list[tuple[Place, int]]] = {}
    for one in node.processes:
        place = node.facts.store or one.place
        if place is not None and place.free_bytes is not None:
            needed = (one.memory_bytes or 0) if node.facts.ranks else _A_CORE_BYTES
            disks.setdefault(place.filesystem, []).append((place, needed))
    for places in disks.values():
        place, total = places[0][0], sum(needed for _, needed in places)
        if (place.free_bytes or 0) < total:
            rows = (f"{place.path}: {_size(place.free_bytes)} free, at least {_size(total)} needed",)
            title = "there is no room for a core" + (
                " of every rank: the last ones would be cut off" if len(places) > 1 else ""
            )
            fix = Fix(
                text="free some, or let core_pattern point to a larger disk", commands=(f"df -h {quote(place.path)}",)
            )
            yield node.finding("space", Level.WARN, title, evidence=rows, fix=fix)


def _unread(node: _Node) -> Iterator[Finding]:
    unread = [
        one for one in node.processes if one.limits is None or (node.pattern.kind in _FILES and one.place is None)
    ]
    if unread:
        title = f"limits or working directory of {node.who(unread)} cannot be read: run it as their user, or as root"
        yield node.finding("unread", Level.UNKNOWN, title, unread)
    if node.facts.gone:
        title = "processes that were asked for are gone"
        lines = tuple(f"no process {pid}" for pid in node.facts.gone)
        yield node.finding("gone", Level.UNKNOWN, title, evidence=lines)


def _size(size: int | None) -> str:
    if size is None:
        return "unlimited"
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.1f} {unit}"
    return f"{size} B"
