"""Facts of one node: the tracer's records of each process, and the process's state. Nothing is judged here."""

from __future__ import annotations

import linecache
import os
import re
import time
from functools import cache

from distdiag.facts import machine
from distdiag.facts.process import procs
from distdiag.facts.recorder import line_trace_file
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_FILES = 4096
_SOURCE = 200


@record
class Ask:
    """`paths`: files or folders, empty: trace py's own. `last`: lines per thread. `count`: a pattern or ""."""

    paths: Sequence[str]
    last: int
    count: str


@record
class Line:
    """One executed line. `at_s` in seconds since 1970, of this line or of one a few quick lines before it.

    `kind` is "user", "library" or "stdlib". `returned`: a call made from it had just returned. `changed`: the file was
    written after the process began, so `source` may be another line.
    """

    at_s: float
    file: str
    line: int
    function: str
    kind: str
    source: str
    returned: bool
    changed: bool


@record
class Thread:
    """One thread. `last`: its last lines, the newest last; `user`: the last line of the user's own code.

    `count`: number of recorded lines matching the pattern.
    """

    tid: int
    name: str
    main: bool
    ended: bool
    kept: int
    last: tuple[Line, ...]
    user: Line | None
    count: int


@record
class Process(line_trace_file.About):
    """One process. `state`: "running", "ended", "raised" (`error`, at `error_at`) or "died"; `age_s` of its last line.

    `ended_s` is a wall-clock time. `untold` threads had no room in the file. `owner`: the file's, if another user.
    """

    path: str
    state: str
    error_at: Line | None
    ended_s: float | None
    age_s: float | None
    threads: tuple[Thread, ...]
    untold: int
    owner: str = ""


@record
class NodeLines:
    """All files found on a node in `searched`.

    `unread`: (path, why); `not_ours`: likewise, for files and folders of other users, whose content is not trusted.
    """

    host: str
    processes: tuple[Process, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    not_ours: tuple[tuple[str, str], ...] = ()
    searched: tuple[str, ...] = ()


def facts() -> NodeLines:
    """Return the host name; `more` reads the files, once per request."""
    return NodeLines(machine.host_name())


def more(ask: Ask, tell: Callable[[NodeLines], None]) -> None:
    """Read all files."""
    linecache.checkcache()
    searched = tuple(ask.paths or (line_trace_file.default_folder(),))
    processes: list[Process] = []
    unread: list[tuple[str, str]] = []
    not_ours: list[tuple[str, str]] = []
    for path, owners in _find(searched, not ask.paths, unread, not_ours)[:_MOST_FILES]:
        try:
            processes.append(_Reader(line_trace_file.read(path, owners), ask).process(path))
        except line_trace_file.NotOurs as error:
            not_ours.append((path, str(error)))
        except line_trace_file.NotARing as error:
            unread.append((path, str(error)))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            unread.append((path, f"invalid header: {error!r}"))
        except OSError as error:
            unread.append((path, error.strerror or str(error)))
    tell(NodeLines(machine.host_name(), tuple(processes), tuple(unread), tuple(not_ours), searched))


def _find(
    paths: Sequence[str], by_default: bool, unread: list[tuple[str, str]], not_ours: list[tuple[str, str]]
) -> list[tuple[str, tuple[int, ...] | None]]:
    """List the files, the newest first, also of folders below, and the required owner of each.

    None is any owner, for a file named by the user. In a folder named by the user, the folder's owner is accepted too,
    as when root reads a user's job.
    """
    found: dict[str, tuple[int, ...] | None] = {}
    for path in paths:
        if not os.path.isdir(path):
            if os.path.exists(path):
                found[path] = None
            else:
                unread.append((path, "No such file or directory"))
            continue
        me, owner = os.geteuid(), os.stat(path).st_uid
        if by_default and (os.path.islink(path) or owner != me):
            is_link = os.path.islink(path)
            not_ours.append((path, "a symbolic link" if is_link else f"owned by another user (uid {owner})"))
            continue
        walk = os.walk(path, onerror=lambda error: unread.append((str(error.filename), error.strerror or "")))
        names = (os.path.join(folder, name) for folder, _, inside in walk for name in inside)
        found.update((name, (me, owner)) for name in names if name.endswith(line_trace_file.SUFFIX))
    return sorted(found.items(), key=lambda item: -_modified_s(item[0]))


@cache
def _is_file(path: str) -> bool:
    """Return whether source may be read there: reading a pipe, planted by another user, would block."""
    return os.path.isfile(path)


_modified_s = cache(machine.modified_s)


class _Reader:
    """Reads one process's file, with the offset of its monotonic clock, and the source of its lines."""

    def __init__(self, ring: line_trace_file.RingFile, ask: Ask) -> None:
        self._ring, self._about, self._last = ring, ring.about, ask.last
        self._count = re.compile(ask.count) if ask.count else None
        self._to_wall = ring.about.began_s - ring.about.monotonic_s

    def process(self, path: str) -> Process:
        ring = self._ring
        threads = sorted(map(self._thread, ring.threads), key=lambda thread: not thread.main)
        newest = max((thread.last[-1].at_s for thread in threads if thread.last), default=0.0)
        return Process(
            **vars(self._about),
            path=path,
            state=self._state(),
            error_at=self._error_at(),
            ended_s=None if ring.ended_s is None else ring.ended_s + self._to_wall,
            age_s=max(0.0, time.time() - newest) if newest else None,
            threads=tuple(threads),
            untold=ring.untold_threads,
            owner="" if ring.owner == os.geteuid() else machine.user_name(ring.owner),
        )

    def _state(self) -> str:
        about = self._about
        if self._ring.ended_s is not None:
            return "raised" if about.error else "ended"
        proc = procs.read(about.pid) if about.boot == _boot() else None
        alive = proc is not None and proc.started == about.started and proc.state not in ("Z", "X")
        return "running" if alive else "died"

    def _thread(self, thread: line_trace_file.Thread) -> Thread:
        records = thread.records
        user = next((record for record in reversed(records) if record.code.kind == "user"), None)
        # A return to a line does not count.
        begun = (self._line(record) for record in records if not record.back) if self._count is not None else ()
        return Thread(
            tid=thread.tid,
            name=thread.name,
            main=thread.tid == self._about.pid,
            ended=thread.ended_s is not None,
            kept=len(records),
            last=tuple(self._line(record) for record in records[-self._last :]),
            user=None if user is None else self._line(user),
            count=sum(1 for line in begun if self._count is not None and self._count.search(_text(line))),
        )

    def _error_at(self) -> Line | None:
        """Return the line where an uncaught exception was raised."""
        if not self._about.raised_at or self._ring.ended_s is None:
            return None
        file, function, line = self._about.raised_at
        code = line_trace_file.Code(file, function, "user")
        return self._line(line_trace_file.Record(self._ring.ended_s, code, int(line), False))

    def _line(self, record: line_trace_file.Record) -> Line:
        file = record.code.file
        return Line(
            at_s=record.at_s + self._to_wall,
            file=file,
            line=record.line,
            function=record.code.function,
            kind=record.code.kind,
            source=linecache.getline(file, record.line).strip()[:_SOURCE] if _is_file(file) else "",
            returned=record.back,
            changed=_modified_s(file) > self._about.began_s,
        )


@cache
def _boot() -> str:
    return machine.read_text("/proc/sys/kernel/random/boot_id").strip()


def _text(line: Line) -> str:
    return f"{line.file}:{line.line} {line.function} {line.source}"
