"""Facts of one node: the tracer's records of each process, and the process's state. Nothing is judged here."""

from __future__ import annotations

import linecache
import os
import re
import time
from dataclasses import dataclass
from functools import cache

from distdiag.facts import line_trace_file, machine, procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

_MOST_FILES = 4096
_MOST_MATCHES = 1000
_SOURCE = 200


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Thread:
    """One thread. `last`: its last lines, the newest last; `user`: the last line of the user's own code.

    `matches`: lines matching the "grep" pattern; `count`: number of recorded lines matching the "count" pattern.
    """

    tid: int
    name: str
    main: bool
    ended: bool
    kept: int
    last: tuple[Line, ...]
    user: Line | None
    matches: tuple[Line, ...]
    count: int


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class NodeLines:
    """All files found on a node in `searched`.

    `unread`: (path, why); `not_ours`: likewise, for files and folders of other users, whose content is not trusted.
    `left_out`: number of files skipped because of the limit.
    """

    host: str
    processes: tuple[Process, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    left_out: int = 0
    not_ours: tuple[tuple[str, str], ...] = ()
    searched: tuple[str, ...] = ()


def facts(ask: dict[str, Any]) -> NodeLines:
    """Return the host name; `more` reads the files, once per request."""
    return NodeLines(machine.host_name())


def more(ask: dict[str, Any], tell: Callable[[NodeLines], None]) -> None:
    """Read all files.

    `ask`: {"paths": files or folders, if empty trace py's default, "last": lines per thread, "grep" and "count":
    patterns or ""}.
    """
    linecache.checkcache()
    search = _Search(ask["paths"])
    processes = []
    files = search.files()
    for path, owners in files[:_MOST_FILES]:
        try:
            processes.append(_Reader(line_trace_file.read(path, owners), ask).process(path))
        except line_trace_file.NotOurs as error:
            search.not_ours.append((path, str(error)))
        except line_trace_file.NotARing as error:
            search.unread.append((path, str(error)))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            search.unread.append((path, f"invalid header: {error!r}"))
        except OSError as error:
            search.unread.append((path, error.strerror or str(error)))
    tell(
        NodeLines(
            host=machine.host_name(),
            processes=tuple(processes),
            unread=tuple(search.unread),
            left_out=max(0, len(files) - _MOST_FILES),
            not_ours=tuple(search.not_ours),
            searched=search.paths,
        )
    )


class _Search:
    """Finds the files and the required owner of each: None (any owner) for a file named by the user.

    In a folder named by the user, the folder's owner is accepted too, as when root reads a user's job.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths or (line_trace_file.default_folder(),))
        self.unread: list[tuple[str, str]] = []
        self.not_ours: list[tuple[str, str]] = []
        self._by_default = not paths

    def files(self) -> list[tuple[str, tuple[int, ...] | None]]:
        """List the files, the newest first; directories are searched, also those below."""
        found: dict[str, tuple[int, ...] | None] = {}
        for path in self.paths:
            if os.path.isdir(path):
                found.update(self._in_folder(path))
            elif os.path.exists(path):
                found[path] = None
            else:
                self.unread.append((path, "No such file or directory"))
        return sorted(found.items(), key=lambda item: -_modified(item[0]))

    def _in_folder(self, path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        me, owner = os.geteuid(), os.stat(path).st_uid
        if self._by_default and (os.path.islink(path) or owner != me):
            what = "a symbolic link" if os.path.islink(path) else f"owned by another user (uid {owner})"
            self.not_ours.append((path, what))
            return
        walk = os.walk(path, onerror=lambda error: self.unread.append((str(error.filename), error.strerror or "")))
        for folder, _, names in walk:
            for name in names:
                if name.endswith(line_trace_file.SUFFIX):
                    yield os.path.join(folder, name), (me, owner)


@cache
def _is_file(path: str) -> bool:
    """Return whether source may be read there: reading a pipe, planted by another user, would block."""
    return os.path.isfile(path)


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


class _Reader:
    """Reads one process's file, with the offset of its monotonic clock, and the source of its lines."""

    def __init__(self, ring: line_trace_file.RingFile, ask: dict[str, Any]) -> None:
        self._ring, self._about, self._last = ring, ring.about, ask["last"]
        self._grep = re.compile(ask["grep"]) if ask["grep"] else None
        self._count = re.compile(ask["count"]) if ask["count"] else None
        self._to_wall = ring.about.began_s - ring.about.monotonic_s
        self._modified_at: dict[str, float] = {}

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
        searched = records if self._grep is not None or self._count is not None else ()
        begun = [self._line(record) for record in searched if not record.back]
        matches = [line for line in begun if self._grep is not None and self._grep.search(_text(line))]
        return Thread(
            tid=thread.tid,
            name=thread.name,
            main=thread.tid == self._about.pid,
            ended=thread.ended_s is not None,
            kept=len(records),
            last=tuple(self._line(record) for record in records[-self._last :]),
            user=None if user is None else self._line(user),
            matches=tuple(matches[-_MOST_MATCHES:]),
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
            changed=self._modified(file) > self._about.began_s,
        )

    def _modified(self, file: str) -> float:
        if file not in self._modified_at:
            self._modified_at[file] = _modified(file)
        return self._modified_at[file]


@cache
def _boot() -> str:
    return machine.read_text("/proc/sys/kernel/random/boot_id").strip()


def _text(line: Line) -> str:
    return f"{line.file}:{line.line} {line.function} {line.source}"
