"""Matching of all ranks' dumps: collectives by process group and sequence number, p2p by (source, target).

The order of the files has no meaning. Gaps in a dump (truncated, ring overflowed, recorder without counters) stay
unknown: absence of an entry is evidence only in a complete dump.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distdiag.facts.recorder.read_dump import ENDED, unpack
from distdiag.record import record

if TYPE_CHECKING:
    import array
    from collections.abc import Iterable, Sequence

    from distdiag.facts.recorder.read_dump import Dump

    GroupKey = tuple[str, str]

_SAME_INPUT = frozenset(
    (
        *("all_reduce", "allreduce", "allreduce_coalesced", "all_reduce_coalesced", "broadcast", "reduce"),
        *("_all_gather_base", "_allgather_base", "all_gather_into_tensor", "all_gather_single"),
        *("gather", "gather_single"),
    )
)
_SAME_OUTPUT = frozenset(("_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single", "scatter"))
"""Operations whose input, or output, has an element count common to all ranks; sizes of others may differ. NCCL accepts
different sizes for all_gather and reduce_scatter too, Gloo does not."""
_ENDS_TOGETHER = frozenset(
    (
        *("all_reduce", "allreduce", "all_reduce_barrier", "barrier", "all_gather", "_all_gather_base"),
        *("_allgather_base", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "_reduce_scatter_base"),
        *("reduce_scatter_tensor", "reduce_scatter_single"),
    )
)
"""Operations that end on no rank before all ranks have made the call."""
_MOST_RANKS = 2**20
_RECENT = 24
"""Recent calls kept per rank for display."""


@record
class Operation:
    """An operation; `agrees` must be equal on all ranks of the collective."""

    name: str
    backend: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    agrees: tuple[object, ...]

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the input tensors, or of a recv's output."""
        return self.input_sizes if _elements(self.input_sizes) else self.output_sizes

    @property
    def elements(self) -> int:
        """Total number of elements of `sizes`."""
        return _elements(self.sizes)


@record
class Call:
    """One operation as recorded by one rank. `seq` numbers collectives within the group, `record` the rank's entries.

    `pair`: global ranks (source, target) of a send or recv. `site`: (function, file, line) if recorded.
    """

    rank: int
    group: GroupKey
    operation: Operation
    seq: int
    record: int
    state: int
    created_ns: int
    completed_ns: int
    site: tuple[str, str, int] | None
    pair: tuple[int, int] | None = None


@dataclass
class Group:
    """A process group. `members` in group order; `certain`: listed by a dump rather than inferred."""

    key: GroupKey
    description: str = ""
    members: tuple[int, ...] = ()
    certain: bool = False
    has_p2p: bool = False
    label: str = ""


@dataclass
class Part:
    """The state of one rank in one group. `issued`: number of its newest collective; None if unknown.

    `ended_by_all`: the newest ended collective that cannot end before all members have called it.
    """

    issued: int | None = 0
    ended: int = 0
    ended_by_all: int = 0
    pending: dict[int, Call] = field(default_factory=dict)


@dataclass
class Pair:
    """Sends of one rank to another in a group with the matching recvs: the unfinished ones, and both totals."""

    sends: list[Call] = field(default_factory=list)
    recvs: list[Call] = field(default_factory=list)
    sent: int = 0
    received: int = 0


@record
class Outdated:
    """A dump from another moment: rank `witness` has ended `seq`, but this dump ends at `issued`."""

    group: str
    seq: int
    witness: int
    issued: int


