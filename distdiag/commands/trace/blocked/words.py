"""How those who wait are put into words. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks, name_ranks
from distdiag.commands.trace.blocked.result import Kind
from distdiag.commands.trace.blocked.waits import lasting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.trace.blocked.chains import Edge, Tree
    from distdiag.commands.trace.blocked.model import Request
    from distdiag.commands.trace.blocked.result import Wait
    from distdiag.commands.trace.who import Key, People

_NAMED = 8
_PARTS = 4
_FOR = {"r": "its data", "w": "it to read"}


def again(request: Request, *words: str) -> str:
    """Write a command to paste: this program with the same hosts."""
    typed = [part for name, value in request.cluster.typed() for part in (name, shlex.quote(value))]
    return " ".join([request.program, *words, *typed])


def several(keys: Iterable[Key], people: People, *, whole: bool = False) -> str:
    """Name processes: "ranks 0-1,3", "pids 17,19"; a single one with host and pid if it is to be `whole`."""
    chosen = list(dict.fromkeys(keys))
    ranks = [people.rank(key) for key in chosen]
    if len(chosen) == 1:
        return people.name(chosen[0], whole=whole)
    if all(rank is not None for rank in ranks):
        return name_ranks(rank for rank in ranks if rank is not None)
    if len(chosen) <= _NAMED:
        return "pids " + fold_ranks(pid for _, pid in chosen)
    return f"{len(chosen)} processes"


def waiting(tree: Tree, people: People) -> str:
    """Say who waits: "rank 0 waits for its data: recvfrom on 10.0.0.2:51916; rank 2 waits for rank 0: ..."."""
    groups: dict[tuple[Key, str, str], list[Edge]] = {}
    for edge in tree.edges:
        groups.setdefault((edge.to, edge.wait.call, edge.wait.wants), []).append(edge)
    parts = [_group(group, tree, people) for group in list(groups.values())[:_PARTS]]
    rest = sum(len(group) for group in list(groups.values())[_PARTS:])
    return "; ".join([*parts, *([f"{rest} more wait for these"] if rest else [])])


def _group(group: Sequence[Edge], tree: Tree, people: People) -> str:
    first = group[0]
    who = several((edge.waiter for edge in group), people)
    verb = "waits" if len(group) == 1 else "wait"
    if first.wait.kind is Kind.LOCK:
        what = "for it" if first.to == tree.root else f"for the lock on {first.wait.end}"
        return f"{who} {verb} {what} ({first.wait.call}, {lasting(first.wait.since_s)})"
    is_plain = first.to == tree.root and not tree.is_cycle
    whom = _FOR.get(first.wait.wants, "it") if is_plain else people.name(first.to)
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    thread = first.wait.thread
    via = f" in its thread {thread.tid}" if thread is not None and thread.tid != first.waiter[1] else ""
    return f"{who} {verb} for {whom}: {first.wait.call} on {first.wait.end}{more}{via}"


def standing(keys: Sequence[Key], waits: Sequence[Wait], people: People, *, whole: bool = False) -> str:
    """Say what processes do, the same of several at once: "ranks 0-1,3 wait for other threads of their own (futex)"."""
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
            f"{several(members, people, whole=whole)} {words}" + (f" ({first.call}, {since})" if len(group) > 1 else "")
        )
    rest = sum(len(group) for group in list(groups.values())[_PARTS:])
    return "; ".join([*parts, *([f"{rest} more wait elsewhere"] if rest else [])])


_ALIKE = {
    Kind.OWN_THREADS: "wait for other threads of their own",
    Kind.STORE: "wait for a key in the job's store",
    Kind.SLEEP: "sleep",
    Kind.RUNS: "run",
    Kind.PEER: "wait for others",
}


def _since(waits: Sequence[Wait]) -> str:
    known = [wait.since_s for wait in waits if wait.since_s is not None]
    if not known:
        return "?"
    least, most = lasting(min(known)), lasting(max(known))
    return least if least == most else f"{least.removesuffix(' s')} to {most}"
