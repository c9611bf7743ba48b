"""The findings of trace blocked, and the wording of waits. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from distdiag.cluster.hosts import fold_ranks, name_ranks
from distdiag.diagnosis import remedies
from distdiag.diagnosis.wait_reasons import ENDED, Kind, Wait, lasting
from distdiag.diagnosis.wording import format_hosts, format_ranks
from distdiag.facts.machine import STOPPED
from distdiag.jobs.sample_waits import SAMPLED_S
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.cluster.targets import Cluster
    from distdiag.diagnosis.process_index import Key, ProcessIndex
    from distdiag.diagnosis.wait_graph import Edge, WaitGraph, WaitTree
    from distdiag.jobs.types import Job

_NAMED = 8
_PARTS = 4
_TREES = 6
"""Processes that block others, with a finding of their own."""
_FOR = {"r": "its data", "w": "it to read"}
LONG_S = 5.0
"""A thread that has not run for so long counts as stuck; less may be a training step."""
BLAMED = (Kind.STOPPED, Kind.STORAGE, Kind.KERNEL, Kind.SLEEP, Kind.FILE, Kind.CHILD, Kind.ENDED)
"""Waits that block other ranks without depending on them."""
_ITSELF = {Kind.STOPPED: "stopped", Kind.STORAGE: "storage"}
"""A failure even if no process is known to wait for it."""


class Wanted(Protocol):
    """Which job or processes were asked for; what `commands.trace.ranks` and `hang` have."""

    @property
    def job(self) -> str:
        """Name of a job, or empty."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that were named."""


class Request(Protocol):
    """What a command that looks at waits was asked."""

    @property
    def program(self) -> str:
        """How distdiag was called."""

    @property
    def cluster(self) -> Cluster:
        """Which hosts."""

    @property
    def wanted(self) -> Wanted:
        """Which job or processes."""


@dataclass(frozen=True)
class Case:
    """One job: its ranks, or the selected processes."""

    request: Request
    job: Job | None
    keys: tuple[Key, ...]
    graph: WaitGraph

    @property
    def index(self) -> ProcessIndex:
        """Which process is which rank."""
        return self.graph.index


def root_wait(case: Case, key: Key) -> Wait:
    """Return what the process at the end of a chain does; its state alone if its threads were not read."""
    wait = case.graph.main(key)
    if wait is not None:
        return wait
    person, process = case.index.persons.get(key), case.index.processes.get(key)
    state = person.state if person is not None else process.state if process is not None else ""
    kind = Kind.STOPPED if state in STOPPED else Kind.RUNS if state == "R" else Kind.NETWORK
    kind = Kind.ENDED if state in ENDED else Kind.KERNEL if state == "D" else kind
    words = {Kind.STOPPED: "is stopped (T)", Kind.RUNS: "is running", Kind.KERNEL: "waits in the kernel (D)"}
    does = words.get(kind, "has exited" if kind is Kind.ENDED else "was not read: it is not a rank")
    return Wait(kind=kind, call="-", on="", does=does, since_s=None)


def of_trees(case: Case, trees: Sequence[WaitTree]) -> list[Finding]:
    """Report the processes that block others."""
    found = [finding for tree in trees if (finding := _of_tree(case, tree)) is not None]
    return [*found[:_TREES], *_more(found[_TREES:])]


def _more(found: Sequence[Finding]) -> list[Finding]:
    """Fold the findings about processes that block others, where they are many: the chains have all of them."""
    if len(found) < 2:
        return list(found)
    worst = min(found, key=lambda finding: (Level.FAIL, Level.WARN).index(finding.level))
    hosts, ranks, pids = (
        tuple(dict.fromkeys(name for finding in found for name in getattr(finding.where, field)))
        for field in ("hosts", "ranks", "pids")
    )
    where = Where(hosts=hosts, ranks=tuple(sorted(ranks)), pids=pids)
    of = f", {format_ranks(ranks, hosts)}" if ranks else f" on {format_hosts(hosts)}"
    title = f"{len(found)} more processes block others{of} (--json has all)"
    return [Finding(id=worst.id, level=worst.level, title=title, where=where)]


