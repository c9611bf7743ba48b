"""Ranks out of step, from the lines of NCCL's watchdog alone, by process group. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis.job_logs.types import number_in
from distdiag.fold import by_key
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.facts.logs.scan import Event

_EQUAL_SIZES = (
    *("ALLREDUCE", "ALLGATHER", "BROADCAST", "REDUCE", "BARRIER"),
    *("ALLGATHER_BASE", "_ALLGATHER_BASE", "REDUCE_SCATTER_BASE"),
)
_MOST_SILENT = 0.25


@dataclass(kw_only=True)
class RankInGroup:
    """One rank's watchdog reports about one group. Numbers are of collectives; -1: none yet, None: not reported."""

    rank: int
    seq: int | None = None
    op: str = ""
    sizes: str = ""
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    line: str = ""
    member: str = ""


@record(kw_only=True)
class Desync:
    """The judgement on one group. `kind`: behind, mismatch, silent, same, never, outside, unclear.

    `last_called`: the newest collective of the ranks that are behind, 0 for none.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    what: str
    last_called: int | None = None
    evidence: tuple[str, ...] = field(default=())


def judge(lines: Iterable[tuple[int, Event]], seen: Iterable[int]) -> list[Desync]:
    """Judge each group, surest first; `seen`: all ranks with any trace."""
    groups: dict[str, dict[int, RankInGroup]] = {}
    named: dict[tuple[int, int | None], str] = {}
    for rank, event in lines:
        group = event.groups.get("pg")
        if group is None and event.groups.get("SeqNum"):
            # Older torch omits the group; the status line with the same rank and number has it.
            group = named.get((rank, number_in(event.groups["SeqNum"])), "")
        member = groups.setdefault(group or "", {}).setdefault(rank, RankInGroup(rank=rank))
        _take(member, event)
        if event.groups.get("failed"):
            named[rank, number_in(event.groups["failed"])] = group or ""
    if "" in groups and len(groups) == 2:
        # Lines without a group belong to the only named one.
        (other,) = [name for name in groups if name]
        for rank, member in groups.pop("").items():
            _merge(groups[other].setdefault(rank, RankInGroup(rank=rank)), member)
    world = sorted(set(seen) | {rank for members in groups.values() for rank in members})
    found = [_judge(name, members, world) for name, members in groups.items()]
    order = ("behind", "mismatch", "silent", "never", "same", "outside", "unclear")
    return sorted(found, key=lambda desync: order.index(desync.kind))


def _take(member: RankInGroup, event: Event) -> None:
    groups = event.groups
    member.member = groups.get("member", member.member)
    if event.id == "watchdog" and member.seq is None:
        member.line = event.text
        member.op = groups.get("OpType", "")
        member.sizes = groups.get("NumelIn") or groups.get("TensorShape") or ""
        member.seq = number_in(groups.get("SeqNum"))
    for name in ("enqueued", "started", "completed"):
        value = number_in(groups.get(name))
        if value is not None:
            setattr(member, name, value)
    if event.id == "status":
        member.line = member.line or event.text
        if member.seq is None:
            member.seq = number_in(groups.get("failed"))


def _merge(member: RankInGroup, more: RankInGroup) -> None:
    for name in ("seq", "enqueued", "started", "completed"):
        if getattr(member, name) is None:
            setattr(member, name, getattr(more, name))
    member.op, member.sizes = member.op or more.op, member.sizes or more.sizes
    member.line, member.member = more.line or member.line, member.member or more.member


def _judge(name: str, members: dict[int, RankInGroup], world: list[int]) -> Desync:
    waiting = {rank: member for rank, member in members.items() if member.seq is not None}

    def made(kind: str, ranks: Iterable[int], what: str, last_called: int | None = None) -> Desync:
        ranks = tuple(sorted(ranks))
        others = tuple(rank for rank in members if rank not in ranks)
        lines = [members[rank].line for rank in (*ranks[:2], *others) if rank in members]
        evidence = tuple(line for line in lines if line)[:3]
        return Desync(
            kind=kind, group=name, ranks=ranks, others=others, what=what, last_called=last_called, evidence=evidence
        )

    if _is_of_several(members.values()):
        return made("unclear", (), "several process groups have this number, so their ranks cannot be compared")
    if not waiting:
        idle = [
            rank
            for rank, member in members.items()
            if member.completed is not None and member.completed == member.enqueued
        ]
        if idle and len(idle) == len(members):
            return made("outside", (), "all enqueued collectives are complete: the ranks wait outside NCCL")
        return made("unclear", (), "no rank reports which collective it waits in")
    last = max(member.seq for member in waiting.values() if member.seq is not None)
    behind = [
        rank
        for rank, member in members.items()
        if member.enqueued is not None and member.enqueued < last and (member.seq is None or member.seq < last)
    ]
    at_last = [member for member in waiting.values() if member.seq == last]
    op = Counter(member.op for member in at_last if member.op).most_common(1)
    what = f"collective {last}{f' ({op[0][0]})' if op else ''}"
    if behind:
        return made("behind", behind, what, min(members[rank].enqueued or 0 for rank in behind))
    if len({member.seq for member in waiting.values()}) > 1:
        return made("unclear", (), f"ranks wait in different collectives: {_by_number(waiting.values())}")
    differing = _differing(at_last)
    if differing is not None:
        return made("mismatch", *differing)
    silent = [rank for rank in world if rank not in members]
    if silent and name in ("", "0") and len(members) >= 2 and len(silent) <= max(1, _MOST_SILENT * len(world)):
        return made("silent", silent, what)
    if silent:
        return made("unclear", (), f"{len(members)} ranks wait in {what}; {len(silent)} report nothing")
    never = last <= 1 and all(member.completed is not None and member.completed <= 0 for member in at_last)
    return made("never" if never else "same", (), what)


def _differing(members: list[RankInGroup]) -> tuple[list[int], str] | None:
    """Return the ranks outside of the majority (none without one), and a summary of all calls; None if all agree."""
    ops: dict[str, list[int]] = {}
    for member in members:
        if member.op:
            op = member.op + (f" of {member.sizes}" if member.sizes and member.op in _EQUAL_SIZES else "")
            ops.setdefault(op, []).append(member.rank)
    if len(ops) < 2:
        return None
    ordered = sorted(ops.items(), key=lambda item: -len(item[1]))
    words = "; ".join(f"{op} on {name_ranks(ranks)}" for op, ranks in ordered[:4])
    minority = [rank for _, ranks in ordered[1:] for rank in ranks]
    return (minority if len(ordered[0][1]) > len(minority) else []), words


def _is_of_several(members: Iterable[RankInGroup]) -> bool:
    """Return whether two ranks have the same number in the group: older releases number groups per rank."""
    numbers = [member.member for member in members if member.member]
    return len(numbers) > len(set(numbers))


def _by_number(members: Iterable[RankInGroup]) -> str:
    ordered = sorted(members, key=lambda member: member.seq or 0)
    by_number = by_key((f"{member.seq}{f' ({member.op})' if member.op else ''}", member.rank) for member in ordered)
    return "; ".join(f"{name_ranks(ranks)} in {number}" for number, ranks in list(by_number.items())[:4])