@dataclass
class Job:
    """All ranks, matched. `calls` maps (group, sequence number) to {index in `operations`: ranks}.

    `parts` is keyed by rank and group. `overflowed`: ranks whose oldest entries were overwritten.
    """

    dumps: dict[int, Dump]
    world_size: int = 0
    size_is_certain: bool = False
    groups: dict[GroupKey, Group] = field(default_factory=dict)
    parts: dict[int, dict[GroupKey, Part]] = field(default_factory=dict)
    calls: dict[tuple[GroupKey, int], dict[int, list[int]]] = field(default_factory=dict)
    pairs: dict[tuple[GroupKey, int, int], Pair] = field(default_factory=dict)
    last: dict[int, Call] = field(default_factory=dict)
    recent: dict[int, list[Call]] = field(default_factory=dict)
    overflowed: set[int] = field(default_factory=set)
    operations: list[Operation] = field(default_factory=list)
    earliest_ns: dict[tuple[GroupKey, int], int] = field(default_factory=dict)
    outdated: dict[int, Outdated] = field(default_factory=dict)
    without_rank: list[Dump] = field(default_factory=list)
    replaced: list[Dump] = field(default_factory=list)

    def part(self, rank: int, group: GroupKey) -> Part:
        """Return the state of a rank in a group."""
        return self.parts.get(rank, {}).get(group) or Part()

    def issued(self, rank: int, group: GroupKey) -> int | None:
        """Return the number of the newest collective a rank called in a group; None if its dump cannot show it."""
        dump = self.dumps.get(rank)
        if dump is None:
            return None
        part = self.parts[rank].get(group)
        if part is None:
            return None if dump.is_partial or rank in self.overflowed else 0
        return part.issued


def match(dumps: Iterable[Dump], world_size: int) -> Job:
    """Match the dumps of all ranks; with world_size=0 it is inferred. Raises ValueError."""
    found, without, replaced = ranks_of(sorted(dumps, key=lambda dump: (dump.path, dump.modified_s)))
    job = _match(found, world_size)
    outdated = _outdated(job)
    if outdated:
        size, is_certain = job.world_size, job.size_is_certain
        job = _match({rank: dump for rank, dump in found.items() if rank not in outdated}, world_size)
        job.world_size, job.size_is_certain, job.outdated = max(size, job.world_size), is_certain, outdated
    job.without_rank, job.replaced = without, replaced
    return job


def _match(found: dict[int, Dump], world_size: int) -> Job:
    job = Job(found)
    tops = {ranks: _top(ranks) for dump in found.values() for _, _, ranks in dump.groups}
    declared = max([world_size, *(dump.world_size for dump in found.values()), *tops.values()]) if found else world_size
    job.size_is_certain = declared > 0
    job.world_size = min(_MOST_RANKS, max(declared, max(found, default=-1) + 1))
    numbers: dict[Any, int] = {}
    for rank in sorted(found):
        _Reader(job, rank, numbers).read()
    _complete_groups(job)
    for group in job.groups.values():
        _use_status(job, group)
    return job


def _outdated(job: Job) -> dict[int, Outdated]:
    """Return the dumps written before the others, or by another run.

    If a peer has ended a collective that needs all members, each member has called it and ended the ones before; a dump
    without that is older. Gloo marks failed operations as ended, so its last one does not count.
    """
    found: dict[int, Outdated] = {}
    for key, group in job.groups.items():
        ended = {rank: parts[key].ended_by_all for rank, parts in job.parts.items() if key in parts}
        witness = max(ended, key=lambda rank: ended[rank], default=-1)
        margin = 1 if key[1] == "gloo" else 0
        for rank in group.members:
            issued = job.issued(rank, key) if witness >= 0 else None
            if issued is None or rank == witness or rank in found:
                continue
            pending = job.part(rank, key).pending
            newest = min(pending) if pending and margin == 0 else issued
            if min(issued, newest) < ended[witness] - margin:
                found[rank] = Outdated(group.label, ended[witness], witness, issued)
    return found


def ranks_of(dumps: Sequence[Dump]) -> tuple[dict[int, Dump], list[Dump], list[Dump]]:
    """Assign dumps to ranks: (newest dump by rank, dumps without a rank, dumps replaced by newer ones).

    The rank in the content takes precedence over the file name. In names without "rank", the number that differs is it.
    """
    nameless = [dump for dump in dumps if dump.rank is None]
    numbers = {id(dump): _numbers(dump.path) for dump in nameless}
    place = _differing(list(numbers.values()))
    found: dict[int, Dump] = {}
    without, replaced = [], []
    for dump in dumps:
        rank = dump.rank if dump.rank is not None else _rank_of_name(dump, numbers[id(dump)], place)
        if rank is None or rank >= _MOST_RANKS:
            without.append(dump)
        elif rank in found:
            older, newer = sorted((found[rank], dump), key=lambda kept: (kept.dumped_s, kept.modified_s, kept.count))
            found[rank] = newer
            replaced.append(older)
        else:
            found[rank] = dump
    return found, without, replaced