def of_themselves(case: Case, trees: Sequence[WaitTree]) -> list[Finding]:
    """Report ranks that are stopped or whose file system hangs, even if no process is known to wait for them."""
    blamed = {tree.root for tree in trees}
    found = []
    for kind, name in _ITSELF.items():
        keys = [key for key in case.keys if key not in blamed and _kind(case, key) is kind]
        if not keys:
            continue
        first = root_wait(case, keys[0])
        title = f"{case.index.name(keys[0], whole=True)} {first.does}"
        if len(keys) > 1:
            title += f"; the same for {several(keys[1:], case.index)}"
        others = [key for key in case.keys if key not in keys]
        waits = [root_wait(case, key) for key in others]
        title += f"; {what_they_do(others, waits, case.index)}" if others else ""
        long = kind is Kind.STOPPED or (first.since_s or 0.0) > LONG_S
        found.append(_finding(name, Level.FAIL if long else Level.WARN, title, keys, case, fix=_fix(case, keys, first)))
    return found


def of_gone(case: Case) -> list[Finding]:
    """Report the ranks that have exited while others of their job are still there."""
    if case.job is None:
        return []
    gone = [member for member in case.job.members if member.process is None or member.process.state in ENDED]
    found = []
    others = [key for key in case.keys if _kind(case, key) is not Kind.ENDED]
    if gone and others:
        ranks = [member.rank for member in gone if member.rank is not None]
        hosts = list(dict.fromkeys(member.host for member in gone))
        waits = [root_wait(case, key) for key in others]
        rest = what_they_do(others, waits, case.index)
        # Where no rank sleeps in what may be a collective, the job may just be ending.
        awaited = any(wait.kind in _INSIDE for wait in waits)
        unseen = all(member.process is None for member in gone)
        has, it = ("has", "it") if len(gone) == 1 else ("have", "they")
        ended = f"{has} no process: {it} exited or never started" if unseen else f"{has} exited"
        who = format_ranks(ranks, hosts) if ranks else f"a process ({format_hosts(hosts)})"
        remedy = remedies.find_missing_rank if unseen else remedies.find_cause_of_death
        found.append(
            Finding(
                id="trace.exited",
                level=Level.FAIL if awaited else Level.UNKNOWN,
                title=f"{who} {ended}; {rest}",
                where=Where(hosts=tuple(hosts), ranks=tuple(ranks)),
                fix=remedy(hosts, len(gone)),
            )
        )
    return found


def unreadable(case: Case, user: int) -> list[Finding]:
    """Report the processes that cannot be read, and how to get permission."""
    keys = [key for key in case.keys if _kind(case, key) is Kind.UNREADABLE]
    if not keys:
        return []
    owners = sorted({case.index.processes[key].user for key in keys if key in case.index.processes})
    of = f" of user {', '.join(map(str, owners))}" if owners and owners != [user] else ""
    name = several(keys, case.index)
    names = f"{name}{of} on {format_hosts(host for host, _ in keys)}"
    return [
        _finding(
            "unreadable",
            Level.UNKNOWN,
            f"{names} cannot be read: permission denied",
            keys,
            case,
            fix=_rights(case, user),
        )
    ]


