"""Claim of the source "waits": which process waits for which, from system calls in /proc. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks, name_ranks
from distdiag.diagnosis import remedies
from distdiag.diagnosis.stuck.types import Claim, Source, StuckKind
from distdiag.diagnosis.wait_reasons import ENDED, Kind, Wait
from distdiag.diagnosis.wording import format_hosts, format_ranks, lasting
from distdiag.facts.machine import STOPPED
from distdiag.fold import by_key
from distdiag.report import Fix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.diagnosis.process_index import Key, ProcessIndex
    from distdiag.diagnosis.stuck.types import Asked
    from distdiag.diagnosis.wait_graph import Edge, WaitGraph, WaitTree
    from distdiag.jobs.types import Job

_NAMED = 8
_PARTS = 4
_FOR = {"r": "its data", "w": "it to read"}
_LONG_S = 5.0
"""A thread asleep for longer counts as stuck; less may be a training step."""
_BLAMED = {
    Kind.STOPPED: StuckKind.STOPPED,
    Kind.STORAGE: StuckKind.STORAGE,
    **dict.fromkeys((Kind.KERNEL, Kind.SLEEP, Kind.FILE, Kind.CHILD, Kind.ENDED), StuckKind.NOT_IN_COLLECTIVE),
}
"""Waits that block other ranks without depending on them."""
_INSIDE = (Kind.OWN_THREADS, Kind.STORE, Kind.PEER)
"""Waits that may be a collective."""
_ELSEWHERE = "-"
"""Not a host name, so that processes other than ranks are formatted with their host."""
_CYCLE = "Each reads what the other has to send first: a deadlock, unless another thread of these ranks sends it."


def of_waits(asked: Asked, job: Job, keys: Sequence[Key], graph: WaitGraph, trees: Sequence[WaitTree]) -> Claim:
    """Return the surest claim about the wait graph."""
    case = _Case(asked, job, keys, graph)
    found = [claim for tree in trees if (claim := case.of_tree(tree)) is not None]
    found += [*case.of_themselves({tree.root for tree in trees}), *case.of_gone()]
    found = found or case.by_exclusion()
    return _folded([claim for claim in found if claim.is_sure] or found[:1]) or case.says()


def _folded(claims: Sequence[Claim]) -> Claim | None:
    """Merge claims of the first one's kind: a file server's fault blocks ranks on every node."""
    if not claims:
        return None
    first, *more = [claim for claim in claims if claim.kind is claims[0].kind]
    if not more:
        return first
    ranks = frozenset().union(*(claim.ranks for claim in more))
    hosts = tuple(dict.fromkeys(host for claim in more for host in claim.hosts))
    whom = f"with {format_ranks(sorted(ranks), hosts)}" if ranks else f"on {format_hosts(hosts)}"
    return replace(
        first,
        says=f"{first.says}; {len(more)} more such process{'' if len(more) == 1 else 'es'}, {whom}",
        ranks=first.ranks | ranks,
        pids=(*first.pids, *(pid for claim in more for pid in claim.pids)),
        hosts=tuple(dict.fromkeys((*first.hosts, *hosts))),
    )


def root_wait(graph: WaitGraph, key: Key) -> Wait:
    """Return the wait of the process at the end of a chain; by its state if its threads were not read."""
    wait = graph.main(key)
    if wait is not None:
        return wait
    person, process = graph.index.peer_processes.get(key), graph.index.processes.get(key)
    state = person.state if person is not None else process.state if process is not None else ""
    kind = Kind.STOPPED if state in STOPPED else Kind.RUNS if state == "R" else Kind.NETWORK
    kind = Kind.ENDED if state in ENDED else Kind.KERNEL if state == "D" else kind
    words = {Kind.STOPPED: "is stopped (T)", Kind.RUNS: "is running", Kind.KERNEL: "waits in the kernel (D)"}
    does = words.get(kind, "has exited" if kind is Kind.ENDED else "was not read: it is not a rank")
    return Wait(kind=kind, call="-", on="", does=does, since_s=None)


class _Case:
    """One job, and the waits of its processes."""

    def __init__(self, asked: Asked, job: Job, keys: Sequence[Key], graph: WaitGraph) -> None:
        self._asked, self._job, self._graph, self._index = asked, job, graph, graph.index
        self._keys = [key for key in keys if root_wait(graph, key).kind is not Kind.ENDED]

    def _wait(self, key: Key) -> Wait:
        return root_wait(self._graph, key)

    def _words(self, keys: Sequence[Key], *, whole: bool = False) -> str:
        return describe_waits(keys, [self._wait(key) for key in keys], self._index, whole=whole)

    def says(self) -> Claim:
        """Return a claim without a kind, for undecided jobs: a summary of the waits."""
        keys = [key for key in self._keys if self._wait(key).kind is not Kind.UNREADABLE]
        return Claim(source=Source.WAITS, says=self._words(keys) if keys else "no rank could be read")

    def of_tree(self, tree: WaitTree) -> Claim | None:
        """Return a claim about the process at the end of a chain of waits."""
        wait = self._wait(tree.root)
        several_hosts = len({host for host, _ in self._keys}) > 1
        root = self._index.name(tree.root, whole=True, seen_from=_ELSEWHERE if several_hosts else "")
        rest = waiting(tree, self._index)
        long = _lasted_s(tree, wait)
        is_sure = long is not None and long > _LONG_S
        if tree.is_cycle:
            cycle = sorted(edge.waiter for edge in tree.edges if edge.waiter in {other.to for other in tree.edges})
            says = f"{several(cycle, self._index)} wait for each other: {rest}"
            return self._claim(StuckKind.DEADLOCK, cycle, says, is_sure=is_sure, detail=_CYCLE)
        # Ranks that only wait are not culprits; a root other than a rank is listed with the ranks that await it.
        is_rank = self._index.rank(tree.root) is not None
        keys = [tree.root, *(edge.waiter for edge in tree.edges if edge.to == tree.root and not is_rank)]
        locks = [edge for edge in tree.edges if edge.to == tree.root and edge.wait.kind is Kind.LOCK]
        if locks:
            says = f"{root} holds the lock on {locks[0].wait.end}"
            says += f", and {wait.does}" if wait.kind is not Kind.NETWORK else ""
            fix = self._fix([tree.root], wait, lock=True)
            claim = self._claim(StuckKind.LOCK, keys, f"{says}; {rest}", is_sure=is_sure, fix=fix)
            waiters = (self._index.rank(edge.waiter) for edge in locks)
            return replace(claim, witnesses=frozenset(rank for rank in waiters if rank is not None))
        if wait.kind not in _BLAMED:
            return None
        fix = self._fix([tree.root], wait)
        return self._claim(self._blame(tree.root, wait), keys, f"{root} {wait.does}; {rest}", is_sure=is_sure, fix=fix)

    def _blame(self, key: Key, wait: Wait) -> StuckKind:
        process = self._index.processes.get(key)
        kind = StuckKind.DEVICE if _is_at_device(wait) else _BLAMED[wait.kind]
        is_worker = process is not None and process.kind == "data-worker"
        return StuckKind.DATA if is_worker and kind is StuckKind.NOT_IN_COLLECTIVE else kind

    def of_themselves(self, blamed: set[Key]) -> list[Claim]:
        """Return claims about stopped ranks and hanging file systems, even if no process is known to await them."""
        found = []
        for kind in (Kind.STOPPED, Kind.STORAGE):
            keys = [key for key in self._keys if key not in blamed and self._wait(key).kind is kind]
            if not keys:
                continue
            first = self._wait(keys[0])
            says = f"{self._index.name(keys[0], whole=True)} {first.does}"
            says += f"; the same for {several(keys[1:], self._index)}" if len(keys) > 1 else ""
            others = [key for key in self._keys if key not in keys]
            says += f"; {self._words(others)}" if others else ""
            is_sure = kind is Kind.STOPPED or (first.since_s or 0.0) > _LONG_S
            found.append(self._claim(_BLAMED[kind], keys, says, is_sure=is_sure, fix=self._fix(keys, first)))
        return found

    def of_gone(self) -> list[Claim]:
        """Return a claim about ranks that exited while others of their job still run."""
        gone = [m for m in self._job.members if m.process is None or m.process.state in ENDED]
        if not gone or not self._keys:
            return []
        ranks = [member.rank for member in gone if member.rank is not None]
        hosts = tuple(dict.fromkeys(member.host for member in gone))
        unseen = all(member.process is None for member in gone)
        # Unless a rank sleeps in a possible collective, the job may just be ending, or still be starting.
        inside = set(_INSIDE) - ({Kind.STORE} if unseen else set())
        awaited = any(self._wait(key).kind in inside for key in self._keys)
        has, it = ("has", "it") if len(gone) == 1 else ("have", "they")
        ended = f"{has} no process: {it} exited or never started" if unseen else f"{has} exited"
        name = format_ranks(ranks, list(hosts)) if ranks else f"a process ({format_hosts(hosts)})"
        remedy = remedies.find_missing_rank if unseen else remedies.find_cause_of_death
        claim = Claim(
            source=Source.WAITS,
            says=f"{name} {ended}; {self._words(self._keys)}",
            kind=StuckKind.EXITED,
            ranks=frozenset(ranks),
            hosts=hosts,
            is_sure=awaited,
            fix=remedy(hosts, len(gone)),
        )
        return [claim]

    def by_exclusion(self) -> list[Claim]:
        """Return a claim about the few ranks that do something else while all others have slept for long.

        Ranks that wait for their own threads, the store or a rank may be in a collective. The few that wait for
        something outside the job, or run, are then the culprits. This requires that all ranks were read: otherwise they
        may wait for a rank on an unread host.
        """
        inside = [key for key in self._keys if self._wait(key).kind in _INSIDE]
        outside = [key for key in self._keys if key not in inside]
        if self._job.unseen or not outside or len(outside) > len(inside):
            return []
        if any(_is_unclear(self._wait(key)) or self._may_wait_for_gpu(key) for key in outside):
            return []
        if any((self._wait(key).since_s or 0.0) <= _LONG_S for key in inside):
            return []
        still = [key for key in outside if not _looks_again(self._wait(key))]
        runs = [key for key in outside if self._wait(key).kind is Kind.RUNS]
        chosen = still or runs or outside
        kind = StuckKind.BUSY if runs and not still else StuckKind.NOT_IN_COLLECTIVE
        if still and all(_is_at_device(self._wait(key)) for key in still):
            kind = StuckKind.DEVICE
        # Ranks in init_process_group wait for the store, perhaps for a rank that still imports.
        may_start = kind is StuckKind.BUSY and all(self._wait(key).kind is Kind.STORE for key in inside)
        says = f"{self._words(chosen, whole=True)}; {self._words(inside)}"
        fix = self._fix(chosen, self._wait(chosen[0]))
        is_sure = bool(still or runs) and not may_start
        return [replace(self._claim(kind, chosen, says, is_sure=is_sure, fix=fix), by_exclusion=True)]

    def _may_wait_for_gpu(self, key: Key) -> bool:
        """Return whether a running thread may wait for its GPU: CUDA's waits spin."""
        process = self._index.processes.get(key)
        return self._wait(key).kind is Kind.RUNS and process is not None and process.gpu

    def _claim(
        self,
        kind: StuckKind,
        keys: Sequence[Key],
        says: str,
        *,
        is_sure: bool,
        detail: str = "",
        fix: Fix | None = None,
    ) -> Claim:
        return Claim(
            source=Source.WAITS,
            says=says,
            kind=kind,
            ranks=frozenset(rank for rank in map(self._index.rank, keys) if rank is not None),
            pids=tuple(dict.fromkeys(pid for _, pid in keys)),
            hosts=tuple(dict.fromkeys(host for host, _ in keys)),
            is_sure=is_sure,
            detail=detail,
            fix=fix,
        )

    def _fix(self, keys: Sequence[Key], wait: Wait, *, lock: bool = False) -> Fix | None:
        host, pid = keys[0]
        hosts = format_hosts(key[0] for key in keys)
        if wait.thaws:
            return remedies.thaw(hosts, wait.thaws)
        if wait.thread is not None and wait.thread.state == "t":
            text = f"on {hosts}, detach the debugger or tracer, or let it continue; SIGCONT does not help"
            return Fix(text=text)
        if wait.kind is Kind.STOPPED:
            return remedies.resume(keys)
        show = self._asked.again("pyspy-all", "--pid", str(pid))
        if lock:
            return Fix(text=f"next: see what it does on {hosts} while it holds the lock", commands=(show,))
        if wait.kind is Kind.STORAGE:
            path = wait.on.removesuffix(" (D)").rpartition("/")[0] or "/"
            stat = (f"timeout 5 stat -f {shlex.quote(path)}",) if wait.on.startswith("/") else ()
            return Fix(
                text=f"on {hosts}, check whether the file system answers, and read the kernel log",
                commands=(*stat, "dmesg -T | tail -n 20"),
            )
        if wait.kind in (Kind.SLEEP, Kind.FILE, Kind.CHILD) and (host, pid) in self._index.processes:
            return Fix(text="next: see where in the program that is", commands=(show,))
        return None


