"""The findings of trace blocked. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.commands.trace.blocked.result import LOOK_S, Kind, Wait
from distdiag.commands.trace.blocked.waits import ENDED
from distdiag.commands.trace.blocked.words import again, several, standing, waiting
from distdiag.node.machine import STOPPED
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.blocked.chains import Tree, Waits
    from distdiag.commands.trace.blocked.model import Request
    from distdiag.commands.trace.who import Key, People
    from distdiag.jobs.model import Job

LONG_S = 5.0
"""Who has stood still for so long is taken as stuck; less may be a step of the training."""
BLAMED = (Kind.STOPPED, Kind.STORAGE, Kind.KERNEL, Kind.SLEEP, Kind.FILE, Kind.CHILD, Kind.ENDED)
"""What holds others up and has nothing to do with them."""
_ITSELF = {Kind.STOPPED: "stopped", Kind.STORAGE: "storage"}
"""What is a fault even if nobody is known to wait for it."""


@dataclass(frozen=True)
class Case:
    """One job as it stands: its ranks, or the processes that were asked for."""

    request: Request
    job: Job | None
    keys: tuple[Key, ...]
    waits: Waits

    @property
    def people(self) -> People:
        """Who is who."""
        return self.waits.people


def root_wait(case: Case, key: Key) -> Wait:
    """Tell what the process at the end of a chain does; of one that was not looked at, what its state tells."""
    wait = case.waits.main(key)
    if wait is not None:
        return wait
    person, process = case.people.persons.get(key), case.people.processes.get(key)
    state = person.state if person is not None else process.state if process is not None else ""
    kind = Kind.STOPPED if state in STOPPED else Kind.RUNS if state == "R" else Kind.NETWORK
    kind = Kind.ENDED if state in ENDED else Kind.KERNEL if state == "D" else kind
    words = {Kind.STOPPED: "is stopped (T)", Kind.RUNS: "runs", Kind.KERNEL: "waits in the kernel (D)"}
    does = words.get(kind, "has ended" if kind is Kind.ENDED else "was not looked at: it is no rank")
    return Wait(kind=kind, call="-", on="", does=does, since_s=None)


def of_trees(case: Case, trees: Sequence[Tree]) -> list[Finding]:
    """Name the processes that hold others up."""
    found = [_of_tree(case, tree) for tree in trees]
    return [one for one in found if one is not None]


def of_themselves(case: Case, trees: Sequence[Tree]) -> list[Finding]:
    """Name those that are stopped, or whose file system does not answer, though nobody is known to wait for them."""
    told = {tree.root for tree in trees}
    found = []
    for kind, name in _ITSELF.items():
        keys = [key for key in case.keys if key not in told and _kind(case, key) is kind]
        if not keys:
            continue
        first = root_wait(case, keys[0])
        title = f"{case.people.name(keys[0], whole=True)} {first.does}"
        if len(keys) > 1:
            title += f"; so {'is' if len(keys) == 2 else 'are'} {several(keys[1:], case.people)}"
        others = [key for key in case.keys if key not in keys]
        waits = [root_wait(case, key) for key in others]
        title += f"; {standing(others, waits, case.people)}" if others else ""
        long = kind is Kind.STOPPED or (first.since_s or 0.0) > LONG_S
        found.append(_finding(name, Level.FAIL if long else Level.WARN, title, keys, case, fix=_fix(case, keys, first)))
    return found


def of_gone(case: Case) -> list[Finding]:
    """Name the ranks that have ended while others of their job go on; and those that were not seen."""
    if case.job is None:
        return []
    gone = [one for one in case.job.members if one.process is None or one.process.state in ENDED]
    found = []
    others = [key for key in case.keys if _kind(case, key) is not Kind.ENDED]
    if gone and others:
        ranks = [one.rank for one in gone if one.rank is not None]
        who = name_ranks(ranks) if ranks else "a process"
        hosts = fold(dict.fromkeys(one.host for one in gone))
        waits = [root_wait(case, key) for key in others]
        rest = standing(others, waits, case.people)
        # Where nobody sleeps in what may be a collective, the job may just be at its end.
        awaited = any(wait.kind in _INSIDE for wait in waits)
        found.append(
            Finding(
                id="trace.gone",
                level=Level.FAIL if awaited else Level.UNKNOWN,
                title=f"{who} ({hosts}) {'has' if len(gone) == 1 else 'have'} ended; {rest}",
                where=Where(hosts=tuple(dict.fromkeys(one.host for one in gone)), ranks=tuple(ranks)),
                fix=Fix(
                    text=f"read the end of that rank's log, and whether the kernel ended it on {hosts}",
                    commands=("dmesg -T | grep -iE 'out of memory|killed process|segfault'",),
                ),
            )
        )
    return found


def unseen(case: Case) -> list[Finding]:
    """Name the ranks that were on none of the hosts looked at."""
    if case.job is None or not case.job.unseen:
        return []
    ranks = case.job.unseen
    hosts = fold(dict.fromkeys(one.host for one in case.job.members))
    were = "was" if len(ranks) == 1 else "were"
    title = f"{name_ranks(ranks)} of {case.job.world_size} {were} not seen on {hosts}: gone, or on other hosts"
    fix = Fix(text="look at all hosts of the job: --hosts LIST, or --slurm-job ID")
    return [Finding(id="trace.unseen", level=Level.UNKNOWN, title=title, where=Where(ranks=ranks), fix=fix)]


def unreadable(case: Case, user: int) -> list[Finding]:
    """Name those that may not be read, and say what gives the right to."""
    keys = [key for key in case.keys if _kind(case, key) is Kind.UNREADABLE]
    if not keys:
        return []
    owners = sorted({case.people.processes[key].user for key in keys if key in case.people.processes})
    of = f" of user {', '.join(map(str, owners))}" if owners and owners != [user] else ""
    name = several(keys, case.people)
    names = f"{name}{of} on {fold(dict.fromkeys(host for host, _ in keys))}"
    return [_finding("unreadable", Level.UNKNOWN, f"{names} may not be read", keys, case, fix=_rights(case, user))]


def by_exclusion(case: Case) -> list[Finding]:
    """Name the few that do something else while all others of the job have been asleep inside of it for long.

    Who waits in threads of its own, at the store or for a rank may be in a collective. The few that wait for something
    outside of the job, or run, are then what the others wait for. That holds only if all ranks were seen: what one of
    them waits for may else be a rank, on a host that was not looked at.
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
    others = standing(inside, [root_wait(case, key) for key in inside], case.people)
    found = []
    for members, name, level, doubt in (
        (running, "straggler", Level.WARN, "It may only be slower than the others: look again in a minute. "),
        (
            waking,
            "straggler",
            Level.UNKNOWN,
            "It may only be slower, or ask again and again for what another owes it. ",
        ),
        (still, "stuck-rank", Level.FAIL, ""),
    ):
        if members:
            waits = [root_wait(case, key) for key in members]
            title = f"{standing(members, waits, case.people, whole=True)}; {others}"
            detail = f"{doubt}All others have been asleep inside the job for more than {LONG_S:g} s."
            fix = _stacks_of(case, members)
            found.append(_finding(name, level, title, members, case, detail=detail, fix=fix))
    return found