def by_exclusion(case: Case) -> list[Finding]:
    """Report the few ranks that do something else while all others of the job have slept in it for long.

    A rank that waits for its own threads, at the store or for a rank may be in a collective. The few that wait for
    something outside the job, or run, are then what the others wait for. That holds only if all ranks were read:
    otherwise what one of them waits for may be a rank on a host that was not read.
    """
    keys = [key for key in case.keys if _kind(case, key) is not Kind.ENDED]
    inside = [key for key in keys if _kind(case, key) in _INSIDE]
    outside = [key for key in keys if key not in inside]
    if case.job is None or case.job.unseen or not outside or len(outside) > len(inside):
        return []
    if any(_is_unclear(root_wait(case, key)) for key in outside):
        return []
    since = [root_wait(case, key).since_s for key in inside]
    if any(seconds is None or seconds <= LONG_S for seconds in since):
        return []
    running = [key for key in outside if _is_running(root_wait(case, key))]
    waking = [key for key in outside if key not in running and root_wait(case, key).kind is Kind.RUNS]
    still = [key for key in outside if key not in running and key not in waking]
    others = what_they_do(inside, [root_wait(case, key) for key in inside], case.index)
    found = []
    for members, name, level, doubt in (
        (running, "straggler", Level.WARN, "It may only be slower than the others: run this again in a minute. "),
        (
            waking,
            "straggler",
            Level.UNKNOWN,
            "It may only be slower, or poll for something that another rank has to provide. ",
        ),
        (still, "stuck-rank", Level.FAIL, ""),
    ):
        if members:
            waits = [root_wait(case, key) for key in members]
            title = f"{what_they_do(members, waits, case.index, whole=True)}; {others}"
            detail = f"{doubt}All other ranks have slept for more than {LONG_S:g} s, waiting for each other."
            fix = _stacks_of(case, members)
            found.append(_finding(name, level, title, members, case, detail=detail, fix=fix))
    return found


_INSIDE = (Kind.OWN_THREADS, Kind.STORE, Kind.PEER)
"""What may be the wait for a collective."""


def _is_unclear(wait: Wait) -> bool:
    """Return whether it is unknown what it waits for: that may be the job too."""
    is_asleep = wait.thread is None or wait.thread.state != "D"
    return wait.kind is Kind.UNREADABLE or (wait.kind is Kind.KERNEL and is_asleep)


def _is_running(wait: Wait) -> bool:
    return wait.kind is Kind.RUNS and wait.thread is not None and wait.thread.state == "R"


def undecided(case: Case) -> list[Finding]:
    """Report what all ranks do where no rank can be blamed: they run, or /proc cannot decide."""
    keys = [key for key in case.keys if _kind(case, key) not in (Kind.UNREADABLE, Kind.ENDED)]
    waits = [root_wait(case, key) for key in keys]
    if not keys:
        return []
    words = what_they_do(keys, waits, case.index)
    asleep = [wait for wait in waits if wait.kind is not Kind.RUNS]
    if any(wait.since_s is not None and wait.since_s > LONG_S for wait in asleep):
        return [_asleep(case, keys, waits, words)]
    if why := _may_be_hung(case, keys, waits):
        return [_finding("undecided", Level.UNKNOWN, f"{words}: {why}", keys, case, fix=_stacks_of(case, keys))]
    return [_finding("not-hung", Level.INFO, f"no hang seen in {SAMPLED_S:g} s: {words}", keys, case)]


def _may_be_hung(case: Case, keys: Sequence[Key], waits: Sequence[Wait]) -> str:
    """Return why ranks may be hung although none has slept for long; empty if that is unlikely."""
    running = [key for key, wait in zip(keys, waits, strict=True) if _is_running(wait)]
    if len(running) == len(keys) and any(_uses_gpu(case, key) for key in running):
        return "a rank that waits for its GPU is running too, and /proc cannot distinguish that from work"
    if running:
        return ""
    if all(wait.since_s is not None and wait.kind is not Kind.RUNS for wait in waits):
        return "too short to judge; run this again in a few seconds"
    woke = [wait for wait in waits if wait.kind is Kind.RUNS and "sleep" not in wait.does]
    if len(keys) > 1 and len(woke) == len(keys):
        return ""
    return "/proc cannot distinguish a slow step from a polling loop"


