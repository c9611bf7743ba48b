"""Who is blocked, on whom, and who of them is not: the finding trace.blocked. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.commands.trace.sys.words import lasting, several, span, thread, where, who
from distdiag.diagnosis.wait_reasons import Kind
from distdiag.node import syscall_names
from distdiag.report import Finding, Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.sys.model import Request, Subject
    from distdiag.diagnosis.process_index import Key

LONG_S = 5.0
"""Who has stood still for so long is taken as stuck; less may be a step of the training."""
SHORT_S = 1.0
"""Less is not worth a word."""
_COUNTS = (Kind.PEER, Kind.LOCK, Kind.NETWORK, Kind.FILE, Kind.STORAGE, Kind.STOPPED)
_ANY_OF = (*syscall_names.POLLS, *syscall_names.SELECTS, *syscall_names.EPOLLS)
_SENTENCES = 4


def blocked(request: Request, subjects: Sequence[Subject]) -> list[Finding]:
    """Name the processes that are blocked, those together that wait for the same one in the end."""
    stuck = {one.key: one for one in _stuck(subjects)}
    everybody = {one.key: one for one in subjects if one.is_main}
    by_root: dict[Key, list[Subject]] = {}
    roots = _roots(stuck)
    for one in stuck.values():
        by_root.setdefault(roots[one.key], []).append(one)
    return [_finding(request, key, group, everybody) for key, group in by_root.items()]


def _stuck(subjects: Sequence[Subject]) -> Iterator[Subject]:
    """Give for each process the thread that it is blocked in: its main one, or the one that this may wait for."""
    others: dict[Key, list[Subject]] = {}
    for one in subjects:
        if not one.is_main and _is_long(one) and one.kind is Kind.PEER and one.call not in _ANY_OF:
            others.setdefault(one.key, []).append(one)
    for one in subjects:
        if not one.is_main:
            continue
        if _is_long(one) and one.kind in _COUNTS:
            yield one
        elif _is_long(one) and one.kind is Kind.OWN_THREADS and len(others.get(one.key, ())) == 1:
            yield others[one.key][0]


def _is_long(one: Subject) -> bool:
    return one.kind is Kind.STOPPED or (one.blocked_s is not None and one.blocked_s >= SHORT_S)


def _roots(stuck: dict[Key, Subject]) -> dict[Key, Key]:
    """Follow from each who waits for whom to the end; a circle stands for its least member."""
    roots: dict[Key, Key] = {}
    for key in stuck:
        way: dict[Key, int] = {}
        at = key
        while at not in roots and at not in way:
            way[at] = len(way)
            if at not in stuck or len(stuck[at].peers) != 1:
                roots[at] = at
                break
            at = stuck[at].peers[0]
        root = roots[at] if at in roots else min(list(way)[way[at] :])
        roots.update(dict.fromkeys(way, root))
    return roots


def _finding(request: Request, root: Key, group: list[Subject], everybody: dict[Key, Subject]) -> Finding:
    waiters = [one for one in group if one.key != root or one.peers]
    ends = everybody.get(root)
    in_circle = any(one.key == root and one.peers for one in group)
    sentences = _sentences(waiters or group)
    if in_circle:
        sentences.append("they wait for each other")
    elif ends is not None and waiters:
        is_stuck = any(one.key == root for one in group)
        how = _does(ends)
        sentences.append(f"{who(ends)} {how}" if is_stuck else f"{who(ends)} is not blocked on another rank: it {how}")
    elif waiters and waiters[0].peers:
        sentences.append("that one was not traced")
    keys = list({one.key: one for one in [*group, *([ends] if ends is not None else [])]}.values())
    goes_on = ends is not None and not ends.idle and not in_circle and ends.kind in (Kind.RUNS, Kind.OWN_THREADS)
    long = any(one.kind is Kind.STOPPED or (one.blocked_s or 0.0) > LONG_S for one in group)
    return Finding(
        id="trace.blocked",
        level=Level.FAIL if long and not goes_on else Level.WARN,
        title="; ".join(sentences),
        where=where(keys),
        evidence=tuple(_evidence(one) for one in group[:_SENTENCES] if one.kind is not Kind.STOPPED),
        fix=_fix(request, ends if ends is not None else group[0], is_traced=ends is not None),
    )


def _sentences(waiters: Sequence[Subject]) -> list[str]:
    groups: dict[tuple[str, object], list[Subject]] = {}
    for one in waiters:
        groups.setdefault((one.call if one.kind is not Kind.STOPPED else "", one.peers or one.on), []).append(one)
    found = []
    for group in list(groups.values())[:_SENTENCES]:
        first, has = group[0], "has" if len(group) == 1 else "have"
        name = several(group) if len(group) > 1 or first.is_main else thread(first)
        if first.kind is Kind.STOPPED:
            found.append(f"{name} {'is' if len(group) == 1 else 'are'} {first.on}")
            continue
        on = first.on if len(group) == 1 else first.on.rpartition(" = ")[2]
        since = span([one.blocked_s for one in group])
        found.append(f"{name} {has} been blocked for {since} in {first.call} on {on}")
    rest = sum(map(len, list(groups.values())[_SENTENCES:]))
    return [*found, *([f"{rest} more are blocked"] if rest else [])]


def _does(one: Subject) -> str:
    """Say what the one at the end does, as the end of a sentence."""
    calls = one.log.n_calls if one.log is not None else 0
    if one.kind is Kind.ENDED:
        return "has ended"
    if one.kind is Kind.RUNS and not calls:
        return f"computes, without one system call in {lasting(one.span_s)}"
    if one.kind is Kind.RUNS:
        return f"goes on, with {calls} system calls in {lasting(one.span_s)}"
    does = one.does.partition(" (")[0]
    brackets = ", ".join(part for part in (one.call, f"{lasting(one.blocked_s)}" if one.blocked_s else "") if part)
    return f"{does} ({brackets})" if brackets and one.kind is not Kind.STOPPED and "is in" not in does else does


def _evidence(one: Subject) -> str:
    last = one.log.last if one.log is not None else None
    target = f"({last.fd}<{last.target}>, ..." if last is not None and last.target and last.fd is not None else ""
    return f"{thread(one)}: {one.call}{target}"


def _fix(request: Request, one: Subject, *, is_traced: bool) -> Fix | None:
    if one.pid is None:
        return None
    typed = [part for name, value in request.cluster.typed() for part in (name, shlex.quote(value))]
    if is_traced and one.kind is Kind.STOPPED:
        where = f"on {one.host}, " if one.host else ""
        return Fix(text=f"{where}let it go on, and find who stopped it", commands=(f"kill -CONT {one.pid}",))
    if is_traced:
        command = " ".join([request.program, "pyspy-all", "--pid", str(one.pid), *typed])
        return Fix(text=f"see where in the program {who(one)} is, while it lives", commands=(command,))
    command = " ".join([request.program, "trace", "blocked", *typed])
    return Fix(text="see what all ranks wait for; that needs no strace", commands=(command,))
