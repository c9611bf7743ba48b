"""Counters of proc(5) that grow while a process works: processor time, bytes, page faults, file positions.

Two readings far enough apart show whether it is active. No call here waits for the lock of a memory map, so a process
in state D does not block the reading.
"""

from __future__ import annotations

import contextlib
import os
import re

from distdiag.facts import machine
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_TICKS = os.sysconf("SC_CLK_TCK")
_IO = re.compile(rb"rchar: (\d+)\nwchar: (\d+)\n(?:.*\n)*?read_bytes: (\d+)\nwrite_bytes: (\d+)")
_POSITION = re.compile(rb"pos:\s*(\d+)\nflags:\s*([0-7]+)")
_NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:", "/dmabuf:", "/anon_hugepage")
_ENOUGH = 16384
"""Larger than any file read here."""


@record
class Counters:
    """A process or a thread. `reaped_s`: processor seconds of its ended children. `started`: clock ticks after boot."""

    pid: int
    parent: int
    started: int
    comm: str
    cpu_s: float
    reaped_s: float
    faults: int


@record
class IoBytes:
    """Bytes through read and write calls, and through the block layer (also io_uring and mapped files)."""

    read: int = 0
    written: int = 0
    blocks_read: int = 0
    blocks_written: int = 0

    def since(self, before: IoBytes) -> tuple[int, int]:
        """Return the bytes read and written since, each by the counter that grew more."""
        read = max(self.read - before.read, self.blocks_read - before.blocks_read)
        return read, max(self.written - before.written, self.blocks_written - before.blocks_written)


@record
class Position:
    """The position of an open file. `writes`: it was opened for writing."""

    path: str
    at: int
    writes: bool


def table() -> dict[int, Counters]:
    """Read all processes."""
    return {found.pid: found for name in os.listdir("/proc") if name.isdigit() and (found := _counters(name, ""))}


def threads(pid: int) -> dict[int, Counters]:
    """Read the threads of a process; empty if it exited."""
    folder = f"{pid}/task/"
    return {found.pid: found for name in machine.names_in(f"/proc/{folder}") if (found := _counters(name, folder))}


def crowd() -> float:
    """Return the machine's runnable threads per core, at least 1."""
    fields = _read("/proc/loadavg").split()
    running = int(fields[3].partition(b"/")[0]) if len(fields) > 3 else 1
    return max(1.0, running / (os.cpu_count() or 1))


def thread(pid: int, tid: int) -> Counters | None:
    """Read one thread; None if it exited."""
    return _counters(str(tid), f"{pid}/task/")


def turns(pid: int) -> tuple[float, int]:
    """Return the processor seconds of the main thread, to the nanosecond, and its number of time slices."""
    words = _read(f"/proc/{pid}/schedstat").split()
    return (int(words[0]) / 1e9, int(words[2])) if len(words) == 3 else (0.0, 0)


def io_bytes(pid: int, tid: int | None = None) -> IoBytes | None:
    """Read the bytes of a process, or of one of its threads; None if exited or unreadable."""
    found = _IO.match(_read(f"/proc/{pid}/task/{tid}/io" if tid else f"/proc/{pid}/io"))
    return IoBytes(*map(int, found.groups())) if found is not None else None


def links(pid: int) -> dict[int, str]:
    """Read the targets of a process's descriptors; empty if it exited. Raises PermissionError."""
    return dict(_links(pid))


def visible_links(pid: int) -> dict[int, str]:
    """Read the targets of a process's descriptors; empty if it exited or is unreadable."""
    try:
        return links(pid)
    except PermissionError:
        return {}


def positions(pid: int, targets: dict[int, str]) -> dict[tuple[int, str], Position]:
    """Read the positions of open files, by (descriptor, path)."""
    found = {}
    for fd, path in targets.items():
        if not path.startswith("/") or path.startswith(_NO_FILES):
            continue
        match = _POSITION.match(_read(f"/proc/{pid}/fdinfo/{fd}"))
        if match is not None:
            found[fd, path] = Position(path, int(match[1]), bool(int(match[2], 8) & os.O_ACCMODE))
    return found


def _counters(name: str, folder: str) -> Counters | None:
    head, _, tail = _read(f"/proc/{folder}{name}/stat").rpartition(b")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    user, system, reaped_user, reaped_system = map(int, fields[11:15])
    return Counters(
        pid=int(name),
        parent=int(fields[1]),
        started=int(fields[19]),
        comm=head.partition(b"(")[2].decode("utf-8", "replace"),
        cpu_s=(user + system) / _TICKS,
        reaped_s=(reaped_user + reaped_system) / _TICKS,
        faults=int(fields[9]),
    )


def _links(pid: int) -> Iterator[tuple[int, str]]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    for name in names:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # closed since the listing
            yield int(name), os.readlink(f"/proc/{pid}/fd/{name}")


def _read(path: str) -> bytes:
    """Read a small file of /proc with three system calls: a third of those of Python's open()."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, _ENOUGH)
    except OSError:  # exited since it was opened
        return b""
    finally:
        os.close(file)