def _uses_gpu(case: Case, key: Key) -> bool:
    process = case.index.processes.get(key)
    return process is not None and process.gpu


def _stacks_of(case: Case, keys: Sequence[Key]) -> Fix:
    return Fix(
        text="see where in the code they wait" if len(keys) > 1 else "see where in the code it waits",
        commands=(again(case.request, "pyspy-all", *_about(case)),),
    )


def _asleep(case: Case, keys: list[Key], waits: list[Wait], words: str) -> Finding:
    inside = [key for key, wait in zip(keys, waits, strict=True) if wait.kind in (Kind.OWN_THREADS, Kind.STORE)]
    outside = [(key, wait) for key, wait in zip(keys, waits, strict=True) if key not in inside]
    if inside and outside:
        # Those that wait elsewhere come first: the others most likely wait for them.
        elsewhere = what_they_do([key for key, _ in outside], [wait for _, wait in outside], case.index, whole=True)
        others = what_they_do(inside, [root_wait(case, key) for key in inside], case.index)
        title = words = f"{elsewhere}; {others}: /proc does not show for which rank"
    elif inside and len(keys) > 1:
        title = (
            f"all {len(keys)} wait for another thread of the process or at the store: /proc cannot distinguish a "
            "collective, a lock, an event and a join"
        )
    elif len(keys) > 1:
        title = f"no rank is running, and none is known to wait for another: {words}"
    else:
        title = words
    detail = "" if words in title else f"{words[:1].upper()}{words[1:]}."
    return _finding("undecided", Level.UNKNOWN, title, keys, case, detail=detail, fix=_stacks_of(case, keys))


def _of_tree(case: Case, tree: WaitTree) -> Finding | None:
    wait = root_wait(case, tree.root)
    root = case.index.name(
        tree.root, whole=True, seen_from=_ELSEWHERE if len({host for host, _ in case.keys}) > 1 else ""
    )
    rest = waiting(tree, case.index)
    # A rank that only waits is no culprit; a root that is not a rank is named with the ranks that wait for it.
    is_rank = case.index.rank(tree.root) is not None
    keys = [tree.root, *(edge.waiter for edge in tree.edges if edge.to == tree.root and not is_rank)]
    long = _lasted_s(tree, wait)
    level = Level.FAIL if long is not None and long > LONG_S else Level.WARN
    if tree.is_cycle:
        cycle = [edge.waiter for edge in tree.edges if edge.waiter in {other.to for other in tree.edges}]
        title = f"{several(sorted(cycle), case.index)} wait for each other: {rest}"
        return _finding("waits-for", level, title, sorted(cycle), case, detail=_CYCLE)
    locks = [edge for edge in tree.edges if edge.to == tree.root and edge.wait.kind is Kind.LOCK]
    if locks:
        title = f"{root} holds the lock on {locks[0].wait.end}"
        title += f", and {wait.does}" if wait.kind is not Kind.NETWORK else ""
        return _finding("lock-held", level, f"{title}; {rest}", keys, case, fix=_fix(case, [tree.root], wait, "lock"))
    if wait.kind not in BLAMED:
        return None
    fix = _fix(case, [tree.root], wait)
    return _finding("waits-for", level, f"{root} {wait.does}; {rest}", keys, case, fix=fix)


_ELSEWHERE = "-"
"""No host has this name, so that a process that is no rank is named with its host."""
_CYCLE = "Each reads what the other has to send first: a deadlock, unless another thread of these ranks sends it."


def _lasted_s(tree: WaitTree, wait: Wait) -> float | None:
    """Return how long this has lasted: the shorter of the longest wait and the time that the root has not run."""
    if wait.since_s is not None and any(edge.wait.again for edge in tree.edges):
        return wait.since_s
    waited = max((edge.wait.since_s for edge in tree.edges if edge.wait.since_s is not None), default=None)
    known = [seconds for seconds in (waited, wait.since_s) if seconds is not None]
    return min(known) if known and waited is not None else None