def _is_unclear(wait: Wait) -> bool:
    """Return whether the reason of the wait is unknown, and may be the job itself."""
    is_asleep = wait.thread is None or wait.thread.state != "D"
    return wait.kind is Kind.UNREADABLE or (wait.kind is Kind.KERNEL and is_asleep)


def _looks_again(wait: Wait) -> bool:
    """Return whether it runs or wakes up occasionally, so that it may just be slower."""
    return wait.kind is Kind.RUNS or wait.again or wait.woke


def _is_at_device(wait: Wait) -> bool:
    return wait.kind is Kind.KERNEL and wait.thread is not None and "/dev/" in wait.on


def _lasted_s(tree: WaitTree, wait: Wait) -> float | None:
    """Return the duration in seconds: the shorter of the longest wait and the time since the root last ran."""
    if wait.since_s is not None and any(edge.wait.again for edge in tree.edges):
        return wait.since_s
    waited = max((edge.wait.since_s for edge in tree.edges if edge.wait.since_s is not None), default=None)
    known = [seconds for seconds in (waited, wait.since_s) if seconds is not None]
    return min(known) if known and waited is not None else None


def several(keys: Iterable[Key], index: ProcessIndex, *, whole: bool = False) -> str:
    """Format processes: "ranks 0-1,3", "pids 17,19"; with `whole`, a single one includes host and pid."""
    chosen = list(dict.fromkeys(keys))
    ranks = [index.rank(key) for key in chosen]
    if len(chosen) == 1:
        return index.name(chosen[0], whole=whole)
    if all(rank is not None for rank in ranks):
        return name_ranks(rank for rank in ranks if rank is not None)
    if len(chosen) <= _NAMED:
        return "pids " + fold_ranks(pid for _, pid in chosen)
    return f"{len(chosen)} processes"


