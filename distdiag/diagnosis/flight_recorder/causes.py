"""Causes of a hang, from matched dumps. Pure; findings.py has the texts.

Ranks that called different operations as the same collective are reported first: the minority is at fault, and a tie
blames no rank. Otherwise each rank waits, in the oldest unfinished operation of each group, for the members missing
from it. A rank is blamed if others wait for it and it waits for none, or if its own device did not finish an operation
that peers finished. If every awaited rank waits too, the ranks form a cycle.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING

from distdiag.diagnosis.flight_recorder.matching import find_call, times
from distdiag.facts.recorder.read_dump import FAILED
from distdiag.fold import by_key
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distdiag.diagnosis.flight_recorder.matching import Call, Group, GroupKey, Job

_ONE_SIDED = {"broadcast", "reduce", "gather", "gather_single", "scatter", "_broadcast_oop", "_reduce_oop"}
"""Operations that may end on some ranks before others have made the call."""
_LATE_NS = 1_000_000
_LATE_CALLS = 8
_LATE_SHARE = 0.1
_LATE_SPAN_NS = 1_000_000_000
"""Calls within less time share a few turns of the scheduler, which can make one rank late in all of them."""


class Kind(StrEnum):
    """The class of a cause; part of the finding id."""

    OP = "op-mismatch"
    SIZE = "size-mismatch"
    DTYPE = "dtype-mismatch"
    NEVER_CALLED = "never-called"
    ONLY_SOME_CALLED = "only-some-called"
    NO_COUNTERPART = "no-counterpart"
    NO_DUMP = "no-dump"
    DEVICE_STUCK = "device-stuck"
    ORDER = "order-inversion"
    DEADLOCK = "deadlock"
    IN_FLIGHT = "in-flight"
    LATE = "late-rank"


@record
class Cause:
    """One cause. `ranks` are blamed (empty if undecided); `waiting` are the victims.

    `calls` are examples, the first from a correct or waiting rank. `group` and `seq` identify the collective.
    """

    kind: Kind
    ranks: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    group: Group | None = None
    seq: int = 0
    calls: tuple[Call, ...] = ()
    late_ns: int = 0
    clock: bool = False


@dataclass
class _Front:
    """A collective in which ranks wait: the calls, and the members by what their dumps show of it."""

    calls: list[Call]
    missing: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)


def find_causes(job: Job) -> list[Cause]:
    """List the causes, most certain first."""
    mismatched = list(_mismatches(job))
    apart = {cause.group.key: cause.seq for cause in mismatched if cause.group is not None}
    explained = {rank for cause in mismatched for rank in cause.ranks}
    search = _Search(job, apart, explained)
    return [*mismatched, *search.causes()] or list(_late(job))


def _mismatches(job: Job) -> Iterator[Cause]:
    """Find the first collective of each group on which the ranks disagree."""
    first: dict[GroupKey, int] = {}
    for (key, seq), same in job.calls.items():
        if (
            len(same) > 1
            and seq < first.get(key, seq + 1)
            and len({job.operations[number].agrees for number in same}) > 1
        ):
            first[key] = seq
    for key, seq in sorted(first.items()):
        sides: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for number, ranks in job.calls[key, seq].items():
            sides[job.operations[number].agrees] += ranks
        ordered = sorted(sides.items(), key=lambda item: (-len(item[1]), min(item[1])))
        total = sum(map(len, sides.values()))
        right, others = ordered[0], ordered[1:]
        majority = 2 * len(right[1]) > total
        blamed = sorted(rank for _, ranks in others for rank in ranks) if majority else []
        kind = next(
            (
                kind
                for kind, place in ((Kind.OP, 0), (Kind.DTYPE, 2), (Kind.SIZE, 1))
                if any(side[place] != right[0][place] for side, _ in others)
            )
        )
        calls = [find_call(job, min(ranks), key, seq) for _, ranks in ordered]
        waiting = right[1] if majority else [rank for _, ranks in ordered for rank in ranks]
        yield Cause(
            kind, tuple(blamed), tuple(sorted(waiting)), job.groups[key], seq, tuple(call for call in calls if call)
        )


class _Search:
    """Build the wait graph and search it; ranks already explained by a mismatch are not blamed again."""

    def __init__(self, job: Job, apart: Mapping[GroupKey, int], explained: set[int]) -> None:
        self._job, self._explained = job, explained
        self._edges: dict[int, dict[int, Call]] = defaultdict(dict)
        self._found: list[Cause] = []
        self._stuck: dict[int, list[tuple[Call, list[int]]]] = {}
        self._fronts = list(self._collectives(apart))

    def causes(self) -> list[Cause]:
        for front in self._fronts:
            self._judge(front)
        if self._stuck:
            self._add(self._device_stuck())
        self._pairs()
        self._blame()
        if not self._found and not self._explained:
            self._found += self._in_flight()
        return self._found

    def _collectives(self, apart: Mapping[GroupKey, int]) -> Iterator[_Front]:
        """Yield the collectives that are some rank's oldest unfinished operation of a group."""
        found: dict[tuple[GroupKey, int], list[Call]] = defaultdict(list)
        for parts in self._job.parts.values():
            for key, part in parts.items():
                if part.pending:
                    oldest = min(part.pending)
                    if oldest < apart.get(key, oldest + 1):
                        found[key, oldest].append(part.pending[oldest])
        for (key, seq), calls in sorted(found.items()):
            front = _Front(sorted(calls, key=lambda call: call.rank))
            waiting = {call.rank for call in calls}
            for member in self._job.groups[key].members:
                issued = self._job.issued(member, key)
                if issued is None:
                    front.unknown.append(member)
                elif issued < seq:
                    front.missing.append(member)
                elif member not in waiting and self._has_ended(member, key, seq):
                    front.ended.append(member)
            yield front

    def _has_ended(self, rank: int, key: GroupKey, seq: int) -> bool:
        part = self._job.part(rank, key)
        return seq <= part.ended and seq not in part.pending

    def _judge(self, front: _Front) -> None:
        calls = front.calls
        first = calls[0]
        group = self._job.groups[first.group]
        one_sided = first.operation.name in _ONE_SIDED
        if front.ended and not one_sided:
            # The collective ended on some rank, so all ranks have called it: a dump without it is older. Gloo has no
            # device, and records the end of an operation with a delay.
            for call in calls:
                if call.state != FAILED and call.operation.backend != "gloo":
                    self._stuck.setdefault(call.rank, []).append((call, front.ended))
            return
        if front.missing and len(front.missing) > len(calls) + len(front.ended):
            idle = [rank for rank in front.missing if not self._waits(rank)]
            if len(idle) == len(front.missing):
                self._add(
                    Cause(Kind.ONLY_SOME_CALLED, (), tuple(call.rank for call in calls), group, first.seq, (first,))
                )
                return
        for call in calls:
            for member in (*front.missing, *front.unknown):
                if member != call.rank:
                    self._edges[call.rank].setdefault(member, call)

    def _device_stuck(self) -> Cause:
        """Blame the devices that did not finish. Only a rank's oldest operation counts; later ones queue behind it."""
        oldest = {rank: min(stuck, key=lambda each: each[0].record) for rank, stuck in self._stuck.items()}
        ended = {rank for _, others in oldest.values() for rank in others} - oldest.keys()
        calls = tuple(oldest[rank][0] for rank in sorted(oldest))
        group = self._job.groups[calls[0].group]
        return Cause(Kind.DEVICE_STUCK, tuple(sorted(oldest)), tuple(sorted(ended)), group, calls[0].seq, calls)

    def _waits(self, rank: int) -> bool:
        return any(part.pending for part in self._job.parts.get(rank, {}).values()) or any(
            call.rank == rank for pair in self._job.pairs.values() for call in (*pair.sends, *pair.recvs)
        )

    def _pairs(self) -> None:
        """Add an edge from each unmatched send to its receiver, and from each unmatched recv to its sender."""
        for (_, source, target), pair in sorted(self._job.pairs.items()):
            whole = not {source, target} & self._job.overflowed and {source, target} <= self._job.dumps.keys()
            if pair.sends and not pair.recvs and not (whole and pair.received >= pair.sent):
                self._edges[source].setdefault(target, pair.sends[0])
            if pair.recvs and not pair.sends and not (whole and pair.sent >= pair.received):
                self._edges[target].setdefault(source, pair.recvs[0])

    def _blame(self) -> None:
        """Blame awaited ranks that wait for no rank, and cycles."""
        waited = by_key(edge for edges in self._edges.values() for edge in edges.items())
        stuck = {rank for cause in self._found for rank in cause.ranks}
        sinks = sorted(rank for rank in waited if not self._edges.get(rank))
        present = [rank for rank in sinks if rank in self._job.dumps and not self._job.dumps[rank].is_partial]
        in_flight = {call.rank for front in self._fronts if not front.ended for call in front.calls}
        for rank in sinks:
            if rank in stuck or rank in self._explained or rank in in_flight:
                continue
            if rank in present or not present:
                self._sink(rank, waited[rank])
        if not sinks:
            for circle in _circles(self._edges):
                self._circle(circle)

    def _sink(self, rank: int, calls: Sequence[Call]) -> None:
        first = min(calls, key=lambda call: (call.pair is not None, call.created_ns, call.rank))
        same = [call for call in calls if (call.group, call.seq, call.pair) == (first.group, first.seq, first.pair)]
        waiting = tuple(sorted({call.rank for call in same}))
        dump = self._job.dumps.get(rank)
        kind = Kind.NEVER_CALLED if first.pair is None else Kind.NO_COUNTERPART
        if dump is None or dump.is_partial:
            kind = Kind.NO_DUMP
        self._add(Cause(kind, (rank,), waiting, self._job.groups[first.group], first.seq, (first,)))

    def _circle(self, circle: Sequence[int]) -> None:
        """Classify a cycle: two groups called in opposite orders, or a longer deadlock."""
        inside = set(circle)
        own = {rank: [call for member, call in self._edges[rank].items() if member in inside] for rank in circle}
        calls = {rank: min(each, key=lambda call: call.record) for rank, each in own.items()}
        groups = by_key((call.group, rank) for rank, call in calls.items())
        everywhere = all(inside <= set(self._job.groups[key].members) for key in groups)
        if len(groups) == 2 and everywhere and all(call.pair is None for call in calls.values()):
            few, many = sorted(groups.values(), key=len)
            ranks = tuple(few) if len(few) < len(many) else ()
            shown = (calls[many[0]], calls[few[0]])
            self._add(Cause(Kind.ORDER, ranks, tuple(sorted(inside - set(ranks))), None, 0, shown))
            return
        self._add(Cause(Kind.DEADLOCK, tuple(circle), (), None, 0, tuple(calls[rank] for rank in circle)))

    def _in_flight(self) -> Iterator[Cause]:
        """Judge operations that all members have called: groups called in different orders, else no rank's fault."""
        whole = [front for front in self._fronts if not front.missing and not front.unknown and not front.ended]
        for front in whole:
            for other in whole:
                if front.calls[0].group < other.calls[0].group:
                    yield from self._crossed(front, other)
        if not self._found:
            self._rounds_of_groups(whole)
        if self._found:
            return
        for front in self._fronts:
            if front.missing or front.unknown:
                continue
            first = front.calls[0]
            ranks = tuple(call.rank for call in front.calls)
            yield Cause(Kind.IN_FLIGHT, (), ranks, self._job.groups[first.group], first.seq, (first,))

    def _crossed(self, front: _Front, other: _Front) -> Iterator[Cause]:
        records = {call.rank: call for call in front.calls}
        both = [(records[call.rank], call) for call in other.calls if call.rank in records]
        before = [pair for pair in both if pair[0].record < pair[1].record]
        after = [pair for pair in both if pair[0].record > pair[1].record]
        if before and after:
            few, many = sorted((before, after), key=len)
            ranks = tuple(call.rank for call, _ in few) if len(few) < len(many) else ()
            waiting = tuple(sorted({call.rank for call, _ in both} - set(ranks)))
            oldest = [min(pair, key=lambda call: call.record) for pair in (many[0], few[0])]
            cause = Cause(Kind.ORDER, ranks, waiting, None, 0, tuple(oldest))
            self._found.append(cause)
            yield cause

    def _rounds_of_groups(self, whole: Sequence[_Front]) -> None:
        """Find ranks that called several groups in cyclic order: the first group of each waits for another's."""
        calls = by_key((call.rank, call) for front in whole for call in front.calls)
        oldest = {rank: min(own, key=lambda call: call.record) for rank, own in calls.items()}
        for rank, call in oldest.items():
            for member in self._job.groups[call.group].members:
                other = oldest.get(member)
                if other is not None and (other.group, other.seq) != (call.group, call.seq):
                    self._edges[rank].setdefault(member, call)
        for circle in _circles(self._edges):
            self._circle(circle)

    def _add(self, cause: Cause) -> None:
        """Add a cause; causes with the same kind and collective are merged."""
        for place, other in enumerate(self._found):
            same = (cause.kind, cause.group, cause.seq) == (other.kind, other.group, other.seq)
            if same and cause.group is not None and cause.kind in (Kind.NEVER_CALLED, Kind.NO_DUMP):
                ranks = tuple(sorted({*other.ranks, *cause.ranks}))
                waiting = tuple(sorted({*other.waiting, *cause.waiting}))
                self._found[place] = Cause(cause.kind, ranks, waiting, cause.group, cause.seq, other.calls)
                return
        self._found.append(cause)


