"""Ranks that lag, are dead or missing, from two readings of NCCL's RAS service. Pure.

RAS lists the smaller group of a mismatch even if that group is ahead (NVIDIA/nccl issue 1911): the counts decide, not
the listing. Rising counts mean that the job runs. A rank that lags in one communicator while it waits in another is not
to blame.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec  # noqa: TID253 - this module is imported when RAS has answered

from distdiag.diagnosis.wording import counted
from distdiag.fold import by_key
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.facts.recorder.nccl_ras import RasFacts, Reading

    Process = tuple[str, int, str]

_NO_COMMA = re.compile(r'("nvml_dev": -?\d+)(\s+"status":)')
"""NCCL 2.28.9 omits a comma in each rank that did not answer."""
_IN_PROGRESS = 7  # ncclInProgress
_ERRORS = ("", "unhandled CUDA error", "system error", "internal error", "invalid argument", "invalid usage")
_INVALID_USAGE = 5
_ERRORS_BY_CODE = dict(enumerate((*_ERRORS, "remote process error")))


@record
class Member:
    """A rank of a communicator; -1 if RAS lists only its process. `gpu` as numbered by NCCL."""

    rank: int
    host: str = ""
    pid: int = 0
    gpu: str = ""

    @property
    def process(self) -> Process:
        """Its identity across communicators."""
        return self.host, self.pid, self.gpu


class RasState(StrEnum):
    """The state of a job. HEALTHY: no rank is behind another.

    DIFFERENT: some ranks call other collectives than the rest, or with other sizes.
    """

    HEALTHY = "healthy"
    LAGGING = "lagging"
    DIFFERENT = "different"
    DEAD = "dead"
    MISSING = "missing"
    MOVING = "moving"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    NOT_AVAILABLE = "not-available"


@record
class Lag:
    """Ranks of a communicator that have launched fewer operations, numbered within it.

    `operation`: "AllReduce", or "" if not reported. `lagging` is empty if RAS does not list the ranks.
    """

    communicator: str
    operation: str
    lagging: tuple[int, ...]
    n_lagging: int
    behind: int
    ahead: int
    n_ahead: int
    members: tuple[Member, ...] = ()


@record
class RasVerdict:
    """The judgement. `why`: one sentence. `error`: the first one that a rank of a communicator reports, or ""."""

    state: RasState
    why: str
    lags: tuple[Lag, ...] = ()
    dead: tuple[Member, ...] = ()
    missing: tuple[Member, ...] = ()
    n_ranks: int = 0
    error: str = ""


@dataclass
class Group:
    """The ranks of a communicator with one operation count: the listed ones, or all."""

    count: int
    size: int
    members: list[Member] = field(default_factory=list)


@dataclass
class Communicator:
    """One communicator. `groups`: by operation, from text only where ranks differ, from JSON always."""

    hash: str
    size: int = 0
    groups: dict[str, list[Group]] = field(default_factory=dict)
    missing: list[Member] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@dataclass
class Snapshot:
    """One parsed reading. `counts`: of each process over its communicators (JSON only)."""

    n_ranks: int = 0
    n_communicators: int = 0
    communicators: list[Communicator] = field(default_factory=list)
    dead: list[Member] = field(default_factory=list)
    missing: list[Member] = field(default_factory=list)
    counts: dict[tuple[str, int], tuple[int, ...]] | None = None
    n_missing: int = 0
    n_dead: int = 0


def parse(reading: Reading) -> Snapshot:
    """Parse an answer of NCCL 2.24 or later, text or JSON. Raises ValueError."""
    if reading.error:
        raise ValueError(reading.error)
    if reading.text.lstrip().startswith("{"):
        try:
            return _of_json(msgspec.json.decode(_NO_COMMA.sub(r"\1,\2", reading.text), type=_Document))
        except (RecursionError, msgspec.MsgspecError) as error:
            raise ValueError(f"unexpected JSON: {str(error)[:100]}") from None
    return _Text().parse(reading.text)


def judge(facts: RasFacts) -> RasVerdict:
    """Judge two readings; unparseable ones count as absent."""
    if facts.error or not facts.readings:
        return RasVerdict(RasState.NOT_AVAILABLE, facts.error or "not asked")
    snapshots, problem = [], ""
    for reading in facts.readings:
        try:
            snapshots.append(parse(reading))
        except ValueError as error:
            problem = str(error)
    if not snapshots:
        return RasVerdict(RasState.UNKNOWN, f"the RAS answer is unreadable: {problem}")
    return _Judgement(snapshots[0], snapshots[-1] if len(snapshots) > 1 else None, problem).verdict()


class _Judgement:
    def __init__(self, first: Snapshot, second: Snapshot | None, problem: str) -> None:
        self._first, self._second, self._last = first, second, second or first
        self._problem = problem or "not taken"

    def verdict(self) -> RasVerdict:
        last = self._last
        if dead := max(len(last.dead), last.n_dead):
            why = f"{counted(dead, 'process', 'processes')} did not answer RAS for 60 s or more"
            return self._make(RasState.DEAD, why)
        if missing := max(len(last.missing), last.n_missing):
            why = f"{counted(missing, 'process', 'processes')} did not answer RAS in time"
            return self._make(RasState.MISSING, why)
        for communicator in last.communicators:
            if communicator.errors and (differing := self._differing(communicator)):
                why = f"{_shown(differing)}; {communicator.errors[0]}"
                return self._make(RasState.DIFFERENT, why, [differing])
            if communicator.errors:
                return self._make(RasState.ABORTED, f"communicator {communicator.hash}: {communicator.errors[0]}")
            if {"ABORT", "NOCOMM", "FINALIZE"} & communicator.states.keys() and len(communicator.states) > 1:
                shown = ", ".join(f"{number} {state}" for state, number in sorted(communicator.states.items()))
                return self._make(RasState.ABORTED, f"ranks of communicator {communicator.hash} have left it: {shown}")
        return self._of_counts()

    def _differing(self, communicator: Communicator) -> Lag | None:
        """Return the few ranks whose count of operations differs if NCCL found that calls do not match."""
        if self._second is None or not all(error.endswith(_ERRORS[_INVALID_USAGE]) for error in communicator.errors):
            return None
        before = set(_lags(self._first))
        own = (lag for lag in _lags(self._last) if lag.communicator == communicator.hash and lag in before)
        return next((lag for lag in own if lag.n_lagging < lag.n_ahead), None)

    def _make(self, state: RasState, why: str, lags: Iterable[Lag] = ()) -> RasVerdict:
        last = self._last
        error = next((error for communicator in last.communicators for error in communicator.errors), "")
        return RasVerdict(state, why, tuple(lags), _unique(last.dead), _unique(last.missing), last.n_ranks, error)

    def _of_counts(self) -> RasVerdict:
        lags = list(_lags(self._last))
        initialising = [each for each in self._last.communicators if len(each.states) > 1 and "INIT" in each.states]
        if not lags and initialising:
            number = initialising[0].states["INIT"]
            why = f"{counted(number, 'rank')} of communicator {initialising[0].hash} still initialising"
            return self._make(RasState.UNKNOWN, why)
        if not lags:
            first, second = self._first.counts, self._last.counts
            if first is not None and second is not None and first != second:
                return self._make(RasState.MOVING, "the operation counts rise between the two readings")
            if not self._last.n_communicators:
                return self._make(RasState.UNKNOWN, "RAS lists no communicator")
            return self._make(RasState.HEALTHY, "all ranks have launched the same operations")
        if self._second is None:
            return self._make(
                RasState.UNKNOWN, f"{_shown(lags[0])} in the first reading; second reading: {self._problem}"
            )
        before = set(_lags(self._first))
        same = [lag for lag in lags if lag in before and not self._moves(lag)]
        if not same:
            return self._make(RasState.MOVING, "ranks differ, and their operation counts rise between the two readings")
        return self._of_standing(same)

    def _moves(self, lag: Lag) -> bool:
        """Return whether a lagging rank launched operations in any communicator between the readings."""
        first, second = self._first.counts, self._last.counts
        if first is None or second is None:
            return False
        places = {number for number, each in enumerate(self._last.communicators) if each.hash == lag.communicator}
        hashes = {(each.hash, member.rank): member.process for each, member in _members(self._last)}
        processes = {
            hashes.get((self._last.communicators[place].hash, rank)) for place in places for rank in lag.lagging
        }
        return any(hashes.get(key) in processes and second[key] != first.get(key, second[key]) for key in second)

    def _of_standing(self, lags: Sequence[Lag]) -> RasVerdict:
        both = _in_both_directions(lags)
        if both is not None:
            why = f"ranks of communicator {both} are behind in one operation and ahead in another: they differ in calls"
            return self._make(RasState.UNKNOWN, why, lags)
        waiting = _waiting(self._last, lags)
        roots = [root for lag in lags if (root := _without(lag, waiting)) is not None]
        if not roots:
            return self._make(RasState.UNKNOWN, "the ranks that lag wait in other communicators for each other", lags)
        few = [lag for lag in roots if lag.n_lagging <= lag.n_ahead]
        if not few:
            why = f"{_shown(roots[0])}: the few that are ahead may have made a call too many"
            return self._make(RasState.UNKNOWN, why, roots)
        return self._make(RasState.LAGGING, _shown(few[0]), few)


def _shown(lag: Lag) -> str:
    operation = lag.operation or "operation"
    return (
        f"{counted(lag.n_lagging, 'rank')} of communicator {lag.communicator} stopped at {operation} {lag.behind}, "
        f"{lag.n_ahead} at {lag.ahead}"
    )


def _unique(members: Iterable[Member]) -> tuple[Member, ...]:
    """Keep each process once, with its rank in the first communicator that lists it."""
    found = by_key(((member.host, member.pid), member) for member in members)
    kept: dict[tuple[str, int, int], Member] = {}
    for (host, pid), same in found.items():
        ranked = [member for member in same if member.rank >= 0] or same
        gpus: dict[str, Member] = {}
        for member in ranked:
            gpus.setdefault(member.gpu, member)
        kept.update({(host, pid, number): member for number, member in enumerate(gpus.values())})
    return tuple(sorted(kept.values(), key=lambda member: (member.rank, member.host, member.pid, member.gpu)))


def _members(snapshot: Snapshot) -> Iterator[tuple[Communicator, Member]]:
    for communicator in snapshot.communicators:
        for groups in communicator.groups.values():
            for group in groups:
                for member in group.members:
                    yield communicator, member


def _lags(snapshot: Snapshot) -> Iterator[Lag]:
    """Yield a lag for each communicator and operation with different counts."""
    for communicator in snapshot.communicators:
        for operation, groups in communicator.groups.items():
            if len(groups) < 2:
                continue
            ordered = sorted(groups, key=lambda group: group.count)
            top = ordered[-1]
            behind = ordered[:-1]
            members = [member for group in behind for member in group.members]
            n_lagging = sum(group.size for group in behind)
            ranks = {member.rank for member in members}
            if len(ranks) < n_lagging:
                ranks = _complement(communicator, top, n_lagging)
                members = [member for member in members if member.rank in ranks]
            yield Lag(
                communicator.hash,
                operation,
                tuple(sorted(ranks)),
                n_lagging,
                behind[0].count,
                top.count,
                top.size,
                tuple(sorted(members, key=lambda member: member.rank)),
            )


def _complement(communicator: Communicator, top: Group, n_lagging: int) -> set[int]:
    """Return the unlisted ranks, if their number equals that of the lagging ranks."""
    ahead = {member.rank for member in top.members}
    others = set(range(communicator.size)) - ahead
    return others if len(ahead) == top.size and len(others) == n_lagging else set()


def _in_both_directions(lags: Sequence[Lag]) -> str | None:
    """Return a communicator in which some rank lags in one operation and is ahead in another."""
    for communicator, several in by_key((lag.communicator, lag) for lag in lags).items():
        lagging = [set(lag.lagging) for lag in several]
        if len(several) > 1 and (not all(lagging) or any(ranks != lagging[0] for ranks in lagging[1:])):
            return communicator
    return None


def _waiting(snapshot: Snapshot, lags: Sequence[Lag]) -> set[Process]:
    """Return the processes that are ahead in a communicator in which others lag."""
    lagging = {(lag.communicator, rank) for lag in lags for rank in lag.lagging}
    differs = {lag.communicator for lag in lags}
    return {
        member.process
        for communicator, member in _members(snapshot)
        if communicator.hash in differs and (communicator.hash, member.rank) not in lagging and member.pid > 0
    }


def _without(lag: Lag, waiting: set[Process]) -> Lag | None:
    """Remove the ranks that wait elsewhere; None if no rank is left."""
    left = [member for member in lag.members if member.process not in waiting]
    if len(left) == len(lag.members):
        return lag
    if not left:
        return None
    ranks = {member.rank for member in lag.members} - {member.rank for member in left}
    kept = tuple(rank for rank in lag.lagging if rank not in ranks)
    number = lag.n_lagging - len(ranks)
    return Lag(lag.communicator, lag.operation, kept, number, lag.behind, lag.ahead, lag.n_ahead, tuple(left))


_Number = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]


class _Status(msgspec.Struct):
    init_state: _Number = 0
    async_error: _Number = 0
    abort_flag: int | bool = 0
    finalize_called: int | bool = 0
    destroy_flag: int | bool = 0
    considered_dead: int | bool = 0
    unresponsive: int | bool = 0


class _Rank(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
    host: str = ""
    pid: _Number = 0
    cuda_dev: int | str = ""
    status: _Status = msgspec.field(default_factory=_Status)
    collective_counts: dict[str, _Number] = {}

    @property
    def member(self) -> Member:
        return Member(self.rank, self.host[:100], self.pid, str(self.cuda_dev)[:8])


class _About(msgspec.Struct):
    hash: str
    size: _Number
    ranks: list[_Rank]
    missing_ranks: list[_Rank] = []


class _Document(msgspec.Struct):
    """The parts of an answer in JSON that are judged."""

    communicators: list[_About]


def _of_json(document: _Document) -> Snapshot:
    found = Snapshot(counts={})
    counts = found.counts = {}
    for about in document.communicators:
        communicator = Communicator(about.hash[:40], about.size)
        by_count: dict[str, dict[int, list[Member]]] = defaultdict(lambda: defaultdict(list))
        for rank in about.ranks:
            _add_state(communicator, rank)
            for name, count in rank.collective_counts.items():
                by_count[name[:40]][count].append(rank.member)
            counts[communicator.hash, rank.rank] = tuple(rank.collective_counts.values())
        for rank in about.missing_ranks:
            if rank.status.considered_dead:
                found.dead.append(rank.member)
            elif rank.status.unresponsive:
                found.missing.append(rank.member)
            else:  # the process answered but has left the communicator
                communicator.states["NOCOMM"] = communicator.states.get("NOCOMM", 0) + 1
        communicator.groups = {
            name: [Group(count, len(members), members) for count, members in own.items()]
            for name, own in by_count.items()
        }
        found.communicators.append(communicator)
    found.n_communicators = len(found.communicators)
    found.n_ranks = max((each.size for each in found.communicators), default=0)
    return found


def _add_state(communicator: Communicator, rank: _Rank) -> None:
    status = rank.status
    state = "RUNNING" if status.init_state == 0 else "INIT"
    state = "FINALIZE" if status.finalize_called or status.destroy_flag else state
    state = "ABORT" if status.abort_flag else state
    communicator.states[state] = communicator.states.get(state, 0) + 1
    for code in (status.init_state, status.async_error):
        if code not in (0, _IN_PROGRESS):
            reason = _ERRORS_BY_CODE.get(code, f"error {code}")
            communicator.errors.append(f"rank {rank.rank} reports {reason}")


_TABLE = re.compile(
    r"^\s*(\d{1,9})\s+(\d{1,9})\s+\d+\s+\S+\s+(\d{1,9})\s+(\d{1,9})\s+(?:NOCOMM|INIT|RUNNING|FINALIZE|ABORT)\s+\S+\s*$"
)
_COMMUNICATOR = re.compile(r"^#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,40})\) ([A-Z]{1,20})\s*$")
_DIFFERENT = re.compile(
    r"^\s*Communicator ranks have different (?:(\w{1,40}) operation counts|collective operation counts|status)"
)
_RANKS = re.compile(
    r"^\s*(\d{1,9}) ranks have (?:launched up to operation (\d{1,19})|not launched any operations|status (\w{1,20}))"
)
_RANK = re.compile(
    r"^\s*Rank (\d{1,7})"
    r"(?: has (?:launched up to operation (\d{1,19})|(not launched any operations)|status (\w{1,20})))?"
    r" -- (?:GPU ([^ ]{1,9}(?: \(NVML \d+\))?) managed by process (\d{1,10}) on node (\S{1,100})|\[process information)"
)
_PROCESS = re.compile(r"^\s*Process (\d{1,10}) on node (\S{1,100}) managing GPUs? (\S{1,200})")
_LOST = re.compile(
    r"^\s*(?:Missing communicator data from (\d{1,9}) job process|(\d{1,9}) job process(?:es are| is) considered dead)"
)
_ERROR_LINE = re.compile(r"^\s*(Initialization|Asynchronous) errors? on (\d{1,9}) ranks?")


class _Text:
    """Parser of STATUS text: a table of communicators, then Errors and Warnings in blocks under headings."""

    def __init__(self) -> None:
        self._found = Snapshot()
        self._sizes: dict[str, int] = {}
        self._communicators: dict[str, Communicator] = {}
        self._current: Communicator | None = None
        self._block = ""
        self._operation: str | None = None
        self._group: Group | None = None

    def parse(self, text: str) -> Snapshot:
        if "NCCL version " not in text[:4096]:
            raise ValueError("not a NCCL RAS status")
        if "Communicators..." not in text or "\nWarnings\n" not in text or not text.endswith("\n\n"):
            raise ValueError("the status is not whole")
        for line in text.splitlines():
            self._line(line)
        self._found.communicators = list(self._communicators.values())
        return self._found

    def _line(self, line: str) -> None:
        if (table := _TABLE.match(line)) is not None:
            self._sizes[table[1]] = int(table[3])
            self._found.n_communicators += int(table[2])
            self._found.n_ranks = max(self._found.n_ranks, int(table[3]))
        elif (heading := _COMMUNICATOR.match(line)) is not None:
            size = self._sizes.get(heading[1], 0)
            self._current = self._communicators.setdefault(heading[2], Communicator(heading[2], size))
            self._block, self._operation, self._group = heading[3], None, None
        elif line.strip() in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            self._current, self._block = None, line.strip()
        elif (different := _DIFFERENT.match(line)) is not None:
            self._operation = None if "different status" in line else different[1] or ""
            self._group = None
        else:
            self._detail(line)

    def _detail(self, line: str) -> None:
        if (lost := _LOST.match(line)) is not None and self._current is None:
            if lost[1]:
                self._found.n_missing = int(lost[1])
            else:
                self._found.n_dead = int(lost[2])
        elif (process := _PROCESS.match(line)) is not None:
            self._lost(Member(-1, process[2], int(process[1]), process[3]))
        elif (error := _ERROR_LINE.match(line)) is not None and self._current is not None:
            self._current.errors.append(f"{error[1].lower()} error on {counted(int(error[2]), 'rank')}")
        elif (ranks := _RANKS.match(line)) is not None:
            self._add_ranks(int(ranks[1]), int(ranks[2] or 0), ranks[3])
        elif (rank := _RANK.match(line)) is not None:
            self._add_rank(rank)

    def _lost(self, member: Member) -> None:
        if self._block == "DEAD":
            self._found.dead.append(member)
        elif self._block == "INCOMPLETE":
            self._found.missing.append(member)

    def _add_ranks(self, number: int, count: int, status: str | None) -> None:
        if self._current is None:
            return
        if status:
            self._current.states[status] = number
        elif self._operation is not None:
            self._group = Group(count, number)
            self._current.groups.setdefault(self._operation, []).append(self._group)

    def _add_rank(self, match: re.Match[str]) -> None:
        gpu = (match[5] or "").partition(" ")[0]
        member = Member(int(match[1]), match[7] or "", int(match[6] or 0), gpu)
        if self._current is None:
            return
        if self._block == "INCOMPLETE":
            known = {(each.host, each.pid) for each in self._found.dead}
            (self._found.dead if (member.host, member.pid) in known else self._found.missing).append(member)
        elif match[4]:
            self._current.states[match[4]] = 1
        elif (match[2] or match[3]) and self._operation is not None:
            group = Group(int(match[2] or 0), 1, [member])
            self._current.groups.setdefault(self._operation, []).append(group)
            self._group = None
        elif self._group is not None:
            self._group.members.append(member)
