"""What one thread did, added up: many rows at a time, with the loops left to C as far as they can be."""

from __future__ import annotations

import heapq
import re
from operator import itemgetter

from distdiag.node.strace import lines, spins, targets
from distdiag.node.strace.model import ARGUMENTS, Call, Count, Place
from distdiag.node.strace.shape import AT, ERROR, NAMED, RESULT, TOOK
from distdiag.node.strace.troubles import Troubles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from re import Pattern

    from distdiag.node.strace.lines import Line

    Row = tuple[bytes, ...]
    Key = tuple[bytes, bytes]

SLOW_S = 0.01
"""Longer than a disk needs to answer."""
_HEADS = 4096
"""More different beginnings of calls are added up by name and place."""
_SLOWEST = 10
_SEARCHES = 64
"""Lines of a block that are found by searching it; more of them by a list of all its lines."""
_PROGRAMS = 1000
_HEAD = re.compile(lines.HEAD)
_DECODED = re.compile(rb"(AT_FDCWD|-?\d+)" + lines.DECODED)
_ADDRESSED = (b"connect", b"bind", b"sendto")
_PENDING = 1000
"""More connections that are under way at the same time are not remembered."""
_SO_ERROR = re.compile(rb"SOL_SOCKET, SO_ERROR, \[(E[A-Z0-9]+)\]")
_TELLING = (b"execve", b"execveat", b"prctl", b"clone", b"clone3", b"fork", b"vfork")
_FINDS = re.compile(
    rb"open(?:at2?)?|f?stat(?:x|at|64)*|newfstatat|l?stat|f?access(?:at2?)?|execve(?:at)?|readlink(?:at)?"
)