def _numbers(path: str) -> list[int]:
    base = os.path.basename(path)
    text = base if re.search(r"\d", base) else os.path.basename(os.path.dirname(path))
    return [int(number) for number in re.findall(r"\d{1,7}", text)]


def _differing(names: Sequence[list[int]]) -> int:
    for place in range(1, 1 + min(map(len, names), default=0)):
        if len({numbers[-place] for numbers in names}) == len(names):
            return place
    return 1


def _rank_of_name(dump: Dump, numbers: Sequence[int], place: int) -> int | None:
    named = re.search(r"rank[_.\- ]?(\d{1,7})(?!\d)", os.path.basename(dump.path), re.IGNORECASE)
    rank = int(named[1]) if named is not None else numbers[-place] if len(numbers) >= place else None
    if rank is None or not dump.candidates:
        return rank
    possible = unfold(dump.candidates)
    return rank if rank in possible else next((number for number in reversed(numbers) if number in possible), None)


def unfold(text: str) -> tuple[int, ...]:
    """Expand "0-3,8,5", keeping its order. Raises ValueError."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end < _MOST_RANKS or len(ranks) > _MOST_RANKS:
            raise ValueError(f"{part!r} are no ranks")
        ranks += range(begin, end + 1)
    return tuple(ranks)


def _top(ranks: str) -> int:
    return max((int(number) + 1 for number in re.findall(r"\d+", ranks)), default=0)


def _elements(sizes: Iterable[Sequence[int]]) -> int:
    return sum(math.prod(size) for size in sizes)


def _operation(declared: Sequence[Any]) -> Operation:
    name, backend, inputs, outputs, input_types, output_types = declared[:6]
    is_nccl = backend.startswith("nccl")
    of_output = name in _SAME_OUTPUT or (name == "reduce_scatter" and not is_nccl)
    of_input = name in _SAME_INPUT or (name == "all_gather" and not is_nccl)
    sizes = outputs if of_output else inputs if of_input else None
    agrees = (name, None if sizes is None else _elements(sizes), output_types if of_output else input_types)
    return Operation(name, backend, inputs, outputs, input_types or output_types, agrees)


class _Reader:
    """Read one rank's entries into the job."""

    def __init__(self, job: Job, rank: int, numbers: dict[Any, int]) -> None:
        self._job, self._rank, self._dump = job, rank, job.dumps[rank]
        self._names = [name for name, _, _ in self._dump.groups]
        self._operations = [self._number(declared, numbers) for declared in self._dump.operations]

    def _number(self, declared: Sequence[Any], numbers: dict[Any, int]) -> int:
        key = tuple(declared[:6])
        if key not in numbers:
            numbers[key] = len(self._job.operations)
            self._job.operations.append(_operation(declared))
        return numbers[key]

    def read(self) -> None:
        job, rank = self._job, self._rank
        columns = unpack(self._dump.entries, self._dump.count)
        self._check(columns)
        keys = [[(name, job.operations[number].backend) for number in self._operations] for name in self._names]
        self._declare({keys[group][operation] for group, operation in set(zip(columns[0], columns[1], strict=True))})
        parts, calls, earliest = job.parts.setdefault(rank, {}), job.calls, job.earliest_ns
        starts = _starts(columns, keys)
        together = [job.operations[number].name in _ENDS_TOGETHER for number in self._operations]
        columns_read = zip(*columns, strict=True)
        for number, (group, operation, _, seq, p2p_seq, _, state, created, _) in enumerate(columns_read):
            key = keys[group][operation]
            if number < starts.get(key, 0):
                continue
            part = parts.get(key) or parts.setdefault(key, Part())
            if p2p_seq >= 0:
                self._p2p(self.call(columns, number))
                continue
            if seq and seq == part.issued:  # coalesced: one collective in several entries
                if state != ENDED:
                    part.pending.setdefault(seq, self.call(columns, number))
                continue
            part.issued = seq
            same = calls.setdefault((key, seq), {})
            same.setdefault(self._operations[operation], []).append(rank)
            earliest[key, seq] = min(created, earliest.get((key, seq), created))
            if state != ENDED:
                part.pending[seq] = self.call(columns, number)
            else:
                part.ended = seq
                if together[operation]:
                    part.ended_by_all = seq
        self._note_last(columns)

    def _note_last(self, columns: Sequence[array.array[int]]) -> None:
        job, rank, count = self._job, self._rank, len(columns[0])
        job.recent[rank] = [self.call(columns, number) for number in range(max(0, count - _RECENT), count)]
        if count:
            job.last[rank] = max(job.recent[rank], key=lambda call: call.record)
            if min(columns[5]) > 0:
                job.overflowed.add(rank)

    def _check(self, columns: Sequence[array.array[int]]) -> None:
        limits = (len(self._names), len(self._operations))
        for column, limit in zip(columns, limits, strict=False):
            if len(column) and not 0 <= min(column) <= max(column) < limit:
                raise ValueError("an entry has a group or an operation that is not there")

    def _declare(self, used: set[GroupKey]) -> None:
        """Add the groups listed by this dump, with members."""
        backends = defaultdict(set)
        for name, backend in used:
            backends[name].add(backend)
        for name, description, ranks in self._dump.groups:
            for backend in backends[name] or {""}:
                group = self._job.groups.setdefault((name, backend), Group((name, backend)))
                group.has_p2p |= name in self._dump.p2p_groups
                if description not in ("", "undefined"):
                    group.description = description
                if ranks and not group.certain:
                    group.members, group.certain = unfold(ranks), True

    def call(self, columns: Sequence[array.array[int]], number: int) -> Call:
        group, operation, site, seq, p2p_seq, record, state, created, completed = (column[number] for column in columns)
        described = self._job.operations[self._operations[operation]]
        sites = self._dump.sites
        return Call(
            rank=self._rank,
            group=(self._names[group], described.backend),
            operation=described,
            seq=seq,
            record=record,
            state=state,
            created_ns=created,
            completed_ns=completed,
            site=sites[site] if 0 <= site < len(sites) else None,
            pair=self._pair(self._names[group], described.backend, operation) if p2p_seq >= 0 else None,
        )

    def _pair(self, name: str, backend: str, operation: int) -> tuple[int, int] | None:
        """Return the global ranks of a send or recv; the recorder stores ranks within the group."""
        source, target = self._dump.operations[operation][6:8]
        group = self._job.groups[name, backend]
        members = group.members if group.certain else range(self._job.world_size)
        inside = 0 <= source < len(members) and 0 <= target < len(members)
        return (members[source], members[target]) if inside else None

    def _p2p(self, call: Call) -> None:
        if call.pair is None:
            return
        pair = self._job.pairs.setdefault((call.group, *call.pair), Pair())
        pending = call.state != ENDED
        if call.operation.name == "send":
            pair.sent += 1
            pair.sends += [call] if pending else []
        else:
            pair.received += 1
            pair.recvs += [call] if pending else []