_INSIDE = (Kind.OWN_THREADS, Kind.STORE, Kind.PEER)
"""What may be the wait for a collective."""


def _is_unclear(wait: Wait) -> bool:
    """Tell whether nothing says what it waits for: it may be the job as well."""
    is_asleep = wait.thread is None or wait.thread.state != "D"
    return wait.kind is Kind.UNREADABLE or (wait.kind is Kind.KERNEL and is_asleep)


def _is_running(wait: Wait) -> bool:
    return wait.kind is Kind.RUNS and wait.thread is not None and wait.thread.state == "R"


def undecided(case: Case) -> list[Finding]:
    """Say what all of them do where nobody can be blamed: they go on, or /proc cannot tell."""
    keys = [key for key in case.keys if _kind(case, key) not in (Kind.UNREADABLE, Kind.ENDED)]
    waits = [root_wait(case, key) for key in keys]
    if not keys:
        return []
    told = standing(keys, waits, case.people)
    asleep = [wait for wait in waits if wait.kind is not Kind.RUNS]
    if any(wait.since_s is not None and wait.since_s > LONG_S for wait in asleep):
        return [_stands_still(case, keys, waits, told)]
    if why := _may_be_hung(case, keys, waits):
        return [_finding("undecided", Level.UNKNOWN, f"{told}: {why}", keys, case, fix=_stacks_of(case, keys))]
    return [_finding("not-hung", Level.INFO, f"not hung, as far as can be seen in {LOOK_S:g} s: {told}", keys, case)]


