"""Log files of strace -> what they say of each thread. Files, and the parts of large ones, are read side by side."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, replace
from typing import NamedTuple

from distdiag.node.strace import lines, shape, targets, workers
from distdiag.node.strace.model import Call, Logs, Spin, ThreadLog, Trouble
from distdiag.node.strace.reader import Part, read_part
from distdiag.node.strace.tally import as_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeVar

    from distdiag.node.strace.model import Count, Place
    from distdiag.node.strace.shape import Shape
    from distdiag.node.strace.tally import Tally

    Row = TypeVar("Row", Count, Place)

PART_BYTES = 32 * 1024 * 1024
"""Larger files are read in parts of this size, if a part can be understood without those before it."""
_WORTH_BYTES = 8 * 1024 * 1024
"""Less is read sooner than a process begins its work."""
_DAY_S = 86400.0
_SUFFIX = re.compile(r"\.(\d{1,7})$")


class _Span(NamedTuple):
    path: str
    looks: Shape
    start: int
    end: int


@dataclass(frozen=True)
class _Clock:
    """What the times of one file mean. `kind`: "day", "epoch", "file" (since its beginning: -r), or "" (none)."""

    kind: str
    first_s: float
    shift_s: float = 0.0

    def at(self, at_s: float | None) -> float | None:
        """Give a time of the file on the clock of all; a time of day before the first one is of the next day."""
        if at_s is None:
            return None
        # Lines of several threads may be a little out of order.
        wrapped = self.kind == "day" and at_s < self.first_s - 60
        return at_s + self.shift_s + (_DAY_S if wrapped else 0.0)


def read_logs(paths: Sequence[str], *, width: int | None = None) -> Logs:
    """Read logs of strace, whatever its version and options.

    Args:
        paths: files, or folders of which all logs are read.
        width: how many processes read side by side; by default one for each processor, 4 at most.
    """
    spans: list[_Span] = []
    errors: list[tuple[str, str]] = []
    for path in dict.fromkeys(paths):
        found, wrong = _in_folder(path) if os.path.isdir(path) else _in_file(path)
        spans += found
        errors += wrong
    parts: dict[str, Part] = {}
    looks = {span.path: span.looks for span in spans}
    for part in _read(list(dict.fromkeys(spans)), errors, width):
        if part.path in parts:
            parts[part.path].merge(part)
        else:
            parts[part.path] = part
    return Logs(tuple(_threads(list(parts.values()), looks)), tuple(errors))


def _in_folder(folder: str) -> tuple[list[_Span], list[tuple[str, str]]]:
    spans: list[_Span] = []
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            spans += _in_file(os.path.join(root, name))[0]
    return spans, [] if spans else [(folder, "no log of strace in it")]


def _in_file(path: str) -> tuple[list[_Span], list[tuple[str, str]]]:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return [], [(path, "not a file")]
        with open(path, "rb") as file:
            looks = shape.sniff(file.read(shape.SNIFFED_BYTES))
    except OSError as error:
        return [], [(path, error.strerror or str(error))]
    if isinstance(looks, str):
        return [], [(path, looks)]
    step = status.st_size if looks.in_order else PART_BYTES
    starts = range(0, status.st_size, step)
    return [_Span(path, looks, start, min(start + step, status.st_size)) for start in starts], []


def _read(spans: list[_Span], errors: list[tuple[str, str]], width: int | None) -> Iterator[Part]:
    """Read all spans, in their order; small files are read together, by one process."""
    jobs: list[list[_Span]] = []
    room = 0
    for span in spans:
        size = span.end - span.start
        if size > room:
            jobs.append([])
            room = _WORTH_BYTES
        jobs[-1].append(span)
        room -= size
    for job, results in zip(jobs, workers.run(_read_spans, jobs, width=width)):
        if isinstance(results, str):
            errors += [(path, results) for path in dict.fromkeys(span.path for span in job)]
            continue
        for span, result in zip(job, results):
            if isinstance(result, Part):
                yield result
            else:
                errors.append((span.path, result))


def _read_spans(spans: list[_Span]) -> list[Part | str]:
    found: list[Part | str] = []
    for span in spans:
        try:
            found.append(read_part(*span))
        except OSError as error:
            found.append(error.strerror or str(error))
    return found


def _threads(parts: list[Part], looks: dict[str, Shape]) -> Iterator[ThreadLog]:
    clocks = _clocks(parts, looks)
    pids = _Processes(parts)
    newest: dict[str, float] = {}
    for part in parts:
        clock = clocks[part.path]
        for tally in part.tallies.values():
            at_s = clock.at(lines.seconds(tally.newest))
            if at_s is not None:
                key = clock.kind if clock.kind != "file" else part.path
                newest[key] = max(at_s, newest.get(key, at_s))
    for part in parts:
        clock = clocks[part.path]
        n_unread = part.n_unread
        for written, tally in part.tallies.items():
            tid = _tid(part.path, written)
            now_s = newest.get(clock.kind if clock.kind != "file" else part.path)
            yield replace(
                _thread(tally, clock, now_s), path=part.path, tid=tid, pid=pids.of(part.path, tid), n_unread=n_unread
            )
            n_unread = 0


def _thread(tally: Tally, clock: _Clock, newest_s: float | None) -> ThreadLog:
    names, places = tally.names(), tally.places()
    began_s = clock.at(lines.seconds(tally.last.at)) if tally.last else None
    lasts = tally.state in ("blocked", "detached") and began_s is not None and newest_s is not None
    return ThreadLog(
        path="",
        pid=None,
        tid=None,
        comm=tally.comm.decode("utf-8", "replace"),
        first_at_s=clock.at(lines.seconds(tally.first)),
        last_at_s=clock.at(lines.seconds(tally.newest)),
        n_lines=tally.n_lines,
        n_calls=tally.n_calls,
        n_unread=0,
        state=tally.state,
        blocked_s=max(0.0, (newest_s or 0.0) - (began_s or 0.0)) if lasts else None,
        last=_call(as_call(tally.last), clock) if tally.last else None,
        calls=_by_time([total.as_count(name) for name, total in names.items()]),
        troubles=tuple(_troubles(tally, clock)),
        places=_by_time([total.as_place(where) for where, total in places.items()]),
        slowest=tuple(_call(call, clock) for call in tally.slowest),
        spins=tuple(sorted(_spins(tally, timed=bool(tally.first)), key=lambda one: -one.count)),
        signals=tuple(tally.signals.items()),
        programs=tuple(tally.programs),
    )


def _by_time(rows: list[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (-(row.time_s or 0.0), -row.count)))


def _call(call: Call, clock: _Clock) -> Call:
    return replace(call, at_s=clock.at(call.at_s))


def _troubles(tally: Tally, clock: _Clock) -> Iterator[Trouble]:
    for trouble, first, last in tally.troubles.gravest():
        first_s, last_s = clock.at(lines.seconds(first)), clock.at(lines.seconds(last))
        yield replace(trouble, first_at_s=first_s, last_at_s=last_s)


def _spins(tally: Tally, *, timed: bool) -> Iterator[Spin]:
    for (head, _), run in tally.runs.items():
        name, _, args = head.partition(b"(")
        spin = run.spin(name.decode(), targets.about(name, args)[1], timed=timed)
        if spin is not None:
            yield spin


def _clocks(parts: list[Part], looks: dict[str, Shape]) -> dict[str, _Clock]:
    """Find out what the times of each file mean; of two that began 12 hours apart, one began after midnight."""
    found = {}
    for part in parts:
        firsts = [one.first for one in part.tallies.values() if one.first]
        kind = ("file" if looks[part.path].step else "day" if b":" in firsts[0] else "epoch") if firsts else ""
        seconds = [lines.seconds(first) or 0.0 for first in firsts]
        # Threads that began after midnight have the smaller times.
        late = kind == "day" and seconds and max(seconds) - min(seconds) > _DAY_S / 2
        chosen = min(one for one in seconds if not late or one > _DAY_S / 2) if seconds else 0.0
        found[part.path] = _Clock(kind, chosen)
    days = [clock.first_s for clock in found.values() if clock.kind == "day"]
    if days and max(days) - min(days) > _DAY_S / 2:
        for path, clock in found.items():
            if clock.kind == "day" and clock.first_s < _DAY_S / 2:
                found[path] = replace(clock, shift_s=_DAY_S)
    return found


def _tid(path: str, written: bytes) -> int | None:
    """Give the thread's id: as on its lines, or else from the name of the file (-ff)."""
    if written:
        return int(written)
    suffix = _SUFFIX.search(path)
    return int(suffix[1]) if suffix else None


class _Processes:
    """Which thread is of which process: known from who started whom, in the logs of one folder."""

    def __init__(self, parts: list[Part]) -> None:
        self._started: dict[tuple[str, int], tuple[int | None, bool]] = {}
        self._executed: set[tuple[str, int | None]] = set()
        self._found: dict[tuple[str, int], int | None] = {}
        for part in parts:
            folder = os.path.dirname(part.path)
            for written, tally in part.tallies.items():
                tid = _tid(part.path, written)
                if tally.programs:
                    self._executed.add((folder, tid))
                for child, is_thread in tally.children.items():
                    self._started[folder, child] = (tid, is_thread)

    def of(self, path: str, tid: int | None) -> int | None:
        """Give the process of a thread; None where the logs do not tell."""
        folder, way = os.path.dirname(path), dict[int, None]()
        found = None
        while tid is not None and tid not in way:
            if (folder, tid) in self._found:
                found = self._found[folder, tid]
                break
            way[tid] = None
            parent, is_thread = self._started.get((folder, tid), (None, False))
            if not is_thread:
                known = (folder, tid) in self._started or (folder, tid) in self._executed
                found = tid if known else None
                break
            tid = parent
        self._found.update(((folder, one), found) for one in way)
        return found