def _starts(columns: Sequence[array.array[int]], keys: Sequence[Sequence[GroupKey]]) -> dict[GroupKey, int]:
    """Find groups destroyed and recreated under the same name, which restarts the numbering."""
    newest: dict[GroupKey, int] = {}
    starts: dict[GroupKey, int] = {}
    for number, (group, operation, seq, p2p_seq) in enumerate(zip(*columns[:2], *columns[3:5], strict=True)):
        if p2p_seq < 0:
            key = keys[group][operation]
            if seq < newest.get(key, 0):
                starts[key] = number
            newest[key] = seq
    return starts


def _complete_groups(job: Job) -> None:
    """Infer the members of unlisted groups, set labels, and merge groups without a backend into those with one."""
    used = defaultdict(set)
    for name, backend in job.groups:
        if backend:
            used[name].add(backend)
    for key in [key for key in job.groups if not key[1] and used[key[0]]]:
        unused = job.groups.pop(key)
        for backend in used[key[0]]:
            group = job.groups[key[0], backend]
            group.has_p2p |= unused.has_p2p
            if unused.certain and not group.certain:
                group.members, group.certain = unused.members, True
            group.description = group.description or unused.description
    everyone = tuple(range(job.world_size))
    for key, group in job.groups.items():
        if not group.certain:
            is_all = group.description == "default_pg" or key[0] == "0"
            known = [rank for rank, parts in job.parts.items() if key in parts]
            group.members = everyone if is_all else tuple(known)
            group.certain = is_all and job.size_is_certain
    _label_groups(job, {name for name, backends in used.items() if len(backends) > 1})