def _may_be_hung(case: Case, keys: Sequence[Key], waits: Sequence[Wait]) -> str:
    """Say why ranks of which none has slept for long may be hung all the same; empty if that is not likely."""
    running = [key for key, wait in zip(keys, waits, strict=True) if _is_running(wait)]
    if len(running) == len(keys) and any(_uses_gpu(case, key) for key in running):
        return "who waits for a GPU runs as well, and /proc does not tell it from work"
    if running:
        return ""
    if all(wait.since_s is not None and wait.kind is not Kind.RUNS for wait in waits):
        return "not for long; look again in a few seconds"
    woke = [wait for wait in waits if wait.kind is Kind.RUNS and "sleep" not in wait.does]
    if len(keys) > 1 and len(woke) == len(keys):
        return ""
    return "/proc does not tell a slow step from a loop that only asks again and again"


def _uses_gpu(case: Case, key: Key) -> bool:
    process = case.people.processes.get(key)
    return process is not None and process.gpu


def _stacks_of(case: Case, keys: Sequence[Key]) -> Fix:
    return Fix(
        text="read their stacks" if len(keys) > 1 else "read its stack",
        commands=(again(case.request, "pyspy-all", *_about(case)),),
    )


def _stands_still(case: Case, keys: list[Key], waits: list[Wait], told: str) -> Finding:
    inside = [key for key, wait in zip(keys, waits, strict=True) if wait.kind in (Kind.OWN_THREADS, Kind.STORE)]
    odd = [(key, wait) for key, wait in zip(keys, waits, strict=True) if key not in inside]
    if inside and odd:
        # Those that stand elsewhere come first: the others most likely wait for them.
        elsewhere = standing([key for key, _ in odd], [wait for _, wait in odd], case.people, whole=True)
        others = standing(inside, [root_wait(case, key) for key in inside], case.people)
        title = told = f"{elsewhere}; {others}: /proc cannot tell for whom"
    elif inside and len(keys) > 1:
        title = (
            f"all {len(keys)} wait for other threads of their own, or at the store: in a collective, a lock, an event "
            "or a join, which /proc does not tell apart"
        )
    elif len(keys) > 1:
        title = f"nobody runs, and nobody is known to wait for another: {told}"
    else:
        title = told
    detail = "" if told in title else f"{told[:1].upper()}{told[1:]}."
    return _finding("undecided", Level.UNKNOWN, title, keys, case, detail=detail, fix=_stacks_of(case, keys))