class Tally:
    """Sums of one thread, and how it stands at the end of what was read."""

    def __init__(self) -> None:
        self.n_lines = self.n_calls = 0
        self.first = self.newest = b""
        self.comm = b""
        self.state = "returned"
        self.last: Line | None = None
        self.pending: Line | None = None
        self.orphan: Line | None = None
        self.signals: dict[str, int] = {}
        self.programs: dict[str, None] = {}
        self.children: dict[int, bool] = {}
        self.troubles = Troubles()
        self.connecting: dict[bytes, str] = {}
        self.runs: dict[Key, spins.Run] = {}
        self.slowest: list[Call] = []
        self._heads: dict[Key, _Sum] = {}
        self._names: dict[str, _Sum] = {}
        self._places: dict[str, _Sum] = {}

    def add(self, rows: Sequence[Row], text: Text, *, ends: bool, is_last: bool) -> None:
        """Take calls that ended.

        Args:
            rows: of shape.pattern(), in their order.
            text: what they come from.
            ends: the last of them is the last line of the thread so far.
            is_last: it is its last call.
        """
        groups: dict[bytes, list[Row]] = {}
        failed: dict[Key, list[Row]] = {}
        get = groups.get
        for row in rows:
            if row[RESULT]:
                head = row[NAMED]
                group = get(head)
                if group is None:
                    groups[head] = [row]
                else:
                    group.append(row)
            else:
                failed.setdefault((row[NAMED], row[ERROR]), []).append(row)
        self.n_lines += len(rows)
        slow: list[tuple[float, Row]] = []
        for head, group in groups.items():
            slow += self._group((head, b""), group)
        for key, group in failed.items():
            slow += self._group(key, group)
        if slow:
            slowest = heapq.nlargest(_SLOWEST, slow, key=itemgetter(0))
            self._is_slow(*(as_call(text.line(row)) for _, row in slowest))
        if _is_before(rows[0][AT], self.first):
            self.first = rows[0][AT]
        if ends:
            self.newest = rows[-1][AT]
            self.state, self.pending = "returned", None
        if is_last:
            self.last = text.line(rows[-1], is_last=True)
        self._make_room()

    def event(self, line: Line) -> None:
        """Take any other line."""
        self.n_lines += 1
        self._saw(line.at)
        if line.kind == lines.CALL:
            self.call(line)
        elif line.kind == lines.BEGUN:
            self.pending = line
            self.state = "detached" if line.result == b"detached" else "blocked"
            self.last = line._replace(result=b"")
        elif line.kind == lines.SIGNAL and line.result != b"stopped":
            name = line.name.decode()
            self.signals[name] = self.signals.get(name, 0) + 1
        elif line.kind == lines.ENDED:
            how = line.name.decode()
            self.state = how if how == "superseded" else f"{how} {line.result.decode()}"
            self.pending = None

    def call(self, line: Line) -> None:
        """Take one call as a whole; `line.at` is when it began."""
        self.state, self.pending = "returned", None
        head = _HEAD.match(line.name + b"(" + line.args)
        key = (head[0] if head else line.name + b"(", line.error)
        total = self._sum(key)
        took = float(line.took) if line.took else None
        total.add(1, [took] if took is not None else [])
        self.n_calls += 1
        if key in self.runs and (line.result == b"0" or not spins.needs_zero(line.name, line.error)):
            self.runs[key].add([line.at])
        if total.is_file and took is not None and took > self._floor_s():
            self._is_slow(as_call(line))
        if line.error:
            target = total.target if line.name not in _ADDRESSED else targets.about(line.name, line.args)[1]
            self.troubles.add(line.name.decode(), line.error.decode(), target, line.at)
            if line.error == b"EINPROGRESS" and line.name == b"connect" and len(self.connecting) < _PENDING:
                self.connecting[line.args.partition(b",")[0]] = target
        elif line.name == b"getsockopt" and (failed := _SO_ERROR.search(line.args)):
            # What became of a connection that nobody waited for in connect().
            target = self.connecting.pop(line.args.partition(b",")[0], "") or total.target
            self.troubles.add("connect", failed[1].decode(), target, line.at)
        elif line.name in _TELLING:
            self._learn(line)
        self.last = line

    def merge(self, other: Tally) -> None:
        """Take what comes later in the same log; its first line may be the end of a call that began here."""
        if other.orphan is not None:
            self.event(lines.joined(self.pending, other.orphan) if self.pending else alone(other.orphan))
        self.n_lines += other.n_lines
        self.n_calls += other.n_calls
        self.first = self.first or other.first
        self.newest = other.newest or self.newest
        self.comm = other.comm or self.comm
        if other.n_lines:
            self.state, self.pending = other.state, other.pending
        if other.last is not None:
            self.last = other.last
        for name, count in other.signals.items():
            self.signals[name] = self.signals.get(name, 0) + count
        self.programs.update(other.programs)
        self.children.update(other.children)
        self.troubles.merge(other.troubles)
        self.connecting.update(other.connecting)
        for key, run in other.runs.items():
            self.runs.setdefault(key, spins.Run()).merge(run)
        self._is_slow(*other.slowest)
        for mine, its in ((self._names, other.names()), (self._places, other.places())):
            for name, total in its.items():
                mine.setdefault(name, _Sum()).merge(total)

    def names(self) -> dict[str, _Sum]:
        """Give the sums by the name of the call."""
        self._fold()
        return self._names

    def places(self) -> dict[str, _Sum]:
        """Give the sums by place."""
        self._fold()
        return self._places

    def _group(self, key: Key, rows: list[Row]) -> list[tuple[float, Row]]:
        """Take calls of one beginning; gives those that may be among the slowest."""
        total = self._sum(key)
        tooks = list(map(float, map(itemgetter(TOOK), rows))) if rows[0][TOOK] else []
        total.add(len(rows), tooks)
        self.n_calls += len(rows)
        run = self.runs.get(key)
        if run is not None:
            zero = spins.needs_zero(total.call, key[1])
            run.add([row[AT] for row in rows if not zero or row[RESULT] == b"0"])
        if key[1]:
            name, error = total.call.decode(), key[1].decode()
            self.troubles.add(name, error, total.target, rows[0][AT], len(rows), rows[-1][AT])
        if not total.is_file or not tooks or max(tooks) <= self._floor_s():
            return []
        floor_s = self._floor_s()
        slowest = heapq.nlargest(_SLOWEST, zip(tooks, range(len(rows))))
        return [(took, rows[at]) for took, at in slowest if took > floor_s]

    def _is_slow(self, *calls: Call) -> None:
        self.slowest = sorted([*self.slowest, *calls], key=lambda call: -(call.time_s or 0.0))[:_SLOWEST]

    def _floor_s(self) -> float:
        """Give the time that a call must exceed to be among the slowest."""
        return (self.slowest[-1].time_s or 0.0) if len(self.slowest) == _SLOWEST else -1.0

    def _sum(self, key: Key) -> _Sum:
        total = self._heads.get(key)
        if total is None:
            head, error = key
            total = self._heads[key] = _Sum()
            name, _, args = head.partition(b"(")
            total.call, total.error = name, error
            total.target = targets.about(name, args)[1]
            total.is_file = total.target.startswith("/")
            if total.target and not error and _FINDS.fullmatch(name):
                self.troubles.found(total.target)
            if spins.may_spin(name, error) and key not in self.runs:
                self.runs[key] = spins.Run()
        return total

    def _learn(self, line: Line) -> None:
        name = line.name
        if name in (b"execve", b"execveat") and line.result == b"0":
            path = targets.about(name, line.args)[1]
            self.comm = path.rpartition("/")[2].encode()[:15]
            if len(self.programs) < _PROGRAMS:
                self.programs[path] = None
        elif name == b"prctl" and line.args.startswith(b'PR_SET_NAME, "'):
            comm, _, more = line.args[14:].partition(b'"')
            if not more.startswith(b"..."):  # -s leaves no more of it
                self.comm = targets.text(comm).encode()
        elif name in (b"clone", b"clone3", b"fork", b"vfork"):
            child = line.result.partition(b"<")[0]
            if child.isdigit() and len(child) < 8:
                self.children[int(child)] = b"CLONE_THREAD" in line.args

    def _saw(self, at: bytes) -> None:
        if at:
            self.first = self.first or at
            self.newest = at

    def _make_room(self) -> None:
        if len(self._heads) > _HEADS:
            self._fold()
            self.runs = {key: run for key, run in self.runs.items() if run.spun or run.count > spins.UNTIMED // 10}

    def _fold(self) -> None:
        for total in self._heads.values():
            self._names.setdefault(total.call.decode(), _Sum()).merge(total)
            where = targets.place(total.target)
            if where:
                self._places.setdefault(where, _Sum()).merge(total)
        self._heads = {}


class _Sum:
    """How many calls, and for how long."""

    def __init__(self) -> None:
        self.count = self.errors = self.slow = 0
        self.time_s = self.slowest_s = 0.0
        self.timed = False
        self.call = self.error = b""
        self.target = ""
        self.is_file = False

    def add(self, count: int, tooks: list[float]) -> None:
        self.count += count
        if self.error:
            self.errors += count
        if tooks:
            self.timed = True
            self.time_s += sum(tooks)
            slowest_s = max(tooks)
            if slowest_s > self.slowest_s:
                self.slowest_s = slowest_s
            if slowest_s >= SLOW_S:
                self.slow += sum(took >= SLOW_S for took in tooks)

    def merge(self, other: _Sum) -> None:
        self.count += other.count
        self.errors += other.errors
        self.slow += other.slow
        self.time_s += other.time_s
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.timed = self.timed or other.timed

    def as_count(self, name: str) -> Count:
        timed = self.timed
        return Count(name, self.count, self.errors, self.time_s if timed else None, self.slowest_s if timed else None)

    def as_place(self, where: str) -> Place:
        timed = self.timed
        return Place(where, self.count, self.slow, self.time_s if timed else None, self.slowest_s if timed else None)


def _is_before(at: bytes, other: bytes) -> bool:
    # A time of day that is far smaller is after midnight.
    return not other or (bool(at) and 0 < (lines.seconds(other) or 0) - (lines.seconds(at) or 0) < 3600)


def as_call(line: Line) -> Call:
    """Put a line into words."""
    fd, target = targets.about(line.name, line.args)
    args = targets.without_payload(line.name, line.args if line.result else line.args.rstrip(b", "))
    return Call(
        name=line.name.decode(),
        args=args[: 4 * ARGUMENTS].decode("utf-8", "replace")[:ARGUMENTS],
        fd=fd,
        target=target,
        at_s=lines.seconds(line.at),
        result=line.result.decode("utf-8", "replace")[:ARGUMENTS],
        error=line.error.decode(),
        time_s=float(line.took) if line.took else None,
    )


def alone(resumed: Line) -> Line:
    """Take the end of a call for the whole, as its beginning is not in the log."""
    return resumed._replace(kind=lines.CALL, at=b"")


class Text:
    """A block of a log, to find the lines of rows in it again."""

    def __init__(self, block: bytes, pattern: Pattern[bytes]) -> None:
        self._block, self._pattern = block, pattern
        self._sought = 0
        self._places: dict[bytes, tuple[int, int]] | None = None

    def line(self, row: Row, *, is_last: bool = False) -> Line:
        """Read the line of a row once more, with all its arguments."""
        name, _, args = row[NAMED].partition(b"(")
        # Where the log has no -y, what a descriptor stands for was put into the row, and is not in the line.
        decoded = _DECODED.match(args)
        bare = decoded[1] + args[decoded.end() :] if decoded else args
        for written in dict.fromkeys((args, bare)):
            at = self._find(row[AT], name + b"(" + written, is_last=is_last or not row[AT])
            end = self._block.find(b"\n", at)
            line = lines.parse_body(self._block[at + len(row[AT]) : end].lstrip(b" ")) if at >= 0 else None
            if line is not None and line.took in (row[TOOK], b""):
                # Of a call in two halves, this is the first.
                result = line.result if line.kind == lines.CALL else row[RESULT] or b"-1"
                whole = args + line.args[len(written) :]
                return lines.Line(lines.CALL, name, whole, result, row[ERROR], row[TOOK], row[AT])
        return lines.Line(lines.CALL, name, args, row[RESULT] or b"-1", row[ERROR], row[TOOK], row[AT])

    def _find(self, at: bytes, head: bytes, *, is_last: bool) -> int:
        """Find where a line begins at its time; -1 if it is not there."""
        sought = at + b" " + head if at else head
        self._sought += 1
        if self._sought <= _SEARCHES:
            return self._block.rfind(sought) if is_last else self._block.find(sought)
        if self._places is None:  # of many threads each seeks some: to search the block for each would be square
            self._places = {}
            for match in self._pattern.finditer(self._block):
                if match[NAMED + 1] is None:  # a signal, an end
                    continue
                key = match[AT + 1] + b" " + match[NAMED + 1] if match[AT + 1] else match[NAMED + 1]
                start = match.start(AT + 1)
                self._places[key] = (self._places.get(key, (start,))[0], start)
        return self._places.get(sought, (-1, -1))[is_last]