def _label_groups(job: Job, in_several: set[str]) -> None:
    """Label groups by description, plus name and backend if not unique."""
    descriptions = Counter(group.description for group in job.groups.values())
    for (name, backend), group in job.groups.items():
        group.label = group.description or f"group {name}"
        if descriptions[group.description] > 1 and group.description:
            group.label += f" {name}"
        if name in in_several:
            group.label += f" ({backend})"


def _use_status(job: Job, group: Group) -> None:
    """Apply the recorder's own counters where they count collectives only; sends and recvs increment them too.

    Dumps of active operations alone lack all ended entries: there the counters are the only source.
    """
    name = group.key[0]
    declared = {
        rank: (enqueued, ended)
        for rank, dump in job.dumps.items()
        for of, enqueued, ended in dump.status
        if of == name and enqueued >= 0
    }
    only = sum(key[0] == name for key in job.groups) == 1
    for rank, (enqueued, ended) in declared.items():
        seen = job.part(rank, group.key).issued or 0
        whole = not job.dumps[rank].is_partial
        if group.has_p2p or not only or seen > enqueued or (whole and enqueued > ended and seen not in (enqueued, 0)):
            declared = {}
            break
    for rank in job.dumps:
        part = job.parts[rank].get(group.key)
        if rank in declared:
            part = job.parts[rank].setdefault(group.key, Part())
            part.issued = max(part.issued or 0, declared[rank][0])
            if declared[rank][1] > part.ended and not any(seq <= declared[rank][1] for seq in part.pending):
                part.ended = declared[rank][1]
        elif part is not None and job.dumps[rank].is_partial:
            part.issued = None


def find_call(job: Job, rank: int, group: GroupKey, seq: int) -> Call | None:
    """Reread the entry of a rank's collective number `seq` in a group."""
    dump = job.dumps.get(rank)
    if dump is None:
        return None
    reader = _Reader(job, rank, {})
    columns = unpack(dump.entries, dump.count)
    for number, (found, p2p_seq) in enumerate(zip(columns[3], columns[4], strict=True)):
        if found == seq and p2p_seq < 0:
            call = reader.call(columns, number)
            if call.group == group:
                return call
    return None


def times(job: Job, rank: int, group: GroupKey) -> dict[int, int]:
    """Return the creation times (ns) of a rank's ended collectives in a group, by sequence number."""
    dump = job.dumps[rank]
    columns = unpack(dump.entries, dump.count)
    mine = {
        (place, number)
        for place, (name, _, _) in enumerate(dump.groups)
        for number, declared in enumerate(dump.operations)
        if (name, declared[1]) == group
    }
    found: dict[int, int] = {}
    newest = 0
    for place, operation, _, seq, p2p_seq, _, state, created, _ in zip(*columns, strict=True):
        if p2p_seq < 0 and (place, operation) in mine:
            if seq < newest:
                found.clear()
            newest = seq
            if state == ENDED:
                found[seq] = created
    return found
