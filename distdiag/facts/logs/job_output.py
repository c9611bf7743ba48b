"""Files written by a job: the targets of its processes' descriptors 1 and 2, also through pipes."""

from __future__ import annotations

import contextlib
import os
import re
import stat

from distdiag.facts import machine
from distdiag.facts.text import printable
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_MOST_FILES = 256
_MOST_ENDED = 64
_BAR_BYTES = 8192
_BAR = re.compile(
    r"(?P<name>[^\r\n|]{0,80}?):?\s*(?P<percent>\d{1,3})%\|[^|]{0,200}\|\s*(?P<done>[\d.]+\w?)/(?P<total>[\d.]+\w?)\s*"
    r"\[(?P<spent>[\d:]+)<(?P<left>[\d:?]+)"
)
"""A progress bar of tqdm, by its default bar_format."""


@record
class OutputFile:
    """A regular file that a job writes to. `rank`: its only writer, if a single rank."""

    path: str
    open_as: str
    rank: int | None = None


@record
class Bar:
    """The last progress bar in a rank's output. `left_s`: remaining time at this rate; `age_s`: of the file."""

    rank: int | None
    path: str
    name: str
    percent: int
    done: str
    total: str
    spent_s: float
    left_s: float | None
    age_s: float


def find(ranks: Mapping[int, int | None], launchers: Iterable[int]) -> tuple[list[OutputFile], list[str]]:
    """Find the files that ranks (by pid) and launchers write to, and descriptions of their other outputs."""
    owners: dict[tuple[int, int], list[int]] = {}
    names: dict[tuple[int, int], tuple[str, str]] = {}
    elsewhere: dict[str, None] = {}
    launchers = list(launchers)
    waiting = [*ranks, *launchers]
    seen: set[int] = set(waiting)
    pipes: set[str] = set()
    while waiting:
        pid = waiting.pop(0)
        for fd in (1, 2):
            link = f"/proc/{pid}/fd/{fd}"
            try:
                target, status = os.readlink(link), os.stat(link)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                key = status.st_dev, status.st_ino
                names.setdefault(key, (target, link))
                owners.setdefault(key, []).append(pid)
            elif stat.S_ISFIFO(status.st_mode):
                for reader in _readers(target) if target not in pipes else ():
                    if reader not in seen:
                        seen.add(reader)
                        waiting.append(reader)
                        _add_files(reader, names, owners)
                pipes.add(target)
                elsewhere["a pipe to another process"] = None
            else:
                elsewhere[printable(target)] = None
    files = [_file(names[key], owners[key], ranks) for key in names]
    return files[:_MOST_FILES], list(elsewhere)


def _file(named: tuple[str, str], pids: list[int], ranks: Mapping[int, int | None]) -> OutputFile:
    path, link = named
    own = {ranks.get(pid) for pid in pids}
    rank = next(iter(own)) if len(own) == 1 else None
    try:
        there, here = os.stat(path), os.stat(link)
        same = (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
    except OSError:
        same = False  # deleted since, or on another file system: the descriptor still works
    return OutputFile(path, path if same else link, rank)


def of_ended(files: Iterable[OutputFile], ended: Iterable[int], since_s: float) -> list[OutputFile]:
    """Find the files of ranks that have no process any more, by the number in the names of all living ranks' files.

    Only files written after `since_s` (seconds since 1970): those of an earlier job may have the same names.
    """
    known = {file.rank: file.path for file in files if file.rank is not None}
    first, path = next(iter(known.items()), (0, ""))
    numbers = [match for match in re.finditer(r"\d+", path) if int(match[0]) == first]
    if not numbers or "/" in path[numbers[-1].end() :].partition("/")[2]:
        return []
    before, width, after = path[: numbers[-1].start()], len(numbers[-1][0]), path[numbers[-1].end() :]
    if any(own != f"{before}{rank:0{width}d}{after}" for rank, own in known.items()):
        return []
    found = []
    for rank in sorted(ended)[:_MOST_ENDED]:
        name = f"{before}{rank:0{width}d}{after}"
        with contextlib.suppress(OSError):
            status = os.stat(name)
            if stat.S_ISREG(status.st_mode) and status.st_mtime > since_s:
                found.append(OutputFile(name, name, rank))
    return found


def _readers(pipe: str) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and machine.link_target(f"/proc/{entry}/fd/0") == pipe:
            yield int(entry)


def _add_files(
    pid: int, names: dict[tuple[int, int], tuple[str, str]], owners: dict[tuple[int, int], list[int]]
) -> None:
    """Add the files that a reader of a pipe writes to besides its standard streams."""
    for entry in machine.names_in(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{entry}"
        try:
            status, target = os.stat(link), os.readlink(link)
            is_written = stat.S_IMODE(os.lstat(link).st_mode) & 0o200
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and is_written and entry not in ("0", "1", "2"):
            key = status.st_dev, status.st_ino
            names.setdefault(key, (target, link))
            owners.setdefault(key, []).append(pid)


def sizes(files: Iterable[OutputFile]) -> dict[str, int]:
    """Return the size in bytes of each file that still exists, by path."""
    found = {}
    for file in files:
        with contextlib.suppress(OSError):
            found[file.path] = os.stat(file.open_as).st_size
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[str, ...]:
    """Return the paths that grew between two calls of `sizes`; repeated warnings count as growth."""
    return tuple(path for path, size in after.items() if size > before.get(path, size))


def last_bar(file: OutputFile, now_s: float) -> Bar | None:
    """Find the last progress bar at the end of a file; None without one."""
    try:
        with open(os.open(file.open_as, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as data:
            status = os.fstat(data.fileno())
            data.seek(max(0, status.st_size - _BAR_BYTES))
            text = data.read(_BAR_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    bars = list(_BAR.finditer(text))
    if not bars:
        return None
    last = bars[-1]
    left = last["left"]
    return Bar(
        rank=file.rank,
        path=printable(file.path),
        name=printable(last["name"].strip()[-60:]),
        percent=int(last["percent"]),
        done=last["done"],
        total=last["total"],
        spent_s=_seconds(last["spent"]),
        left_s=None if "?" in left else _seconds(left),
        age_s=max(0.0, now_s - status.st_mtime),
    )


def _seconds(text: str) -> float:
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + (int(part) if part.isdigit() else 0)
    return total