def _of_tree(case: Case, tree: Tree) -> Finding | None:
    wait = root_wait(case, tree.root)
    root = case.people.name(tree.root, whole=True)
    rest = waiting(tree, case.people)
    # Who only waits for it is no culprit; what is no rank is named with the ranks that wait for it.
    is_rank = case.people.rank(tree.root) is not None
    keys = [tree.root, *(edge.waiter for edge in tree.edges if edge.to == tree.root and not is_rank)]
    long = _stood_s(tree, wait)
    level = Level.FAIL if long is not None and long > LONG_S else Level.WARN
    if tree.is_cycle:
        circle = [edge.waiter for edge in tree.edges if edge.waiter in {other.to for other in tree.edges}]
        title = f"{several(sorted(circle), case.people)} wait for each other: {rest}"
        return _finding("waits-for", level, title, sorted(circle), case, detail=_CYCLE)
    locks = [edge for edge in tree.edges if edge.to == tree.root and edge.wait.kind is Kind.LOCK]
    if locks:
        title = f"{root} holds the lock on {locks[0].wait.end}"
        title += f", and {wait.does}" if wait.kind is not Kind.NETWORK else ""
        return _finding("lock-held", level, f"{title}; {rest}", keys, case, fix=_fix(case, [tree.root], wait, "lock"))
    if wait.kind not in BLAMED:
        return None
    fix = _fix(case, [tree.root], wait)
    return _finding("waits-for", level, f"{root} {wait.does}; {rest}", keys, case, fix=fix)


_CYCLE = "Each reads what the other is to send first; unless another thread of theirs sends it, this never ends."


def _stood_s(tree: Tree, wait: Wait) -> float | None:
    """Tell for how long it has stood like this: as long as the longest waiter has waited, and the root has not run."""
    if wait.since_s is not None and any(edge.wait.again for edge in tree.edges):
        return wait.since_s
    waited = max((edge.wait.since_s for edge in tree.edges if edge.wait.since_s is not None), default=None)
    known = [seconds for seconds in (waited, wait.since_s) if seconds is not None]
    return min(known) if known and waited is not None else None


def _fix(case: Case, keys: Sequence[Key], wait: Wait, why: str = "") -> Fix | None:
    host, pid = keys[0]
    place = f"on {fold(dict.fromkeys(key[0] for key in keys))}"
    if wait.thaws:
        return Fix(text=f"{place}, thaw its cgroup: docker unpause CONTAINER, or as root", commands=(wait.thaws,))
    if wait.thread is not None and wait.thread.state == "t":
        return Fix(text=f"{place}, leave the debugger or the tracer: detach, or let it continue; SIGCONT does not help")
    if wait.kind is Kind.STOPPED:
        pids = " ".join(str(key[1]) for key in keys)
        return Fix(text=f"{place}, let it go on, and find who stopped it", commands=(f"kill -CONT {pids}",))
    if why == "lock":
        return Fix(text=f"{place}, see what it does with the lock", commands=(_look_at(case, pid),))
    if wait.kind is Kind.STORAGE and wait.on.startswith("/"):
        path = wait.on.removesuffix(" (D)").rpartition("/")[0] or "/"
        commands = (f"timeout 5 stat -f {shlex.quote(path)}", "dmesg -T | tail -n 20")
        return Fix(text=f"{place}, see whether its file system answers, and what the kernel says", commands=commands)
    if wait.kind in (Kind.SLEEP, Kind.FILE, Kind.CHILD) and (host, pid) in case.people.processes:
        return Fix(text="see where in the program that is", commands=(_look_at(case, pid),))
    return None


def _look_at(case: Case, pid: int) -> str:
    return again(case.request, "pyspy-all", "--pid", str(pid))


def _about(case: Case) -> tuple[str, ...]:
    wanted = case.request.wanted
    if wanted.job:
        return ("--job", shlex.quote(wanted.job))
    return tuple(word for pid in wanted.pids for word in ("--pid", str(pid)))


def _rights(case: Case, user: int) -> Fix:
    if user != 0:
        command = again(case.request, "trace", "blocked", *_about(case))
        return Fix(text="run it as that user, or as root", commands=(f'sudo env "PATH=$PATH" {command}',))
    return Fix(
        text="give the container the right to read its processes: docker run --cap-add SYS_PTRACE; in Kubernetes "
        "securityContext.capabilities.add: [SYS_PTRACE]; or run distdiag on the host"
    )


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
        ranks=tuple(sorted({rank for rank in map(case.people.rank, keys) if rank is not None})),
        pids=tuple(dict.fromkeys(pid for _, pid in keys)),
    )
    return Finding(id=f"trace.{name}", level=level, title=title, detail=detail, where=where, fix=fix)