def _fix(case: Case, keys: Sequence[Key], wait: Wait, why: str = "") -> Fix | None:
    host, pid = keys[0]
    hosts = format_hosts(key[0] for key in keys)
    place = f"on {hosts}"
    if wait.thaws:
        return remedies.thaw(hosts, wait.thaws)
    if wait.thread is not None and wait.thread.state == "t":
        return Fix(text=f"{place}, detach the debugger or the tracer, or let it continue; SIGCONT does not help")
    if wait.kind is Kind.STOPPED:
        return remedies.resume(keys)
    if why == "lock":
        return Fix(text=f"{place}, find out what it does while it holds the lock", commands=(_stack_of(case, pid),))
    if wait.kind is Kind.STORAGE and wait.on.startswith("/"):
        path = wait.on.removesuffix(" (D)").rpartition("/")[0] or "/"
        commands = (f"timeout 5 stat -f {shlex.quote(path)}", "dmesg -T | tail -n 20")
        return Fix(text=f"{place}, check whether the file system answers, and read the kernel log", commands=commands)
    if wait.kind in (Kind.SLEEP, Kind.FILE, Kind.CHILD) and (host, pid) in case.index.processes:
        return Fix(text="show where in the program that is", commands=(_stack_of(case, pid),))
    return None


def _stack_of(case: Case, pid: int) -> str:
    return again(case.request, "pyspy-all", "--pid", str(pid))


def _about(case: Case) -> tuple[str, ...]:
    wanted = case.request.wanted
    if wanted.job:
        return ("--job", shlex.quote(wanted.job))
    return tuple(word for pid in wanted.pids for word in ("--pid", str(pid)))


def _rights(case: Case, user: int) -> Fix:
    if user == 0:
        return remedies.ptrace_in_container()
    return remedies.as_other_user(again(case.request, "trace", "blocked", *_about(case)))


def _kind(case: Case, key: Key) -> Kind:
    return root_wait(case, key).kind


def _finding(
    name: str,
    level: Level,
    title: str,
    keys: Sequence[Key],
    case: Case,
    *,
    detail: str = "",
    fix: Fix | None = None,
) -> Finding:
    where = Where(
        hosts=tuple(dict.fromkeys(host for host, _ in keys)),
        ranks=tuple(sorted({rank for rank in map(case.index.rank, keys) if rank is not None})),
        pids=tuple(dict.fromkeys(pid for _, pid in keys)),
    )
    return Finding(id=f"trace.{name}", level=level, title=title, detail=detail, where=where, fix=fix)


def again(request: Request, *words: str) -> str:
    """Format a command to paste: this program with the same hosts."""
    return remedies.again(request.program, request.cluster, *words)


def several(keys: Iterable[Key], index: ProcessIndex, *, whole: bool = False) -> str:
    """Format processes: "ranks 0-1,3", "pids 17,19"; a single one with host and pid if it is to be `whole`."""
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
    """Format who waits: "rank 0 waits for its data: recvfrom on 10.0.0.2:51916; rank 2 waits for rank 0: ..."."""
    groups: dict[tuple[Key, str, str], list[Edge]] = {}
    for edge in tree.edges:
        groups.setdefault((edge.to, edge.wait.call, edge.wait.wants), []).append(edge)
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


def what_they_do(keys: Sequence[Key], waits: Sequence[Wait], index: ProcessIndex, *, whole: bool = False) -> str:
    """Format what processes do, folded: "ranks 0-1,3 wait for another thread of the process (futex, 60 s)"."""
    groups: dict[tuple[Kind, str], list[tuple[Key, Wait]]] = {}
    for key, wait in zip(keys, waits, strict=True):
        alike = (wait.kind, wait.call) if wait.kind in _ALIKE else (wait.kind, f"{key}")
        groups.setdefault(alike, []).append((key, wait))
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