def waiting(tree: WaitTree, index: ProcessIndex) -> str:
    """Format the waiters: "rank 0 waits for its data: recvfrom on 10.0.0.2:51916; rank 2 waits for rank 0: ..."."""
    groups = by_key(((edge.to, edge.wait.call, edge.wait.wants), edge) for edge in tree.edges)
    parts = [_group(group, tree, index) for group in list(groups.values())[:_PARTS]]
    rest = sum(len(group) for group in list(groups.values())[_PARTS:])
    return "; ".join([*parts, *([f"{rest} more wait for them"] if rest else [])])


def _group(group: Sequence[Edge], tree: WaitTree, index: ProcessIndex) -> str:
    first = group[0]
    who = several((edge.waiter for edge in group), index)
    verb = "waits" if len(group) == 1 else "wait"
    if first.wait.kind is Kind.LOCK:
        what = "for it" if first.to == tree.root else f"for the lock on {first.wait.end}"
        return f"{who} {verb} {what} ({first.wait.call}, {lasting(first.wait.since_s)})"
    is_plain = first.to == tree.root and not tree.is_cycle
    whom = _FOR.get(first.wait.wants, "it") if is_plain else index.name(first.to)
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    thread = first.wait.thread
    via = f" in its thread {thread.tid}" if thread is not None and thread.tid != first.waiter[1] else ""
    return f"{who} {verb} for {whom}: {first.wait.call} on {first.wait.end}{more}{via}"