def _circles(edges: Mapping[int, Mapping[int, Call]]) -> list[list[int]]:
    """Find the sink components of the graph with two or more ranks (Tarjan's algorithm, iterative)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for start in sorted(edges):
        if start in index:
            continue
        work: list[tuple[int, Iterable[int]]] = [(start, iter(sorted(edges.get(start, ()))))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            at, targets = work[-1]
            target = next(iter(targets), None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[at])
                if low[at] == index[at]:
                    component = stack[stack.index(at) :]
                    del stack[stack.index(at) :]
                    on_stack -= set(component)
                    found.append(sorted(component))
            elif target not in index:
                index[target] = low[target] = len(index)
                stack.append(target)
                on_stack.add(target)
                work.append((target, iter(sorted(edges.get(target, ())))))
            elif target in on_stack:
                low[at] = min(low[at], index[target])
    return [
        component
        for component in found
        if len(component) > 1 and all(target in component for rank in component for target in edges.get(rank, ()))
    ]


def _late(job: Job) -> Iterator[Cause]:
    """Find ranks that repeatedly call collectives later than the others."""
    for key, group in job.groups.items():
        if len(group.members) < 2 or set(group.members) - job.dumps.keys():
            continue
        common = {
            seq
            for (of, seq), same in job.calls.items()
            if of == key and sum(map(len, same.values())) == len(group.members)
        }
        if len(common) < _LATE_CALLS:
            continue
        behind = {
            rank: [when - job.earliest_ns[key, seq] for seq, when in times(job, rank, key).items() if seq in common]
            for rank in group.members
        }
        usual = {rank: median(each) for rank, each in behind.items() if each}
        if len(usual) < len(group.members):
            continue
        starts = sorted(job.earliest_ns[key, seq] for seq in common)
        period = median(later - earlier for earlier, later in itertools.pairwise(starts))
        if period * len(common) < _LATE_SPAN_NS:  # not from the first to the last: the first may belong to the start
            continue
        among = sorted(usual.values())
        threshold = max(_LATE_NS, _LATE_SHARE * period, 4 * among[(len(among) - 1) // 2])
        # In three of four calls; a busy machine delays any rank occasionally.
        often = {rank: 4 * sum(by > threshold for by in each) >= 3 * len(each) for rank, each in behind.items()}
        late = tuple(sorted(rank for rank, is_often in often.items() if is_often))
        if late and 2 * len(late) < len(usual) + (len(usual) == 2):
            by = int(max(usual[rank] for rank in late))
            hosts = {job.dumps[rank].host for rank in group.members}
            others = tuple(rank for rank in group.members if rank not in late)
            last = job.last.get(late[0])
            yield Cause(
                Kind.LATE,
                late,
                others,
                group,
                len(common),
                (last,) if last else (),
                by,
                clock=hosts != {next(iter(hosts))} or hosts == {""},
            )
            return