def describe_waits(keys: Sequence[Key], waits: Sequence[Wait], index: ProcessIndex, *, whole: bool = False) -> str:
    """Format and fold activities: "ranks 0-1,3 wait for another thread of the process (futex, 60 s)"."""
    pairs = list(zip(keys, waits, strict=True))
    groups = by_key(((wait.kind, wait.call if wait.kind in _ALIKE else f"{key}"), (key, wait)) for key, wait in pairs)
    parts = []
    for group in list(groups.values())[:_PARTS]:
        members, first = [key for key, _ in group], group[0][1]
        words = _ALIKE[first.kind] if len(group) > 1 else first.does
        since = _since([wait for _, wait in group])
        parts.append(
            f"{several(members, index, whole=whole)} {words}"
            + (f" ({first.call}, {since})" if len(group) > 1 and first.kind is not Kind.RUNS else "")
        )
    rest = sum(len(group) for group in list(groups.values())[_PARTS:])
    return "; ".join([*parts, *([f"{rest} more wait elsewhere"] if rest else [])])


_ALIKE = {
    Kind.OWN_THREADS: "wait for another thread of the process",
    Kind.STORE: "wait for a key in the job's store",
    Kind.SLEEP: "sleep",
    Kind.RUNS: "are running",
    Kind.PEER: "wait for others",
}


def _since(waits: Sequence[Wait]) -> str:
    known = [wait.since_s for wait in waits if wait.since_s is not None]
    if not known:
        return "?"
    least, most = lasting(min(known)), lasting(max(known))
    return least if least == most else f"{least.removesuffix(' s')} to {most}"
